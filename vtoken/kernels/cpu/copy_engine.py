"""Relocation on the CPU beside the host's other work: a thread that makes the copies."""

import os
import queue
import threading
import weakref

from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import CPUS, CopyEngine
from vtoken.kernels.relocation import Relocate


class ThreadCopyEngine(CopyEngine):
    """One thread makes the copies, in the order of their launches.

    The forward has returned before `launch` is called, and the host is what touches the cache next, so `wait` and
    `finish` are the same here. What was launched behind a failed copy, before the failure was raised, is dropped: its
    sources may be what the failed copy should have written.

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
        if (failure := self._copies.take_failure()) is not None:
            raise failure

    def close(self) -> None:
        self._end()
        self._thread.join()


class _Copies:
    """What the two threads share: copies to make, and the failure that one of them leaves for the other."""

    def __init__(self, relocate: Relocate) -> None:
        # Not a Queue, whose lock a finalizer that runs inside one of its own methods would wait for in vain.
        self.pending: queue.SimpleQueue[tuple[Ints, Ints, threading.Event] | None] = queue.SimpleQueue()
        self._relocate = relocate
        self._failure: BaseException | None = None

    def make(self) -> None:
        if CPUS:
            os.sched_setaffinity(0, CPUS)  # of this thread alone
        while (copy := self.pending.get()) is not None:
            sources, destinations, done = copy
            try:
                if self._failure is None:
                    self._relocate(sources, destinations)
            except BaseException as failure:  # whatever it is, the host must not wait for this thread in vain
                self._failure = failure
            done.set()

    def take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure
