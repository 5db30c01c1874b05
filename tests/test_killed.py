"""Processes that die under a client: it is told so within a bounded time, and no process is left over."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import prompts, running

from vtoken.config import VTokenConfig

EVERYTHING = bool(os.environ.get("VTOKEN_TEST_EVERYTHING"))
LONG = 30.0
"""Seconds after which a client counts as hanging; nothing waits that long unless a test fails."""

QUITTER = """
from dataclasses import dataclass
from itertools import count
from vtoken.policies import Policy

CALLS = count(1)

@dataclass(frozen=True)
class Quitter(Policy):
    after: int
    def priority(self, batch):
        if next(CALLS) > self.after:
            raise ArithmeticError(f"the policy gives up after {self.after} evictions")
        return batch.tokens
"""


class Processes:
    """Those that an engine has started: its core, and the workers of that."""

    def __init__(self) -> None:
        resource_tracker.ensure_running()  # Python's own, which stays as long as we do
        self._me = psutil.Process()
        self._before = set(self._me.children(recursive=True))
        self.started: set[psutil.Process] = set()

    def note(self) -> None:
        self.started = set(self._me.children(recursive=True)) - self._before

    @property
    def core(self) -> psutil.Process:
        (core,) = [each for each in self.started if each.ppid() == self._me.pid]
        return core

    @property
    def worker(self) -> psutil.Process:
        (worker,) = [each for each in self.started if each.ppid() == self.core.pid]
        return worker

    def left(self) -> list[str]:
        """The names of those that do not come to an end by themselves. They do then."""
        _, alive = psutil.wait_procs(self.started, timeout=LONG)
        names = [each.name() for each in alive]
        for each in alive:
            each.kill()
        return names


@contextmanager
def engine_in_processes(model: Path, config: VTokenConfig, **engine_args: Any) -> Iterator[tuple[Any, Processes]]:
    """Two requests that decode for a long time, each step of which evicts."""
    processes = Processes()
    with running(model, config, skip_tokenizer_init=True, multiprocess=True, **engine_args) as engine:
        processes.note()
        for n, prompt in enumerate(prompts((300, 129), 512)):
            engine.add_request(f"r{n}", prompt, 700)
        yield engine, processes
    assert processes.started and processes.left() == []


def end_of(engine: Any) -> BaseException | None:
    """What stepping the engine ends with."""
    outcome: list[BaseException | None] = []

    def step() -> None:
        try:
            while engine.has_unfinished():
                engine.step()
            outcome.append(None)
        except BaseException as failure:
            outcome.append(failure)

    client = threading.Thread(target=step, daemon=True)
    client.start()
    client.join(LONG)
    assert outcome, "the client hangs"
    return outcome[0]


@pytest.mark.parametrize(
    "victim",
    [
        "core",
        pytest.param("worker", marks=pytest.mark.skipif(not EVERYTHING, reason="runs with VTOKEN_TEST_EVERYTHING=1")),
    ],
)
def test_a_process_that_is_killed(tiny_gqa: Path, victim: str) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    config = VTokenConfig(policy="streaming_llm", budget=64, sinks=4, recent=16)
    with engine_in_processes(tiny_gqa, config) as (engine, processes):
        for _ in range(5):
            engine.step()
        getattr(processes, victim).kill()
        assert isinstance(end_of(engine), EngineDeadError)
        with pytest.raises(EngineDeadError):
            engine.add_request("late", [3] * 20, 5)


def test_a_policy_that_raises(
    tiny_gqa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Core and worker share a process here: it is the client's process that matters."""
    from vllm.v1.engine.exceptions import EngineDeadError

    (tmp_path / "quitter.py").write_text(QUITTER)
    monkeypatch.syspath_prepend(tmp_path)
    config = VTokenConfig(policy="quitter:Quitter", policy_options={"after": 5}, budget=64)
    with engine_in_processes(tiny_gqa, config, distributed_executor_backend="uni") as (engine, _):
        assert isinstance(end_of(engine), EngineDeadError)
    assert "ArithmeticError: the policy gives up after 5 evictions" in "".join(capfd.readouterr())
