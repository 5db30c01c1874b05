"""When relocation happens: an engine orders copies between two forwards, beside whatever the host does meanwhile.

A copy may start when the forward that wrote its sources is through, and has to be complete before anything writes over
them: a freed source block may belong to another request by the next forward. So every engine has two edges: `launch`
puts a copy behind what was ordered before, `wait` puts what is ordered next behind the copy.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch

from vtoken.core.ragged import Ints
from vtoken.kernels.relocation import Relocate

CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""Processors that the process may use, taken down when this is imported: later vLLM pins the thread that starts an
engine to one of them, and a thread that it starts would inherit that and have to share it with the host."""

CopyMode = Literal["async", "inline", "force_sync"]


class CopyFailed(Exception):
    """Tokens may not have arrived; ``__cause__`` says why the first of them did not.

    Attributes:
        destinations: all slots of which that is so, int64 [M]. They may hold anything now.
    """

    def __init__(self, destinations: Ints) -> None:
        super().__init__(f"tokens may not have arrived in slots {destinations}")
        self.destinations = destinations


class CopyEngine(ABC):
    """Copies of tokens, in the order in which they are launched.

    One thread drives an engine. A copy that fails raises ``CopyFailed`` in the call that notices: `launch` where the
    copy is made there, else the next `wait` or `finish`, once for all that failed before. Copies behind it are made
    all the same; those that read where a token has not arrived pass on what they find. What is no ``Exception``
    (somebody wants the process to end) is raised as it is, and so is what a device says in its own time, which nobody
    can tell from a fault of the forwards.
    """

    @abstractmethod
    def launch(self, sources: Ints, destinations: Ints) -> None:
        """Copy these slots after everything that was ordered on the cache before.

        Args:
            sources, destinations: as for ``relocate_reference``, int64 [M]. M = 0 does nothing. The arrays are free
                for other use when the call returns.
        """

    @abstractmethod
    def wait(self) -> None:
        """Order whatever touches the cache next after all copies launched so far.

        On a CPU that is the host itself, which therefore blocks; beside a GPU the host never does.
        """

    @abstractmethod
    def finish(self) -> None:
        """Block the host until all copies launched so far are complete."""

    def close(self) -> None:  # noqa: B027  an engine that holds nothing has nothing to do here
        """Give back what the engine holds, after the copies launched so far. Nothing may be launched afterwards."""


def make_copy(relocate: Relocate, sources: Ints, destinations: Ints) -> None:
    """Relocate, or raise ``CopyFailed``."""
    try:
        relocate(sources, destinations)
    except Exception as failure:
        raise CopyFailed(destinations.copy()) from failure


class InlineCopyEngine(CopyEngine):
    """Copies where it is told to: in `launch`, on the calling thread or on the device's current stream.

    Args:
        synchronize: blocks the host until the current stream is idle; nothing to do where the host makes the copies.
    """

    def __init__(self, relocate: Relocate, synchronize: Callable[[], None] | None = None) -> None:
        self._relocate = relocate
        self._synchronize = synchronize

    @property
    def relocate(self) -> Relocate:
        """What it was given."""
        return self._relocate

    def launch(self, sources: Ints, destinations: Ints) -> None:
        if len(sources):
            make_copy(self._relocate, sources, destinations)

    def wait(self) -> None:
        """Nothing to do: a thread, or a stream, does one thing after another."""

    def finish(self) -> None:
        if self._synchronize is not None:
            self._synchronize()


class ForcedSync(CopyEngine):
    """Another engine, without its overlap: `launch` returns when the copy is complete. For comparison."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine

    def launch(self, sources: Ints, destinations: Ints) -> None:
        self._engine.launch(sources, destinations)
        self._engine.finish()

    def wait(self) -> None:
        self._engine.wait()

    def finish(self) -> None:
        self._engine.finish()

    def close(self) -> None:
        self._engine.close()


def copy_engine_for(device_type: str, relocate: Relocate, mode: CopyMode) -> CopyEngine:
    """The engine for a cache on such a device.

    Args:
        device_type: of the cache, ``torch.device.type``. Anything but "cpu" and "cuda" copies inline in every mode.
        relocate: copies when it is called, on the calling thread or the device's current stream: a ``Relocator``.
        mode: "async" beside other work, "inline" as part of it, "force_sync" like "async" but waited for at once.

    Raises:
        ValueError: there is no such mode.
    """
    if mode not in ("async", "inline", "force_sync"):
        raise ValueError(f"vtoken: there is no copy mode {mode!r}; choose async, inline or force_sync.")
    engine = _inline(device_type, relocate) if mode == "inline" else _asynchronous(device_type, relocate)
    return ForcedSync(engine) if mode == "force_sync" else engine


def _inline(device_type: str, relocate: Relocate) -> CopyEngine:
    return InlineCopyEngine(relocate, None if device_type == "cpu" else torch.accelerator.synchronize)


def _asynchronous(device_type: str, relocate: Relocate) -> CopyEngine:
    if device_type == "cpu":
        from vtoken.kernels.cpu.copy_engine import ThreadCopyEngine

        return ThreadCopyEngine(relocate)

    if device_type == "cuda":
        from vtoken.kernels.gpu.copy_engine import CudaCopyEngine

        return CudaCopyEngine(relocate)

    return _inline(device_type, relocate)
