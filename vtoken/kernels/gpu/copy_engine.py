"""Relocation on a GPU beside its other work: a stream of its own. Checked in a simulation; not yet run on hardware."""

from typing import Any

import torch

from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import CopyEngine, make_copy
from vtoken.kernels.relocation import Relocate


class CudaCopyEngine(CopyEngine):
    """Copies on a stream of their own, between two events; the host waits for neither.

    Args:
        relocate: copies on the current stream, without waiting for it. Memory that it allocates belongs to that stream,
            so it is not handed out again before the copy is through.
        cuda: ``torch.cuda``, or something else with its streams and events.
    """

    def __init__(self, relocate: Relocate, cuda: Any = torch.cuda) -> None:
        self._relocate = relocate
        self._cuda = cuda
        self._stream = cuda.Stream()
        # Recorded anew by every launch. A stream that waits for an event waits for what was recorded when it was told
        # to, and the last copy on a stream is behind the others, so one event of each kind does for all launches.
        self._computed = cuda.Event()
        self._copied = cuda.Event()

    def launch(self, sources: Ints, destinations: Ints) -> None:
        if not len(sources):
            return
        self._computed.record(self._cuda.current_stream())
        self._stream.wait_event(self._computed)
        try:
            with self._cuda.stream(self._stream):
                make_copy(self._relocate, sources, destinations)
        finally:
            # Of a copy that could not be ordered to its end, some may be under way when its slots are somebody else's.
            self._copied.record(self._stream)

    def wait(self) -> None:
        self._cuda.current_stream().wait_event(self._copied)

    def finish(self) -> None:
        self._copied.synchronize()
