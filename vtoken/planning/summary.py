"""What a replay comes to: how many requests fit, what the queue was like, and its course in few points."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.planning.replay import BY_BLOCKS, BY_SEQUENCES, BY_TOKENS, Observed, Steps
from vtoken.planning.trace import Workload

MOST_POINTS = 800
QUANTILES = (50, 95, 99)
WAITS = {BY_TOKENS: "tokens", BY_BLOCKS: "blocks", BY_SEQUENCES: "sequences"}


def at_once(seen: Observed) -> dict[str, Any]:
    """How many requests fit, from a replay in which all of them were there from the beginning.

    Returns:
        mean_running: over the steps in which somebody waits; None if nobody ever does. No time enters.
        peak_running: over all steps.
        requests, preemptions, failed.
    """
    running, waiting = np.array(seen.steps.running), np.array(seen.steps.waiting)
    return {
        "requests": len(seen.produced),
        "mean_running": float(running[waiting > 0].mean()) if waiting.any() else None,
        "peak_running": int(running.max()),
        "preemptions": seen.preemptions,
        "failed": seen.failed,
    }


def queue(seen: Observed, workload: Workload) -> dict[str, Any]:
    """What requests met that arrived when the workload says; times in seconds on the virtual clock.

    Returns:
        counts (requests, finished, failed, output_tokens, preemptions, steps); seconds, until the last one ended;
        waits_for_tokens, waits_for_blocks and waits_for_sequences, for how long of that somebody waited because a step
        computed all that it may, for blocks, and for max_num_seqs; output_tokens_per_s; mean_running, mean_waiting and
        mean_held over time, and their peaks; for time to first token (ttft), time in the queue (queued) and time per
        output token (tpot) p50, p95 and p99; hit_rate, the share of prompt tokens that came from the prefix cache when
        requests began.
    """
    arrived = np.array([arrival.time for arrival in workload.arrivals])
    begun, first, ended = (np.array(times) for times in (seen.begun, seen.first_token, seen.ended))
    produced = np.array(seen.produced)
    done = (first >= 0) & (ended >= 0)
    several = done & (produced > 1)
    per_token = (ended - first)[several] / (produced[several] - 1)
    steps = seen.steps
    figures = {
        "requests": len(arrived),
        "finished": int(done.sum()) - seen.failed,
        "failed": seen.failed,
        "output_tokens": int(produced.sum()),
        "preemptions": seen.preemptions,
        "steps": len(steps.end),
        "seconds": seen.now,
        "output_tokens_per_s": float(produced.sum() / seen.now),
        "hit_rate": seen.hits / seen.asked if seen.asked else 0.0,
    }
    limited, seconds = np.array(steps.limited), np.array(steps.seconds)
    figures |= {f"waits_for_{name}": float(seconds[limited == kind].sum()) for kind, name in WAITS.items()}
    for name in ("running", "waiting", "held"):
        values = np.array(getattr(steps, name))
        figures[f"mean_{name}"] = float((values * seconds).sum() / seen.now)
        figures[f"peak_{name}"] = int(values.max(initial=0))
    quantiles = {"ttft": (first - arrived)[done], "queued": (begun - arrived)[begun >= 0], "tpot": per_token}
    return figures | {
        f"{name}_p{percent}": float(np.percentile(values, percent)) if len(values) else None
        for name, values in quantiles.items()
        for percent in QUANTILES
    }


def series(steps: Steps, points: int = MOST_POINTS) -> dict[str, list[Any]]:
    """The course of a replay in at most so many points: the most of each stretch of time, so that no peak is lost.

    Returns:
        seconds, the end of each point's last step; running, waiting, held.
    """
    end = np.array(steps.end)
    if not len(end):
        return {"seconds": [], "running": [], "waiting": [], "held": []}
    stretch = np.minimum((end / end[-1] * points).astype(np.int64), points - 1)
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    return {
        "seconds": np.round(end[np.append(first[1:], len(end)) - 1], 3).tolist(),
        **{name: _most(getattr(steps, name), first) for name in ("running", "waiting", "held")},
    }


def _most(values: Sequence[int], first: NDArray[np.int64]) -> list[int]:
    most: list[int] = np.maximum.reduceat(np.array(values), first).tolist()
    return most
