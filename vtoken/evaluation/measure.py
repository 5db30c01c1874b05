"""Running a load through an engine step by step, and the figures that come out of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np

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
    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None: ...
    def step(self) -> Sequence[Any]: ...
    def has_unfinished(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True)
class RunResult:
    """The figures of one run. Field names are the keys of the JSON report.

    ``peak_*`` are over all steps, as they end: blocks that a step takes and gives back are not seen.
    ``mean_blocks`` and ``mean_running`` are means over the steps after which requests were still waiting, when the
    pool is what limits the run; a load that never waits gets the mean over all steps. ``waste_ratio`` is the mean
    of F = 1 - live / (held * block size) over all steps that end with blocks held. ``blocks_reclaimed`` counts
    blocks given back before their request ended. Times to first token count from submission, times per output
    token are a request's mean after its first token; percentiles are over requests. ``needle_hits`` is the number
    of hidden numbers found; needles count in no other figure.
    """

    peak_blocks: int
    mean_blocks: float
    waste_ratio: float
    tokens_evicted: int
    tokens_moved: int
    blocks_reclaimed: int
    peak_running: int
    mean_running: float
    preemptions: int
    output_tokens: int
    output_tokens_per_s: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    needle_hits: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come."""

    requests_done: int
    output_tokens: int
    running: int
    held_blocks: int


@dataclass
class _Timing:
    submitted: float
    first: float = 0.0
    last: float = 0.0
    count: int = 0
    token_ids: list[int] | None = None  # set when the request has finished


def measure(
    engine: Engine,
    workloads: Sequence[Workload],
    needles: Sequence[Workload] = (),
    decode: Callable[[list[int]], str] | None = None,
    report: Callable[[RunProgress], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> RunResult:
    """Submit all workloads at once, run them to the end, then ask the needles one by one.

    Args:
        engine: with no unfinished request.
        workloads: what is measured; at least one.
        needles: asked after the load has drained, so that they disturb none of its figures.
        decode: token ids to text, for the needles.
        report: called after every step of the load.
        clock: seconds.

    Raises:
        RunError: a request failed, or none could be scheduled.
    """
    before = engine.snapshot()
    start = clock()
    timings, samples, end = _run(engine, workloads, report, clock)
    after = engine.snapshot()
    hits = sum(_answers(engine, needle, decode, clock) for needle in needles) if decode else 0

    held, live, running, waiting = np.array(samples, dtype=np.int64).T
    limited = waiting > 0 if np.any(waiting > 0) else np.ones_like(waiting, dtype=bool)
    occupied = held > 0
    waste = 1.0 - live[occupied] / (held[occupied] * engine.block_size)
    tokens = np.array([timing.count for timing in timings])
    first = np.array([timing.first - timing.submitted for timing in timings])
    several = tokens > 1
    per_token = np.array([timing.last - timing.first for timing in timings])[several] / (tokens[several] - 1)
    return RunResult(
        peak_blocks=int(held.max()),
        mean_blocks=float(held[limited].mean()),
        waste_ratio=float(waste.mean()) if waste.size else 0.0,
        tokens_evicted=after.tokens_evicted - before.tokens_evicted,
        tokens_moved=after.tokens_moved - before.tokens_moved,
        blocks_reclaimed=after.blocks_reclaimed - before.blocks_reclaimed,
        peak_running=int(running.max()),
        mean_running=float(running[limited].mean()),
        preemptions=after.preemptions - before.preemptions,
        output_tokens=int(tokens.sum()),
        output_tokens_per_s=float(tokens.sum() / (end - start)),
        tpot_p50_ms=_percentile_ms(per_token, 50),
        tpot_p95_ms=_percentile_ms(per_token, 95),
        ttft_p50_ms=_percentile_ms(first, 50),
        ttft_p95_ms=_percentile_ms(first, 95),
        needle_hits=hits,
    )


def median_of(results: Sequence[RunResult]) -> RunResult:
    """The median of every figure on its own; counts stay integers where the median is one."""
    medians = {
        field.name: float(np.median([getattr(result, field.name) for result in results])) for field in fields(RunResult)
    }
    return RunResult(**{name: _like(getattr(results[0], name), value) for name, value in medians.items()})


def _like(example: int | float, value: float) -> Any:
    return int(value) if isinstance(example, int) and value.is_integer() else value


def _run(
    engine: Engine,
    workloads: Sequence[Workload],
    report: Callable[[RunProgress], None] | None,
    clock: Callable[[], float],
) -> tuple[list[_Timing], list[tuple[int, int, int, int]], float]:
    """Timings per request; (held, live, running, waiting) after every step; the time of the last token."""
    timings: dict[str, _Timing] = {}
    for work in workloads:
        timings[work.request_id] = _Timing(submitted=clock())
        engine.add_request(work.request_id, work.prompt_token_ids, work.max_tokens)
    samples: list[tuple[int, int, int, int]] = []
    done = idle = output = 0
    while engine.has_unfinished():
        entries = engine.step()
        now = clock()
        for entry in entries:
            timing = timings[entry.request_id]
            if timing.count == 0:
                timing.first = now
            timing.last = now
            output += len(entry.token_ids) - timing.count
            timing.count = len(entry.token_ids)
            if entry.finished:
                done += 1
                timing.token_ids = entry.token_ids
                if entry.finish_reason not in ("length", "stop"):
                    raise RunError(f"request {entry.request_id} ended early: {entry.finish_reason}")
        state = engine.snapshot()
        samples.append((state.held_blocks, state.live_tokens, state.running, state.waiting))
        idle = 0 if entries or state.running else idle + 1
        if idle >= IDLE_STEPS_BEFORE_GIVING_UP:
            raise RunError(f"none of the {state.waiting} waiting requests can be scheduled; use a larger block budget.")
        if report:
            report(RunProgress(done, output, state.running, state.held_blocks))
    missing = [name for name, timing in timings.items() if timing.token_ids is None]
    if missing:
        raise RunError(f"request {missing[0]} ended without a result ({len(missing)} in all)")
    return list(timings.values()), samples, max(timing.last for timing in timings.values())


def _answers(engine: Engine, needle: Workload, decode: Callable[[list[int]], str], clock: Callable[[], float]) -> bool:
    timings, _, _ = _run(engine, [needle], None, clock)
    text = decode(timings[0].token_ids or [])
    return any(answer in text for answer in needle.answers or ())


def _percentile_ms(seconds: np.ndarray, percent: float) -> float:
    return float(np.percentile(seconds, percent) * 1000.0) if seconds.size else 0.0
