"""Copy engines at both edges of what an engine may do."""

from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import CopyEngine, InlineCopyEngine, make_copy
from vtoken.kernels.relocation import Relocate


class LazyCopyEngine(CopyEngine):
    """Copies as late as an engine may: when it is waited for. Whoever writes over a source before is found out."""

    def __init__(self, relocate: Relocate) -> None:
        self._relocate = relocate
        self._launched: list[tuple[Ints, Ints]] = []

    def launch(self, sources: Ints, destinations: Ints) -> None:
        self._launched.append((sources.copy(), destinations.copy()))

    def wait(self) -> None:
        launched, self._launched = self._launched, []
        for sources, destinations in launched:
            make_copy(self._relocate, sources, destinations)

    finish = wait


EagerCopyEngine = InlineCopyEngine
"""Copies as early as an engine may: when it is launched. Whoever launches before a source is written is found out."""
