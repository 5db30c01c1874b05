"""The other side of ``engines``: one engine in a process of its own, which does what it is told, task after task.

A JSON line on stdin says which engine (see ``EngineSpec``), each further one names a task, "module:function" with
arguments: the function gets the engine, and its result goes back as JSON.
"""

import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from vtoken.evaluation.run_one import Emit, claim_stdout, warm_up, with_engine
from vtoken.evaluation.workloads import Workload

WARM_UP_TOKENS = 256
WARM_UP = Workload("warm-up", [1] * WARM_UP_TOKENS, 2)


def main() -> int:
    emit = claim_stdout()
    lines = _lines()
    return serve(json.loads(next(lines)), lines, emit)


def serve(spec: dict[str, Any], lines: Iterator[str], emit: Emit) -> int:
    """Start the engine, emit "started", and one "result" per line; returns the exit code."""

    def work(engine: Any) -> None:
        warm_up(engine, WARM_UP, min(WARM_UP_TOKENS, spec["engine_args"]["max_model_len"] - 2))
        emit(event="started", block_size=engine.block_size, num_blocks=engine.num_blocks)
        for line in lines:
            task = json.loads(line)
            emit(event="result", result=find(task["task"])(engine, **task["arguments"]))

    return with_engine(spec, emit, work)


def find(name: str) -> Callable[..., Any]:
    """The function called "module:function"."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _lines() -> Iterator[str]:
    """What the parent writes; when it closes the pipe, however it ends, this process ends at once."""
    arrived: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            arrived.put(line)
        os._exit(0)

    threading.Thread(target=read, name="bench-tasks", daemon=True).start()
    while True:
        yield arrived.get()


if __name__ == "__main__":
    sys.exit(main())
