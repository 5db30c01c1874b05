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


@pytest.mark.parametrize("vtoken", [None, VTokenConfig(policy="streaming_llm", budget=70, reclaim="none")])
def test_live_tokens_block_by_block(tiny: Callable[[str], Path], vtoken: VTokenConfig | None) -> None:
    one, other = prompts((100, 40), 512)
    with running(tiny("llama-gqa"), vtoken, skip_tokenizer_init=True, enable_prefix_caching=False) as engine:
        engine.add_request("one", one, 8)
        engine.add_request("other", other, 8)
        engine.step()
        first = engine.live_per_block()
        engine.step()
        second = engine.live_per_block()
    if vtoken is None:
        assert first == {"one": [32, 32, 32, 4], "other": [32, 8]}
        assert second == {"one": [32, 32, 32, 5], "other": [32, 9]}
    else:
        # 31 of the 100 go, behind 4 sinks; then one for the new token, which is appended.
        assert first == {"one": [4, 29, 32, 4], "other": [32, 8]}
        assert second == {"one": [4, 28, 32, 5], "other": [32, 9]}
