"""Programs that start processes of their own, run to their end or to a deadline."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEADLINE = 600
"""Seconds, many times what any of them takes on a machine that does nothing else."""


def run_program(name: str, question: Any) -> list[Any]:
    """Give a program of this directory a question on stdin; its answers, one per line of JSON.

    Whatever it has started and left behind ends with it.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "0",
    }
    program = subprocess.Popen(
        [sys.executable, str(HERE / name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        answers, complaints = program.communicate(json.dumps(question), timeout=DEADLINE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    assert program.returncode == 0, complaints[-4000:]
    return [json.loads(line) for line in answers.splitlines()]
