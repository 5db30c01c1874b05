"""Block counts of vLLM's real scheduler and block pool without a model, in a process of their own."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.evaluation.child import run_child
from vtoken.evaluation.run_one import Emit, listen

COMMAND = (sys.executable, "-m", "vtoken.evaluation.bench.counted")
POLICY = "random"
"""Victims anywhere in the prompt, without a look at the model: the hardest case for whole blocks."""


def count_all(points: Sequence[dict[str, Any]], tick: Callable[[], None]) -> list[dict[str, Any]]:
    """What ``count`` returns for each of the points, its arguments; ``tick`` is called for each that is done."""
    found: list[dict[str, Any]] = []

    def take(event: dict[str, Any]) -> None:
        found.append({name: value for name, value in event.items() if name != "event"})
        tick()

    run_child(_Points(list(points)), take, COMMAND)
    return found


def count(
    settings: dict[str, Any] | None,
    block_size: int,
    lengths: list[int],
    outputs: int,
    shared: int = 0,
    degree: int = 1,
) -> dict[str, Any]:
    """Run requests on a pool with room for all, and count after every step in which all of them decode.

    Args:
        settings: of ``VTokenConfig``, beside the policy; None for native vLLM.
        block_size: slots per block.
        lengths: tokens of each prompt.
        outputs: tokens that each request produces, at least 2.
        shared: first tokens of a prompt that the ``degree`` requests of its group have in common; above 0 there is a
            prefix cache.

    Returns:
        blocks_per_request: mean over steps; waste_ratio: F over all requests, mean over steps; hits: tokens of each
        prompt that came from the cache; tokens_evicted, tokens_moved, preemptions: of the whole run.
    """
    from vtoken.vllm_plugin import make_simulated_engine

    longest = max(lengths) + outputs
    engine = make_simulated_engine(
        None if settings is None else VTokenConfig(policy=POLICY, **settings),
        num_blocks=2 * len(lengths) * -(-longest // block_size),
        block_size=block_size,
        max_model_len=longest,
        max_num_seqs=len(lengths),
        # All prompts in one step, as if they had queued.
        max_num_batched_tokens=max(sum(lengths), longest),
        enable_prefix_caching=shared > 0,
    )
    prompts = dict(_prompts(lengths, shared, degree))
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, outputs)
    held, waste = [], []
    computed: dict[str, int] = {}
    while engine.has_unfinished():
        step = engine.step()
        computed = computed or step.scheduled
        pool = engine.snapshot()
        if len(step.produced) == pool.running == len(lengths):
            held.append(pool.held_blocks / len(lengths))
            waste.append(1 - pool.live_tokens / (pool.held_blocks * block_size))
    return {
        "blocks_per_request": float(np.mean(held)),
        "waste_ratio": float(np.mean(waste)),
        "hits": [len(prompt) - computed[name] for name, prompt in prompts.items()],
        "tokens_evicted": pool.tokens_evicted,
        "tokens_moved": pool.tokens_moved,
        "preemptions": pool.preemptions,
    }


def run(spec: dict[str, Any], emit: Emit) -> int:
    """Emit a "counted" event for each point, in order; returns the exit code."""
    for point in spec["points"]:
        emit(event="counted", **count(**point))
    return 0


@dataclass(frozen=True)
class _Points:
    points: list[dict[str, Any]]
    vtoken: VTokenConfig | None = None  # without the plugin; a simulated engine loads what it needs

    def to_json(self) -> dict[str, Any]:
        return {"points": self.points}


def _prompts(lengths: Sequence[int], shared: int, degree: int) -> Iterator[tuple[str, list[int]]]:
    rng = np.random.default_rng(0)
    common: list[int] = []
    for n, length in enumerate(lengths):
        if n % degree == 0:
            common = rng.integers(1, 1 << 15, shared).tolist()
        yield f"request-{n}", common + rng.integers(1, 1 << 15, length - shared).tolist()


if __name__ == "__main__":
    sys.exit(listen(run))
