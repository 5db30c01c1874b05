"""What an engine says of its pool where requests share blocks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import prompts, running

from vtoken.config import VTokenConfig


@pytest.mark.parametrize("vtoken", [None, VTokenConfig(policy="streaming_llm", budget=900)], ids=["native", "vtoken"])
def test_a_shared_token_counts_once(tiny: Callable[[str], Path], vtoken: VTokenConfig | None) -> None:
    trunk, one, other = prompts((64, 10, 20), 512)
    with running(tiny("llama-gqa"), vtoken, skip_tokenizer_init=True, enable_prefix_caching=True) as engine:
        engine.add_request("one", trunk + one, 8)
        engine.step()
        engine.add_request("other", trunk + other, 8)
        engine.step()
        now = engine.snapshot()
    # Two shared blocks and one each; one has computed an output token more.
    assert (now.running, now.held_blocks, now.live_tokens) == (2, 2 + 1 + 1, 64 + (10 + 1) + 20)
