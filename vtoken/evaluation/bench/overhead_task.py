"""The engine's side of ``overhead``: requests that go on decoding from one call to the next, timed step by step.

Prompts are computed once; after that every step computes one token of each request, so that all engines do the same at
the same lengths however often they take turns.
"""

import time
from collections import defaultdict
from typing import Any

from vtoken.evaluation.load import RunError
from vtoken.kernels.copy_engine import CopyMode

TASK = "vtoken.evaluation.bench.overhead_task:"
SETTLE = 4


def begin(
    engine: Any, prompts: list[list[int]], max_tokens: int, extra_args: dict[str, Any] | None = None
) -> dict[str, int]:
    """Compute the prompts, and a few steps more; returns how many steps that took."""
    for n, prompt in enumerate(prompts):
        engine.add_request(_name(n), prompt, max_tokens, extra_args=extra_args)
    decoding: set[str] = set()
    steps = 0
    while len(decoding) < len(prompts):
        decoding |= {entry.request_id for entry in engine.step()}
        steps += 1
    decode(engine, len(prompts), SETTLE)
    return {"steps": steps + SETTLE}


def decode(engine: Any, running: int, steps: int) -> dict[str, Any]:
    """So many steps of the requests that were begun: the time of each, and what was evicted meanwhile."""
    before = engine.snapshot().tokens_evicted
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        entries = engine.step()
        times.append(1e3 * (time.perf_counter() - start))
        _require_all(len(entries), running)
    return {"step_ms": times, "tokens_evicted": engine.snapshot().tokens_evicted - before}


def break_down(engine: Any, running: int, steps: int) -> dict[str, Any]:
    """The same with a clock on every phase: ``phases`` has the mean milliseconds of each in a step.

    ``hooks_share`` and ``relocation_share`` are of the same steps' time.
    """
    from vtoken.vllm_plugin.phase_timer import phases_of, timed_phases

    with timed_phases() as timer:
        spent: dict[str, float] = defaultdict(float)
        before = engine.snapshot().tokens_evicted
        for _ in range(steps):
            timer.take()  # what was between two steps
            entries = engine.step()
            for category, seconds in timer.take().items():
                spent[category] += seconds
            _require_all(len(entries), running)
    phases = {phase: 1e3 * seconds / steps for phase, seconds in phases_of(spent).items()}
    total = sum(phases.values())
    return {
        "steps": steps,
        "step_ms": total,
        "phases": phases,
        "hooks_share": phases["hooks"] / total,
        "relocation_share": phases["relocation"] / total,
        "tokens_evicted": engine.snapshot().tokens_evicted - before,
    }


def decode_copying(engine: Any, running: int, steps: int, mode: CopyMode) -> dict[str, Any]:
    """``decode`` with another way of copying: milliseconds per relocation that the host waits, and that it takes."""
    from vtoken.vllm_plugin.copy_timer import timed_copies

    with timed_copies(engine.evicting_worker, mode) as (copies, relocation):
        found = decode(engine, running, steps)
    each = 1e3 / max(copies.launches, 1)
    return {
        **found,
        "relocations": copies.launches,
        "tokens_moved": relocation.tokens,
        "stall_ms": copies.seconds * each,
        "copy_ms": relocation.seconds * each,
    }


def end(engine: Any, running: int) -> None:
    """Abort all requests, and wait until the engine has forgotten them."""
    for n in range(running):
        engine.abort(_name(n))
    while engine.has_unfinished():
        engine.step()


def _name(n: int) -> str:
    return f"decoding-{n}"


def _require_all(found: int, running: int) -> None:
    if found != running:
        raise RunError(f"a step computed {found} of {running} requests that should all decode; use a larger pool.")
