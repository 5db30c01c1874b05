"""Engines in processes of their own that live on, so that variants can take turns without starting anew.

Of their own, because native vLLM must be measured without our hooks, and because two engines in one process would share
threads and caches.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from vtoken.config import VTokenConfig
from vtoken.evaluation.child import end, environment, tail

SERVE = (sys.executable, "-m", "vtoken.evaluation.bench.serve")
MOST_ALIVE = 8
"""Beyond it the engine that was used longest ago is ended."""


@dataclass(frozen=True)
class EngineSpec:
    """Which engine: ``vtoken`` is None for native vLLM; ``copy`` tells equal ones apart, for an A/A pair."""

    model: str
    vtoken: VTokenConfig | None
    engine_args: Mapping[str, Any]
    copy: int = 0

    @property
    def key(self) -> str:
        return json.dumps([self.to_json(), self.copy], sort_keys=True)

    def to_json(self) -> dict[str, Any]:
        vtoken = self.vtoken.model_dump() if self.vtoken else None
        return {"model": self.model, "vtoken": vtoken, "engine_args": dict(self.engine_args)}


class RunningEngine:
    """One engine's process.

    Attributes:
        block_size: slots per block.
        num_blocks: blocks that requests can hold.

    Raises:
        ValueError: the configuration was refused; one sentence.
        RuntimeError: it broke off; what it said, else the end of its stderr.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._stderr: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            SERVE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="utf-8",
            env=environment(plugin=spec.vtoken is not None),
        )
        try:
            started = self._exchange(spec.to_json())
        except BaseException:
            self.close()
            raise
        self.block_size: int = started["block_size"]
        self.num_blocks: int = started["num_blocks"]

    @property
    def config(self) -> VTokenConfig | None:
        return self.spec.vtoken

    def do(self, task: str, **arguments: Any) -> Any:
        """Call ``task``, "module:function", with the engine and these JSON values there; returns its result.

        Raises:
            RuntimeError: it broke off.
        """
        return self._exchange({"task": task, "arguments": arguments})["result"]

    def close(self) -> None:
        """End the process, and wait for that."""
        end(self._process)
        self._stderr.close()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"an engine ended with exit code {code}\n{tail(self._stderr)}".strip())
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "refused":
            raise ValueError(event["message"])
        if event["event"] == "failed":
            raise RuntimeError(event["message"])
        return event


class EnginePool:
    """Engines by what they were started with.

    Args:
        start: makes one; raises as ``RunningEngine`` does.
        most_alive: engines at a time.
    """

    def __init__(
        self, start: Callable[[EngineSpec], RunningEngine] = RunningEngine, most_alive: int = MOST_ALIVE
    ) -> None:
        self._start, self._most_alive = start, most_alive
        self._alive: dict[str, RunningEngine] = {}
        self.started = 0

    def get(self, spec: EngineSpec) -> RunningEngine:
        """The engine of that kind, started if there is none."""
        engine = self._alive.pop(spec.key, None)
        if engine is None:
            while len(self._alive) >= self._most_alive:
                self._close(next(iter(self._alive)))
            engine = self._start(spec)
            self.started += 1
        self._alive[spec.key] = engine  # the last one is the one used last
        return engine

    def close(self) -> None:
        """End all of them."""
        for key in list(self._alive):
            self._close(key)

    def _close(self, key: str) -> None:
        self._alive.pop(key).close()

    def __enter__(self) -> "EnginePool":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
