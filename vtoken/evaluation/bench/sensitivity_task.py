"""The part of ``sensitivity`` that needs no model: block counts of vLLM's real scheduler, in a process of its own."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.evaluation.run_one import Emit, listen

COMMAND = (sys.executable, "-m", "vtoken.evaluation.bench.sensitivity_task")
POLICY = "random"
"""Victims anywhere in the prompt, without a look at the model: the hardest case for whole blocks."""


@dataclass(frozen=True)
class Points:
    """What to count: see ``count``."""

    points: list[dict[str, Any]]

    @property
    def vtoken(self) -> VTokenConfig:
        """Any: it only says that the plugin is loaded."""
        return VTokenConfig(**self.points[0]["settings"])

    def to_json(self) -> dict[str, Any]:
        return {"points": self.points}


def run(spec: dict[str, Any], emit: Emit) -> int:
    """Emit a "counted" event for each point, in order; returns the exit code."""
    for point in spec["points"]:
        emit(event="counted", **count(**point))
    return 0


def count(settings: dict[str, Any], block_size: int, lengths: list[int], outputs: int) -> dict[str, Any]:
    """Run requests on a pool with room for all, and count after every step in which all of them decode.

    Args:
        settings: of ``VTokenConfig``, beside the policy.
        block_size: slots per block.
        lengths: tokens of each prompt.
        outputs: tokens that each request produces.

    Returns:
        blocks_per_request: mean over steps; waste_ratio: F over all requests, mean over steps; tokens_evicted,
        tokens_moved, preemptions: of the whole run.
    """
    from vtoken.vllm_plugin import make_simulated_engine

    rng = np.random.default_rng(0)
    longest = max(lengths) + outputs
    engine = make_simulated_engine(
        VTokenConfig(policy=POLICY, **settings),
        num_blocks=2 * len(lengths) * -(-longest // block_size),
        block_size=block_size,
        max_model_len=longest,
        max_num_batched_tokens=max(sum(lengths), longest),
    )
    for n, length in enumerate(lengths):
        engine.add_request(f"request-{n}", rng.integers(1, 1 << 15, length).tolist(), outputs)
    held, waste = [], []
    while engine.has_unfinished():
        step = engine.step()
        pool = engine.snapshot()
        if len(step.produced) == pool.running == len(lengths):
            held.append(pool.held_blocks / len(lengths))
            waste.append(1 - pool.live_tokens / (pool.held_blocks * block_size))
    return {
        "blocks_per_request": float(np.mean(held)),
        "waste_ratio": float(np.mean(waste)),
        "tokens_evicted": pool.tokens_evicted,
        "tokens_moved": pool.tokens_moved,
        "preemptions": pool.preemptions,
    }


if __name__ == "__main__":
    sys.exit(listen(run))
