"""Starting a run in a process of its own, listening to it, and leaving no process behind."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Protocol

from vtoken.config import VTokenConfig
from vtoken.evaluation.workloads import Workload

RUN_ONE = (sys.executable, "-m", "vtoken.evaluation.run_one")
TAIL_LINES = 12
SECONDS_TO_END = 10.0


class Spec(Protocol):
    """What a run is told, on its stdin; ``vtoken`` is None for native vLLM."""

    @property
    def vtoken(self) -> VTokenConfig | None: ...
    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RunSpec:
    """One run: ``vtoken`` is None for native vLLM; without workloads the engine only starts and ends.

    ``frames`` asks for at most so many pictures of the pool; native vLLM has none.
    """

    model: str
    engine_args: dict[str, Any]
    vtoken: VTokenConfig | None
    workloads: Sequence[Workload] = ()
    needles: Sequence[Workload] = ()
    frames: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "engine_args": self.engine_args,
            "vtoken": self.vtoken.model_dump() if self.vtoken else None,
            "workloads": [asdict(work) for work in self.workloads],
            "needles": [asdict(work) for work in self.needles],
            "frames": self.frames,
        }


def environment(*, plugin: bool) -> dict[str, str]:
    """What a run inherits, with vLLM in one process, quiet, and with or without vtoken loaded."""
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    return inherited | {
        "VLLM_PLUGINS": "vtoken" if plugin else "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def run_child(spec: Spec, on_event: Callable[[dict[str, Any]], None], command: Sequence[str] = RUN_ONE) -> None:
    """Run ``spec`` to its end and pass its events on.

    Raises:
        ValueError: the configuration was refused; one sentence.
        RuntimeError: the run broke off; what it said, else the end of its stderr.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            encoding="utf-8",
            env=environment(plugin=spec.vtoken is not None),
        )
        try:
            failure = _listen(process, spec, on_event)
            code = process.wait()
        finally:
            end(process)
        if failure:
            raise RuntimeError(failure)
        if code:
            raise RuntimeError(f"the process ended with exit code {code}\n{tail(stderr)}".strip())


def _listen(process: "subprocess.Popen[str]", spec: Spec, on_event: Callable[[dict[str, Any]], None]) -> str:
    """Pass events on until the run closes its stdout; returns what it said about breaking off, if it did."""
    assert process.stdin is not None
    assert process.stdout is not None
    failure = ""
    try:
        process.stdin.write(json.dumps(spec.to_json()) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return failure  # it ended before it listened: its exit code and stderr say why
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "refused":
            raise ValueError(event["message"])
        if event["event"] == "failed":
            failure = event["message"]
        else:
            on_event(event)
    return failure


def end(process: "subprocess.Popen[str]") -> None:
    """End this very process, politely first, and collect it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def tail(stderr: IO[str]) -> str:
    """The last lines that a process wrote to its stderr."""
    stderr.seek(0)
    return "\n".join(stderr.read().splitlines()[-TAIL_LINES:])
