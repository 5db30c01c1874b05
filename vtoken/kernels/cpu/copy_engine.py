"""Relocation on the CPU beside the host's other work: a thread that makes the copies."""

import os
import queue
import threading
import weakref

import numpy as np

from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import CPUS, CopyEngine, CopyFailed, make_copy
from vtoken.kernels.relocation import Relocate


class ThreadCopyEngine(CopyEngine):
    """One thread makes the copies, in the order of their launches.

    The forward has returned before `launch` is called, and the host is what touches the cache next, so `wait` and
    `finish` are the same here.

    Args:
        relocate: should not hold the interpreter's lock while it copies.
    """

    def __init__(self, relocate: Relocate) -> None:
        # The thread must not refer to the engine: one that is forgotten, not closed, then ends its thread all the same.
        self._copies = _Copies(relocate)
        self._thread = threading.Thread(target=self._copies.make, name="vtoken-copies", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._copies.pending.put, None)
        self._last: threading.Event | None = None

    def launch(self, sources: Ints, destinations: Ints) -> None:
        if not self._end.alive:
            raise RuntimeError("vtoken: a copy was launched on an engine that is closed.")
        if len(sources):
            self._last = threading.Event()
            self._copies.pending.put((sources.copy(), destinations.copy(), self._last))

    def wait(self) -> None:
        self.finish()

    def finish(self) -> None:
        if self._last is None:
            return
        self._last.wait()  # the last of them: they are made in order
        self._last = None
        self._copies.raise_failure()

    def close(self) -> None:
        self._end()
        self._thread.join()


class _Copies:
    """What the two threads share: copies to make, and what became of them."""

    def __init__(self, relocate: Relocate) -> None:
        # Not a Queue, whose lock a finalizer that runs inside one of its own methods would wait for in vain.
        self.pending: queue.SimpleQueue[tuple[Ints, Ints, threading.Event] | None] = queue.SimpleQueue()
        self._relocate = relocate
        self._failed: list[CopyFailed] = []
        self._stop: BaseException | None = None

    def make(self) -> None:
        if CPUS:
            os.sched_setaffinity(0, CPUS)  # of this thread alone
        while (copy := self.pending.get()) is not None:
            sources, destinations, done = copy
            try:
                if self._stop is None:
                    make_copy(self._relocate, sources, destinations)
            except CopyFailed as failure:
                self._failed.append(failure)
            except BaseException as stop:  # whatever it is, the host must not wait for this thread in vain
                self._stop = stop
            done.set()

    def raise_failure(self) -> None:
        """Raise what has gone wrong since this was last called. Only while no copy is pending."""
        failed, self._failed = self._failed, []
        stop, self._stop = self._stop, None
        if stop is not None:
            raise stop
        if failed:
            raise CopyFailed(np.concatenate([each.destinations for each in failed])) from failed[0].__cause__
