"""One measured run in a process of its own: a JSON line on stdin says what to run, JSON lines on stdout tell.

Of its own, because native vLLM must be measured without our hooks, and hooks cannot be taken out again.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.evaluation.load import LoadProgress, RunError
from vtoken.evaluation.measure import measure
from vtoken.evaluation.recorder import Recorder
from vtoken.evaluation.workloads import Workload, load_tokenizer

SECONDS_BETWEEN_REPORTS = 0.2
SECONDS_BETWEEN_FRAMES = 0.25


Emit = Callable[..., None]


def main() -> int:
    return listen(run)


def listen(run: Callable[[dict[str, Any], Emit], int]) -> int:
    """Read what to run, run it, and return the exit code."""
    emit = claim_stdout()
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return run(spec, emit)


def run(spec: dict[str, Any], emit: Emit) -> int:
    """Run what ``spec`` describes (see ``RunSpec``) and emit "started", "progress", "frames" and "result" events."""

    def work(engine: Any) -> None:
        emit(event="started", block_size=engine.block_size, num_blocks=engine.num_blocks)
        if not spec["workloads"]:
            return
        workloads = [Workload(**work) for work in spec["workloads"]]
        warm_up(engine, workloads[0])
        tokenizer = load_tokenizer(spec["model"])
        recorder = Recorder(engine, spec["frames"], SECONDS_BETWEEN_FRAMES) if spec["frames"] else None
        result = measure(
            engine,
            workloads,
            needles=[Workload(**work) for work in spec["needles"]],
            decode=tokenizer.decode,
            report=_rarely(lambda progress: emit(event="progress", **vars(progress))),
            after_step=recorder.look if recorder else None,
        )
        if recorder:
            emit(event="frames", frames=[frame.to_json() for frame in recorder.finish()])
        emit(event="result", result=result.to_json())

    return with_engine(spec, emit, work)


def with_engine(spec: dict[str, Any], emit: Emit, work: Callable[[Any], None]) -> int:
    """Start the engine of ``spec``, let ``work`` use it, and return the exit code.

    A configuration that cannot run is emitted as "refused", work that broke off as "failed".
    """
    from vtoken.vllm_plugin import make_engine

    config = VTokenConfig(**spec["vtoken"]) if spec["vtoken"] is not None else None
    try:
        engine = make_engine(spec["model"], config, **spec["engine_args"])
    except ValueError as error:
        emit(event="refused", message=str(error))
        return 2
    try:
        work(engine)
        return 0
    except RunError as error:
        emit(event="failed", message=str(error))
        return 1
    finally:
        engine.shutdown()


def warm_up(engine: Any, work: Workload, tokens: int = 16) -> None:
    """What only the first request pays for is paid for."""
    engine.add_request("warm-up", work.prompt_token_ids[:tokens], 2)
    while engine.has_unfinished():
        engine.step()


def _rarely(report: Callable[[LoadProgress], None]) -> Callable[[LoadProgress], None]:
    """Pass on one report in every ``SECONDS_BETWEEN_REPORTS``, and the last one."""
    due = 0.0

    def maybe(progress: LoadProgress) -> None:
        nonlocal due
        if time.monotonic() >= due or not progress.running:
            due = time.monotonic() + SECONDS_BETWEEN_REPORTS
            report(progress)

    return maybe


def claim_stdout() -> Emit:
    """Keep stdout for events alone: whatever else this process prints goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(**event: Any) -> None:
        channel.write(json.dumps(event) + "\n")
        channel.flush()

    return emit


def _end_with_parent() -> None:
    """stdin stays open for as long as the parent lives; nothing may outlive it, however it ends."""
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
