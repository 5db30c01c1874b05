"""The task that most experiments run: a load on an engine, and all of its figures."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vtoken.evaluation.load import Engine, Load, drive
from vtoken.evaluation.workloads import Workload

RUN_LOAD = "vtoken.evaluation.bench.load:run_load"


def as_arguments(workloads: Sequence[Workload]) -> list[dict[str, Any]]:
    """Workloads as a task takes them."""
    return [asdict(work) for work in workloads]


def run_load(
    engine: Engine,
    workloads: list[dict[str, Any]],
    concurrency: int | None = None,
    look: bool = True,
    series: bool = False,
    outputs: bool = False,
) -> dict[str, Any]:
    """Run a load (see ``drive``) and sum it up (see ``figures_of``).

    Args:
        engine: with no unfinished request.
        workloads: fields of ``Workload``.
        concurrency: so many requests at a time; else all at once.
        look: at the pool after every step.
        series: also return every step, as [seconds from the start, held blocks, live tokens, running, waiting].
        outputs: also return the tokens of every request, by id.
    """
    works = [Workload(**work) for work in workloads]
    before = engine.snapshot()
    load = drive(engine, works, concurrency, look=look)
    after = engine.snapshot()
    figures = figures_of(load, engine.block_size)
    for name in ("preemptions", "tokens_evicted", "tokens_moved", "blocks_reclaimed"):
        figures[name] = getattr(after, name) - getattr(before, name)
    if series:
        figures["series"] = [[ended - load.start, *pool] for ended, pool in zip(load.ended, load.pool, strict=True)]
    if outputs:
        figures["outputs"] = {
            work.request_id: timing.token_ids for work, timing in zip(works, load.timings, strict=True)
        }
    return figures


def figures_of(load: Load, block_size: int) -> dict[str, Any]:
    """A load in numbers.

    Times are in milliseconds but for ``seconds``. ``tpot_ms`` and ``ttft_ms`` have one entry per request, in the order
    given: the mean time per output token after the first one (requests with one token have none), and the time from
    submission to the first. ``tpot_p95_ms`` is the 95th percentile over requests, ``step_ms`` the median step. With the
    pool in view: ``peak_blocks``, ``mean_blocks`` and ``mean_running`` over all steps, and ``waste_ratio``, the mean F
    over the steps that end with blocks held.
    """
    counts = np.array([timing.count for timing in load.timings])
    several = [timing for timing in load.timings if timing.count > 1]
    tpot = [1e3 * (timing.last - timing.first) / (timing.count - 1) for timing in several]
    ttft = [1e3 * (timing.first - timing.submitted) for timing in load.timings]
    seconds = load.end - load.start
    steps = np.diff(np.array([load.start, *load.ended])) * 1e3
    figures: dict[str, Any] = {
        "requests": len(load.timings),
        "seconds": seconds,
        "steps": len(load.ended),
        "step_ms": float(np.median(steps)),
        "output_tokens": int(counts.sum()),
        "output_tokens_per_s": float(counts.sum() / seconds),
        "tpot_ms": tpot,
        "tpot_p50_ms": _percentile(tpot, 50),
        "tpot_p95_ms": _percentile(tpot, 95),
        "ttft_ms": ttft,
        "ttft_p50_ms": _percentile(ttft, 50),
        "ttft_p95_ms": _percentile(ttft, 95),
    }
    if load.pool:
        held, live, running, waiting = np.array(load.pool, dtype=np.int64).T
        occupied = held > 0
        waste = 1.0 - live[occupied] / (held[occupied] * block_size)
        figures |= {
            "peak_blocks": int(held.max()),
            "mean_blocks": float(held.mean()),
            "peak_running": int(running.max()),
            "mean_running": float(running.mean()),
            "peak_waiting": int(waiting.max()),
            "waste_ratio": float(waste.mean()) if waste.size else 0.0,
        }
    return figures


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
