"""Engines in processes of their own that live on, so that variants can take turns without starting anew.

Of their own, because native vLLM must be measured without our hooks, and because two engines in one process would share
threads and caches. They are forked from one process that has imported vLLM and nothing of ours (see
``vllm_plugin.preloaded``), and those that an experiment asks for one after another start side by side.
"""

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench import serve
from vtoken.evaluation.child import SECONDS_TO_END, environment, tail

MOST_ALIVE = 10
"""Beyond it the engine that was used longest ago is ended."""

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["vtoken.vllm_plugin.preloaded"])


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
    """One engine's process, which starts while the caller goes on, and is waited for where something is asked of it.

    Args:
        spec: which engine.
        settle: called before anything is asked of it, so that no other engine is still starting then.

    Raises, wherever it is waited for:
        ValueError: the configuration was refused; one sentence.
        RuntimeError: it broke off; what it said, else the end of what it printed.
    """

    def __init__(self, spec: EngineSpec, settle: Callable[[], object] = lambda: None) -> None:
        self.spec, self._settle = spec, settle
        self._printed = tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(
            target=serve.main,
            args=(theirs, self._printed.name, environment(plugin=spec.vtoken is not None)),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._started: dict[str, Any] | None = None
        self._tell(spec.to_json())

    @property
    def config(self) -> VTokenConfig | None:
        return self.spec.vtoken

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return int(self.ready()["block_size"])

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold."""
        return int(self.ready()["num_blocks"])

    def ready(self) -> dict[str, Any]:
        """Wait until the engine has started; returns what it said then."""
        if self._started is None:
            self._started = self._hear()
        return self._started

    def do(self, task: str, **arguments: Any) -> Any:
        """Call ``task``, "module:function", with the engine and these JSON values there; returns its result."""
        self._settle()
        self.ready()
        self._tell({"task": task, "arguments": arguments})
        return self._hear()["result"]

    def close(self) -> None:
        """End the process, and wait for that."""
        self._pipe.close()
        self._process.join(SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._printed.close()

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
        except OSError:
            self._broke_off()

    def _hear(self) -> dict[str, Any]:
        try:
            event: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._broke_off()
        if event["event"] == "refused":
            raise ValueError(event["message"])
        if event["event"] == "failed":
            raise RuntimeError(event["message"])
        return event

    def _broke_off(self) -> NoReturn:
        self._process.join()
        raise RuntimeError(f"an engine ended with exit code {self._process.exitcode}\n{tail(self._printed)}".strip())


class EnginePool:
    """Engines by what they were started with. ``started`` and, of these, ``compiled`` count them.

    Args:
        start: makes one; raises as ``RunningEngine`` does.
        most_alive: engines at a time.
    """

    def __init__(
        self,
        start: Callable[[EngineSpec, Callable[[], object]], RunningEngine] = RunningEngine,
        most_alive: int = MOST_ALIVE,
    ) -> None:
        self._start, self._most_alive = start, most_alive
        self._alive: dict[str, RunningEngine] = {}
        self._starting: list[RunningEngine] = []
        self.started = 0
        self.compiled = 0

    def get(self, spec: EngineSpec) -> RunningEngine:
        """The engine of that kind, started if there is none."""
        engine = self._alive.pop(spec.key, None)
        if engine is None:
            while len(self._alive) >= self._most_alive:
                self._close(next(iter(self._alive)))
            engine = self._start(spec, self.settle)
            self.started += 1
            self.compiled += not spec.engine_args.get("enforce_eager", False)
            self._starting.append(engine)
        self._alive[spec.key] = engine  # the last one is the one used last
        return engine

    def settle(self) -> None:
        """Wait until all of them have started, so that none disturbs what is measured on another."""
        while self._starting:
            self._starting.pop().ready()

    def close(self) -> None:
        """End all of them."""
        self._starting.clear()
        with ThreadPoolExecutor() as threads:  # each takes a second
            list(threads.map(self._close, list(self._alive)))

    def _close(self, key: str) -> None:
        self._alive.pop(key).close()

    def __enter__(self) -> "EnginePool":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
