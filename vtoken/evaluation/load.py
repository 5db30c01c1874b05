"""Driving requests through an engine, all at once or so many at a time, with their timings and the pool in view."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vtoken.evaluation.workloads import Workload

IDLE_STEPS_BEFORE_GIVING_UP = 1000


class RunError(RuntimeError):
    """A request failed, or none could be scheduled; one sentence."""


class Snapshot(Protocol):
    """State of the block pool after a step; the last four count from the engine's start."""

    @property
    def held_blocks(self) -> int: ...
    @property
    def live_tokens(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def tokens_evicted(self) -> int: ...
    @property
    def tokens_moved(self) -> int: ...
    @property
    def blocks_reclaimed(self) -> int: ...


class Engine(Protocol):
    """The part of ``vtoken.vllm_plugin``'s engine that a measured run needs."""

    @property
    def block_size(self) -> int: ...
    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int, **settings: Any) -> None: ...
    def step(self) -> Sequence[Any]: ...
    def has_unfinished(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...


@dataclass
class Timing:
    """One request: seconds of the clock, and what it produced."""

    submitted: float
    first: float = 0.0
    last: float = 0.0
    count: int = 0
    token_ids: list[int] | None = None  # set when the request has finished


@dataclass(frozen=True)
class LoadProgress:
    """How far a load has come."""

    requests_done: int
    output_tokens: int
    running: int
    held_blocks: int


@dataclass
class Load:
    """What came of a load.

    Attributes:
        timings: by request, in the order given.
        ended: the time after each step, [steps].
        pool: (held blocks, live tokens, running, waiting) after each step, [steps, 4]; empty where nobody looked.
        start, end: from the first submission to the last token.
    """

    timings: list[Timing]
    start: float
    end: float
    ended: list[float] = field(default_factory=list)
    pool: list[tuple[int, int, int, int]] = field(default_factory=list)


def drive(
    engine: Engine,
    workloads: Sequence[Workload],
    concurrency: int | None = None,
    *,
    look: bool = True,
    report: Callable[[LoadProgress], None] | None = None,
    after_step: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Load:
    """Run all workloads to their ends.

    Args:
        engine: with no unfinished request.
        workloads: at least one.
        concurrency: so many are under way at a time, the next one coming when one ends; else all come at once.
        look: at the pool after every step, which takes the host a moment; a run that measures the host itself does
            without.
        report: called after every step, where the pool is looked at.
        after_step: called after every step, before the clock is read for the next one.
        clock: seconds.

    Raises:
        RunError: a request failed, or none could be scheduled.
    """
    waiting = list(reversed(workloads))
    timings: dict[str, Timing] = {}
    load = Load([], clock(), 0.0)
    done = idle = output = 0

    def submit(count: int) -> None:
        for _ in range(min(count, len(waiting))):
            work = waiting.pop()
            timings[work.request_id] = Timing(submitted=clock())
            settings = {"extra_args": work.extra_args} if work.extra_args else {}
            engine.add_request(work.request_id, work.prompt_token_ids, work.max_tokens, **settings)

    submit(concurrency or len(workloads))
    while engine.has_unfinished():
        entries = engine.step()
        now = clock()
        load.ended.append(now)
        ended = 0
        for entry in entries:
            timing = timings[entry.request_id]
            if timing.count == 0:
                timing.first = now
            timing.last = now
            output += len(entry.token_ids) - timing.count
            timing.count = len(entry.token_ids)
            if entry.finished:
                ended += 1
                timing.token_ids = entry.token_ids
                if entry.finish_reason not in ("length", "stop"):
                    raise RunError(f"request {entry.request_id} ended early: {entry.finish_reason}")
        done += ended
        if look:
            state = engine.snapshot()
            load.pool.append((state.held_blocks, state.live_tokens, state.running, state.waiting))
            idle = 0 if entries or state.running else idle + 1
            if report:
                report(LoadProgress(done, output, state.running, state.held_blocks))
        else:
            idle = 0 if entries else idle + 1
        if idle >= IDLE_STEPS_BEFORE_GIVING_UP:
            left = engine.snapshot().waiting
            raise RunError(f"none of the {left} waiting requests can be scheduled; use a larger block budget.")
        if after_step:
            after_step()
        submit(ended if concurrency else 0)
    missing = [name for name, timing in timings.items() if timing.token_ids is None]
    if missing:
        raise RunError(f"request {missing[0]} ended without a result ({len(missing)} in all)")
    load.timings = list(timings.values())
    load.end = max(timing.last for timing in load.timings)
    return load
