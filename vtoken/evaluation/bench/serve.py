"""The other side of ``engines``: one engine in a process of its own, which does what it is told, task after task.

The first message says which engine (see ``EngineSpec``), each further one names a task, "module:function" with
arguments: the function gets the engine, and its result goes back. Messages are JSON.
"""

import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from vtoken.evaluation.child import SECONDS_TO_END
from vtoken.evaluation.run_one import Emit, warm_up, with_engine
from vtoken.evaluation.workloads import Workload

WARM_UP_TOKENS = 256
WARM_UP = Workload("warm-up", [1] * WARM_UP_TOKENS, 2)


def main(messages: Connection, output: str, environment: dict[str, str]) -> None:
    """Run until the other end of the pipe is closed.

    Args:
        messages: this process's end.
        output: file for whatever this process prints.
        environment: its own.
    """
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.clear()
    os.environ.update(environment)

    def emit(**event: Any) -> None:
        messages.send_bytes(json.dumps(event).encode())

    arrived = _arriving(messages)
    try:
        code = serve(json.loads(next(arrived)), arrived, emit)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # an engine that has broken must not have a say in how its process ends
    sys.exit(code)


def serve(spec: dict[str, Any], messages: Iterator[bytes], emit: Emit) -> int:
    """Start the engine, emit "started", and one "result" per message; returns the exit code."""

    def work(engine: Any) -> None:
        warm_up(engine, WARM_UP, min(WARM_UP_TOKENS, spec["engine_args"]["max_model_len"] - 2))
        emit(event="started", block_size=engine.block_size, num_blocks=engine.num_blocks)
        for message in messages:
            task = json.loads(message)
            emit(event="result", result=find(task["task"])(engine, **task["arguments"]))

    return with_engine(spec, emit, work)


def find(name: str) -> Callable[..., Any]:
    """The function called "module:function"."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _arriving(messages: Connection) -> Iterator[bytes]:
    """What the parent sends, until it is gone; a task that goes on after that, however it ended, is broken off."""
    arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def receive() -> None:
        while True:
            try:
                arrived.put(messages.recv_bytes())
            except (EOFError, OSError):
                break
        arrived.put(None)
        time.sleep(SECONDS_TO_END / 2)
        os._exit(0)

    threading.Thread(target=receive, name="bench-tasks", daemon=True).start()
    yield from iter(arrived.get, None)
