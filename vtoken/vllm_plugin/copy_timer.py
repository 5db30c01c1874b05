"""How long the host stands still for copies, and how long the copies themselves take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import CopyEngine, CopyMode, InlineCopyEngine, copy_engine_for
from vtoken.kernels.relocation import Relocate
from vtoken.vllm_plugin.worker import EvictionWorker


class TimedCopies(CopyEngine):
    """Another engine, with the time that its callers spend in it."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine, self.seconds, self.launches = engine, 0.0, 0

    def launch(self, sources: Ints, destinations: Ints) -> None:
        self.launches += len(sources) > 0
        self._timed(self._engine.launch, sources, destinations)

    def wait(self) -> None:
        self._timed(self._engine.wait)

    def finish(self) -> None:
        self._timed(self._engine.finish)

    def close(self) -> None:
        self._engine.close()

    def _timed(self, call: Callable[..., None], *args: Any) -> None:
        start = time.perf_counter()
        call(*args)
        self.seconds += time.perf_counter() - start


class TimedRelocation:
    """A relocation with the time that it takes, on whichever thread."""

    def __init__(self, relocate: Relocate) -> None:
        self._relocate, self.seconds, self.tokens = relocate, 0.0, 0

    def __call__(self, sources: Ints, destinations: Ints) -> None:
        start = time.perf_counter()
        self._relocate(sources, destinations)
        self.seconds += time.perf_counter() - start
        self.tokens += len(sources)


@contextmanager
def timed_copies(worker: EvictionWorker, mode: CopyMode) -> Iterator[tuple[TimedCopies, TimedRelocation]]:
    """Copy in this way for as long as the context lasts, under a clock. No step may be under way at either end.

    Args:
        worker: started with ``copies="inline"``.
        mode: the way; the worker's own comes back at the end.
    """
    own = worker.copies
    assert isinstance(own, InlineCopyEngine)
    relocate = TimedRelocation(own.relocate)
    timed = TimedCopies(copy_engine_for("cpu", relocate, mode))
    worker.use_copies(timed)
    try:
        yield timed, relocate
    finally:
        timed.finish()
        timed.close()
        worker.use_copies(own)
