"""How many requests a pool can hold to their ends: vLLM's real scheduler and vtoken's real worker, without a model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Run

BLOCK_SIZE = 16
BATCHED_TOKENS = 8192
PATIENCE = 32
"""Steps in which others only decode and somebody still waits, after which it is for want of blocks."""


@dataclass(frozen=True)
class Setting:
    """So many tokens of prompt and of output per request, at most ``budget`` of them kept, and the pool's blocks."""

    prompt: int
    outputs: int
    budget: int
    pool: int

    @property
    def full_blocks(self) -> int:
        """Of a request of which nothing is forgotten; its last token is never computed."""
        return -(-(self.prompt + self.outputs - 1) // BLOCK_SIZE)

    @property
    def packed_blocks(self) -> int:
        """The fewest that the kept tokens fit into."""
        return -(-min(self.budget, self.prompt + self.outputs - 1) // BLOCK_SIZE)

    @property
    def ideal(self) -> int:
        """Requests that ideal packing holds: all of them have their budget's tokens at the same time."""
        return self.pool // self.packed_blocks

    def scaled(self, part: int) -> "Setting":
        """The same, with everything divided by ``part``."""
        return Setting(self.prompt // part, self.outputs // part, self.budget // part, self.pool // part)

    def to_json(self) -> dict[str, int]:
        return {"prompt": self.prompt, "outputs": self.outputs, "budget": self.budget, "pool": self.pool}


def run_together(
    vtoken: dict[str, Any] | None, setting: dict[str, int], concurrency: int, max_concurrency: int = 64
) -> Run:
    """Submit so many requests at once and see whether all of them run, beside each other, to their ends.

    It breaks off when that has failed: a request is preempted, is refused, or waits although nobody's prompt is being
    computed any more, or until another one has ended.

    Args:
        vtoken: settings of ``VTokenConfig``; None for native vLLM.
        setting: fields of ``Setting``.
        concurrency: requests.
        max_concurrency: rows of the worker's batch.

    Returns:
        feasible and, if it is not, why; steps; peak_blocks; demand, the most blocks that the first 1, 2, ... requests
        held together after a step; tokens_evicted, tokens_moved, blocks_reclaimed.
    """
    from vtoken.vllm_plugin import make_simulated_engine

    lengths = Setting(**setting)
    engine = make_simulated_engine(
        VTokenConfig(**vtoken) if vtoken is not None else None,
        num_blocks=lengths.pool,
        block_size=BLOCK_SIZE,
        max_model_len=lengths.prompt + lengths.outputs,
        max_num_seqs=max(concurrency, max_concurrency),
        max_num_batched_tokens=BATCHED_TOKENS,
    )
    names = [f"r{n}" for n in range(concurrency)]
    for n, name in enumerate(names):
        engine.add_request(name, [n] * lengths.prompt, lengths.outputs)
    why, steps, waited, peak = "", 0, 0, 0
    demand = [0] * concurrency
    while not why and engine.has_unfinished():
        step = engine.step()
        steps += 1
        peak = max(peak, engine.held_blocks)
        demand = _most(demand, [engine.num_blocks_of(name) for name in names])
        waited = waited + 1 if engine.waiting and len(step.produced) == engine.running else 0
        if step.preempted:
            why = "a request is preempted"
        elif "error" in step.finished.values():
            why = "a request is refused"
        elif waited > PATIENCE or (step.finished and engine.waiting):
            why = "a request is not admitted"
    after = engine.snapshot()
    return {
        "concurrency": concurrency,
        "feasible": not why,
        "why": why,
        "steps": steps,
        "peak_blocks": peak,
        "demand": demand,
        "tokens_evicted": after.tokens_evicted,
        "tokens_moved": after.tokens_moved,
        "blocks_reclaimed": after.blocks_reclaimed,
    }


def find_capacity(
    way: str, vtoken: dict[str, Any] | None, setting: dict[str, int], pilot: int = 0, **known: Any
) -> Run:
    """The largest number of requests that run together to their ends.

    Args:
        way: name of the settings.
        vtoken, setting: as for ``run_together``.
        pilot: first look for it with everything divided by so much, which costs little, and begin there; 0 to begin in
            the middle.
        known: goes into the result.

    Returns:
        capacity, and every run.
    """
    lengths = Setting(**setting)
    most = lengths.ideal if vtoken is not None else lengths.pool // lengths.full_blocks
    guess = None
    if pilot:
        small = lengths.scaled(pilot)
        small_vtoken = None
        if vtoken is not None:
            small_vtoken = {**vtoken, "budget": small.budget, "interval": max(1, vtoken.get("interval", 1) // pilot)}
        guess = find_capacity(way, small_vtoken, small.to_json())["capacity"]
    runs: list[Run] = []

    def feasible(concurrency: int) -> bool:
        runs.append(run_together(vtoken, setting, concurrency))
        return bool(runs[-1]["feasible"])

    capacity = largest(feasible, most, guess)
    return {"part": "capacity", "way": way, "setting": setting, "capacity": capacity, "runs": runs, **known}


def measure_demand(way: str, vtoken: dict[str, Any] | None, setting: dict[str, int], concurrency: int) -> Run:
    """Blocks that the first 1, 2, ... requests take together where the pool never ends."""
    lengths = Setting(**setting)
    endless = replace(lengths, pool=concurrency * (lengths.full_blocks + 1))
    found = run_together(vtoken, endless.to_json(), concurrency)
    return {"part": "demand", "way": way, "setting": setting, **found}


def largest(holds: Callable[[int], bool], most: int, guess: int | None = None) -> int:
    """The largest number for which something holds, if it holds for all smaller ones and for no larger one.

    That it holds there, and does not for the next number, has both been asked when this returns (but for 0).

    Args:
        holds: the question, asked at most once for each number, from 1 on.
        most: where to begin, and to go on by halves.
        guess: where to begin instead, and to go on one by one.
    """
    start = max(1, most if guess is None else min(guess, most))
    if holds(start):
        while holds(start + 1):
            start += 1
        return start
    low, high = 0, start
    while high - low > 1:
        middle = (low + high) // 2 if guess is None else high - 1
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _most(before: list[int], blocks: list[int]) -> list[int]:
    """The larger of what was and of the sums over the first 1, 2, ... requests."""
    total, most = 0, []
    for one, held in zip(before, blocks, strict=True):
        total += held
        most.append(max(one, total))
    return most
