"""Where time goes: seconds per named part of the work, added up."""

from time import perf_counter


class Phase:
    """Adds up the time spent inside ``with phase:``. One thread uses it, and never within itself."""

    __slots__ = ("_since", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._since
