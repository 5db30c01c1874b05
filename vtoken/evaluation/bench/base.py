"""What an experiment is: it measures, and everything else is a function of the raw runs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vtoken.core.history import Recording
from vtoken.evaluation.bench.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vtoken.evaluation.bench.bench import Bench

Run = dict[str, Any]
"""One raw run, of plain JSON values: what was run (variant, repeat, parameters) and what came out."""


@dataclass(frozen=True)
class Check:
    """One line of what was expected and what was found.

    Attributes:
        what: in words, with the variant it is about.
        target, found: as they are shown.
        held: whether what was found meets the target.
        kind: "must" is a matter of correctness, and one that fails ends ``vtoken bench`` with exit code 1; an "aim"
            that is missed stays in the table.
        reason: why an aim was missed, where that is known; not shown for one that was met.
    """

    what: str
    target: str
    found: str
    held: bool
    kind: Literal["must", "aim"] = "must"
    reason: str = ""


class Experiment(ABC):
    """One question, its measurement, and its answer as tables, a figure and checks.

    ``tables``, ``figure`` and ``checks`` see the raw runs alone, as they come out of the JSON file, so that a file can
    be shown again without measuring.
    """

    name: ClassVar[str]
    question: ClassVar[str]
    """One sentence, which stands above the table."""
    in_all: ClassVar[bool] = True
    """Whether ``vtoken bench all`` runs it."""

    @abstractmethod
    def measure(self, bench: "Bench") -> list[Run]:
        """Run it. Raises ValueError for what the user has to change, RuntimeError for a run that broke off."""

    @abstractmethod
    def tables(self, runs: Sequence[Run]) -> list[Table]: ...

    @abstractmethod
    def figure(self, runs: Sequence[Run]) -> "Figure":
        """A figure that is understood without the text."""

    @abstractmethod
    def checks(self, runs: Sequence[Run]) -> list[Check]: ...

    def conclusion(self, runs: Sequence[Run]) -> str:
        """What a reader should take away, below the tables; empty where these say it all."""
        return ""

    def recordings(self, runs: Sequence[Run]) -> list[Recording]:
        """What the block pool looked like, where the runs tell; older ones may not."""
        return []
