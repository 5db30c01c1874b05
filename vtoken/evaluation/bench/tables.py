"""Tables that are shown on a terminal, written as Markdown, and read as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table as RichTable

from vtoken.evaluation.bench.intervals import Interval

Cell = str | int | float | Interval | None


@dataclass(frozen=True)
class Column:
    """A heading, and how its numbers are shown.

    Attributes:
        heading: with the unit, where there is one.
        decimals: of floats and intervals.
        percent: numbers are shares, shown times 100 with a sign of percent.
        signed: with a plus where they are positive.
    """

    heading: str
    decimals: int = 0
    percent: bool = False
    signed: bool = False

    def show(self, cell: Cell) -> str:
        if cell is None:
            return ""
        if isinstance(cell, str):
            return cell
        if isinstance(cell, Interval):
            middle = self._number(cell.median)
            if cell.repeats == 1 or cell.low == cell.high:
                return middle
            return f"{middle} ({self._number(cell.low)} to {self._number(cell.high)})"
        return self._number(cell)

    def _number(self, value: int | float) -> str:
        if isinstance(value, int) and not self.percent:
            return f"{value:+,}" if self.signed else f"{value:,}"
        value = value * 100 if self.percent else value
        shown = f"{value:+,.{self.decimals}f}" if self.signed else f"{value:,.{self.decimals}f}"
        return f"{shown} %" if self.percent else shown


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; ``note`` says what a reader has to know to read the numbers."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row of table '{self.title}' has not as many cells as there are columns")

    def shown(self) -> list[list[str]]:
        """All cells as texts."""
        return [[column.show(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]

    def to_rich(self) -> RichTable:
        grid = RichTable(title=self.title, caption=self.note or None)
        for place, column in enumerate(self.columns):
            grid.add_column(column.heading, justify="left" if self.is_text(place) else "right", overflow="fold")
        for row in self.shown():
            grid.add_row(*row)
        return grid

    def to_markdown(self) -> str:
        lines = [f"**{self.title}**", ""]
        lines.append("| " + " | ".join(column.heading for column in self.columns) + " |")
        lines.append("|" + "|".join("---" if self.is_text(n) else "---:" for n in range(len(self.columns))) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in self.shown()]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "columns": [column.heading for column in self.columns],
            "rows": [[asdict(cell) if isinstance(cell, Interval) else cell for cell in row] for row in self.rows],
            "note": self.note,
        }

    def is_text(self, place: int) -> bool:
        return all(isinstance(row[place], str | None) for row in self.rows)
