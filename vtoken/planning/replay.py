"""A workload on an engine without a model, along a virtual clock."""

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vtoken.planning.step_time import StepTime
from vtoken.planning.trace import Workload

if TYPE_CHECKING:
    from vtoken.vllm_plugin import SimulatedEngine, SimulatedStep

Tick = Callable[[int], None]
"""Called now and then with the output tokens produced since the last time."""
TICK_SECONDS = 0.25
LOOK_AT_CLOCK = 128
MOST_EMPTY_STEPS = 1000


def _floats() -> "array[float]":
    return array("d")


def _counts() -> "array[int]":
    return array("q")


@dataclass
class Steps:
    """What was there in each step, [steps] each.

    Attributes:
        end: seconds on the virtual clock when it was over.
        seconds: that it took.
        running, waiting: requests.
        held: blocks.
        limited: BY_NOTHING where nobody waits; else what those wait for who wait: BY_TOKENS (of a step), BY_BLOCKS or
            BY_SEQUENCES (``max_num_seqs``).
    """

    end: "array[float]" = field(default_factory=_floats)
    seconds: "array[float]" = field(default_factory=_floats)
    running: "array[int]" = field(default_factory=_counts)
    waiting: "array[int]" = field(default_factory=_counts)
    held: "array[int]" = field(default_factory=_counts)
    limited: "array[int]" = field(default_factory=_counts)


BY_NOTHING, BY_TOKENS, BY_BLOCKS, BY_SEQUENCES = range(4)


@dataclass
class Observed:
    """All that happened. By request, in the order of arrival: times in seconds on the virtual clock.

    Attributes:
        begun, first_token, ended: when its first step began, and when its first and its last token were there.
        produced: output tokens.
        failed: requests that vtoken ended with an error.
        steps: what was there in each step.
        preemptions: times that a request lost its blocks.
        hits, asked: prompt tokens that came from the prefix cache when requests began, and all of them.
        now: seconds on the virtual clock.
    """

    begun: list[float]
    first_token: list[float]
    ended: list[float]
    produced: list[int]
    steps: Steps = field(default_factory=Steps)
    failed: int = 0
    preemptions: int = 0
    hits: int = 0
    asked: int = 0
    now: float = 0.0


def replay(engine: "SimulatedEngine", workload: Workload, step_time: StepTime, tick: Tick = lambda _: None) -> Observed:
    """Let the requests arrive, and step until all of them have ended.

    Args:
        engine: without requests; the ids of ours are their places in ``workload``.
        step_time: how long a step takes.
        tick: told about progress.

    Raises:
        RuntimeError: the engine does nothing although there are requests.
    """
    arrivals = workload.arrivals
    begun, first_token, ended = ([-1.0] * len(arrivals) for _ in range(3))
    seen = Observed(begun, first_token, ended, produced=[0] * len(arrivals))
    # Nobody is admitted who has so many before him, and a prompt in vLLM's queue takes memory.
    most_queued = engine.max_num_seqs + 1
    outside: deque[int] = deque()
    arrived = empty = told = 0
    spoke = time.monotonic()
    while True:
        while arrived < len(arrivals) and arrivals[arrived].time <= seen.now:
            outside.append(arrived)
            arrived += 1
        while outside and engine.waiting < most_queued:
            _submit(engine, outside.popleft(), workload)
        if not engine.has_unfinished():
            if arrived == len(arrivals):
                break
            seen.now = arrivals[arrived].time
            continue
        step = engine.step()
        empty = 0 if step.scheduled else empty + 1
        if empty > MOST_EMPTY_STEPS:
            raise RuntimeError(f"{engine.waiting} requests wait, and nothing is scheduled any more")
        _note(seen, step, engine, workload, len(outside), step_time)
        told += len(step.produced)
        if not len(seen.steps.end) % LOOK_AT_CLOCK and time.monotonic() - spoke > TICK_SECONDS:
            tick(told)
            told, spoke = 0, time.monotonic()
    tick(told)
    return seen


def _submit(engine: "SimulatedEngine", index: int, workload: Workload) -> None:
    """What prompts have in common is for the block hasher to say; here they differ, so that their victims do."""
    prompt = [0] * workload.arrivals[index].prompt
    prompt[-1] = index % (1 << 20)
    engine.add_request(str(index), prompt, workload.arrivals[index].outputs)


def _note(
    seen: Observed,
    step: "SimulatedStep",
    engine: "SimulatedEngine",
    workload: Workload,
    outside: int,
    step_time: StepTime,
) -> None:
    tokens = sum(step.scheduled.values())
    seconds = step_time(tokens, step.attended, step.pairs)
    start, seen.now = seen.now, seen.now + seconds
    for name, hit in step.begun.items():
        index = int(name)
        if seen.begun[index] < 0:
            seen.begun[index] = start
            seen.hits += hit
            seen.asked += workload.arrivals[index].prompt
    first_token, produced, now = seen.first_token, seen.produced, seen.now
    for name in step.produced:
        index = int(name)
        produced[index] += 1
        if first_token[index] < 0:
            first_token[index] = now
    for name, reason in step.finished.items():
        seen.ended[int(name)] = now
        seen.failed += reason == "error"
    seen.preemptions += len(step.preempted)
    steps, running, waiting = seen.steps, engine.running + len(step.finished), engine.waiting + outside
    steps.end.append(now)
    steps.seconds.append(seconds)
    steps.running.append(running)
    steps.waiting.append(waiting)
    steps.held.append(step.held)
    steps.limited.append(_limit(engine, tokens, running) if waiting else BY_NOTHING)


def _limit(engine: "SimulatedEngine", tokens: int, running: int) -> int:
    """What keeps those who wait from running."""
    if running >= engine.max_num_seqs:
        return BY_SEQUENCES
    return BY_BLOCKS if tokens < engine.max_num_batched_tokens else BY_TOKENS
