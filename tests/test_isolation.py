"""One request's K/V never reaches another's output: canaries whose cache is filled with a number that would show."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer, Job, prompts, running

from vtoken.config import VTokenConfig
from vtoken.kernels.layout import vec_views

CANARY = 3e4
BLOCKS = 14
"""So few that whatever one request gives back is another's in the next step."""
Tiny = Callable[[str], Path]
SETTINGS = {"sinks": 4, "recent": 16, "observation_window": 16, "budget": 40}
PACKING = {"theta_f": 0.0, "low_watermark": 1.0, "check_interval": 1, "headroom": 0.1}


def is_canary(req_id: str) -> bool:
    return req_id.startswith("canary")


class Canaries:
    """Before every forward, writes the number into all blocks that canaries alone hold, tokens, holes and tails alike.

    Args:
        engine: a real one, in this process.
        spare: how many blocks of others are filled as well, to see that it shows.
    """

    def __init__(self, engine: Any, spare: int = 0) -> None:
        self._runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._stock = self._runner._model_forward
        self._runner._model_forward = self._forward
        layers = self._runner.compilation_config.static_forward_context.values()
        self._caches = [vec_views(layer.kv_cache) for layer in layers]
        self._spare = spare
        self._owner: dict[int, str] = {}
        self.changes_of_owner = 0

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        held = {r: request.block_ids[0] for r, request in self._runner.requests.items()}
        others = {block for req_id, blocks in held.items() if not is_canary(req_id) for block in blocks}
        filled = {block for req_id, blocks in held.items() if is_canary(req_id) for block in blocks} - others
        filled |= set(sorted(others)[: self._spare])
        for keys, values in self._caches:
            keys[sorted(filled)] = values[sorted(filled)] = CANARY
        for req_id, blocks in held.items():
            for block in blocks:
                was = self._owner.get(block, req_id)
                self.changes_of_owner += is_canary(was) != is_canary(req_id)
                self._owner[block] = req_id
        return self._stock(*args, **kwargs)


def arrivals() -> Iterator[Job]:
    """Canaries and others in turn, short and long; the others share the beginnings of their prompts."""
    trunk, *own = prompts((96, *(20 + 17 * n % 90 for n in range(40))), 512)
    for n, prompt in enumerate(own):
        yield Job(
            f"{'canary' if n % 2 else 'other'}{n}", prompt if n % 2 else trunk[: 32 * (n % 4)] + prompt, 6 + n % 9
        )


def run(model: Path, config: VTokenConfig, watch: Callable[[Any], Any] | None) -> tuple[dict[str, Answer], Any, Any]:
    answers: dict[str, Answer] = {}
    with running(
        model,
        config,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        num_gpu_blocks_override=BLOCKS,
        max_model_len=256,
        max_num_batched_tokens=96,
    ) as engine:
        watching = watch(engine) if watch is not None else None
        for job in arrivals():
            engine.add_request(job.name, job.prompt, job.max_tokens, logprobs=-1)
        while engine.has_unfinished():
            for progress in engine.step():
                answers[progress.request_id] = Answer(progress.token_ids, progress.logprobs or [])
        snapshot = engine.snapshot()
    return {name: answer for name, answer in answers.items() if not is_canary(name)}, watching, snapshot


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "h2o"},
        {"policy": "streaming_llm", "shared_blocks": "keep"},
        {"policy": "random", "reclaim": "pack", **PACKING},
    ],
    ids=["fill", "masked", "pack"],
)
def test_not_a_bit_of_another_s_output_depends_on_it(tiny: Tiny, options: dict[str, Any]) -> None:
    config = VTokenConfig(**{**SETTINGS, **options})
    clean, _, before = run(tiny("llama-gqa"), config, None)
    filled, canaries, after = run(tiny("llama-gqa"), config, Canaries)
    # Which tokens a canary forgets depends on its cache, how many does not.
    assert (
        replace(before, tokens_moved=0) == replace(after, tokens_moved=0)
        and after.tokens_evicted > 500
        and after.blocks_reclaimed > 20
    )
    assert canaries.changes_of_owner > 50
    assert len(clean) == 20 and all(
        torch.isfinite(torch.tensor(list(a.logits[-1].values()))).all() for a in clean.values()
    )
    assert {name: answer.token_ids for name, answer in filled.items()} == {n: a.token_ids for n, a in clean.items()}
    assert {name: answer.logits for name, answer in filled.items()} == {n: a.logits for n, a in clean.items()}


def test_one_block_of_another_would_show(tiny: Tiny) -> None:
    config = VTokenConfig(**SETTINGS, policy="streaming_llm")
    clean, _, _ = run(tiny("llama-gqa"), config, None)
    spoiled, _, _ = run(tiny("llama-gqa"), config, lambda engine: Canaries(engine, spare=1))
    assert any(spoiled[name].logits != clean[name].logits for name in clean)
