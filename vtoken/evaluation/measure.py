"""Running a load through an engine step by step, and the figures that come out of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from vtoken.evaluation.load import Engine, LoadProgress, drive
from vtoken.evaluation.workloads import Workload


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


def measure(
    engine: Engine,
    workloads: Sequence[Workload],
    needles: Sequence[Workload] = (),
    decode: Callable[[list[int]], str] | None = None,
    report: Callable[[LoadProgress], None] | None = None,
    after_step: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> RunResult:
    """Submit all workloads at once, run them to the end, then ask the needles one by one.

    Args:
        engine: with no unfinished request.
        workloads: what is measured; at least one.
        needles: asked after the load has drained, so that they disturb none of its figures.
        decode: token ids to text, for the needles.
        report: called after every step of the load, and so is ``after_step``.
        clock: seconds.

    Raises:
        RunError: a request failed, or none could be scheduled.
    """
    before = engine.snapshot()
    load = drive(engine, workloads, report=report, after_step=after_step, clock=clock)
    timings = load.timings
    after = engine.snapshot()
    hits = sum(_answers(engine, needle, decode, clock) for needle in needles) if decode else 0

    held, live, running, waiting = np.array(load.pool, dtype=np.int64).T
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
        output_tokens_per_s=float(tokens.sum() / (load.end - load.start)),
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


def _answers(engine: Engine, needle: Workload, decode: Callable[[list[int]], str], clock: Callable[[], float]) -> bool:
    (timing,) = drive(engine, [needle], clock=clock).timings
    text = decode(timing.token_ids or [])
    return any(answer in text for answer in needle.answers or ())


def _percentile_ms(seconds: np.ndarray, percent: float) -> float:
    return float(np.percentile(seconds, percent) * 1000.0) if seconds.size else 0.0
