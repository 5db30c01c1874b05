"""The demo's figures as one table and as one JSON file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from vtoken.core.history import Recording
from vtoken.evaluation.measure import RunResult

# Label, key, unit, decimals, factor from the JSON's unit to the one shown.
ROWS = (
    ("blocks held after a step, peak", "peak_blocks", "", 0, 1.0),
    ("blocks held after a step, mean", "mean_blocks", "", 1, 1.0),
    ("waste ratio F", "waste_ratio", "%", 1, 100.0),
    ("tokens evicted", "tokens_evicted", "", 0, 1.0),
    ("tokens moved", "tokens_moved", "", 0, 1.0),
    ("blocks handed back", "blocks_reclaimed", "", 0, 1.0),
    ("requests running at once, peak", "peak_running", "", 0, 1.0),
    ("requests running at once, mean", "mean_running", "", 1, 1.0),
    ("preemptions", "preemptions", "", 0, 1.0),
    ("output tokens", "output_tokens", "", 0, 1.0),
    ("output tokens/s", "output_tokens_per_s", "", 1, 1.0),
    ("time per output token, p50", "tpot_p50_ms", "ms", 0, 1.0),
    ("time per output token, p95", "tpot_p95_ms", "ms", 0, 1.0),
    ("time to first token, p50", "ttft_p50_ms", "s", 1, 0.001),
    ("time to first token, p95", "ttft_p95_ms", "s", 1, 0.001),
)

HEADINGS = {"native": "native vLLM", "none": "naive eviction", "vtoken": "vtoken"}
"""Of the runs, in this order; naive eviction runs where a page is asked for."""


@dataclass(frozen=True)
class DemoReport:
    """All that the demo found out. ``runs`` has the medians of ``repeats``; ``needles`` counts questions.

    ``recordings`` show the pool in the first run of each kind that evicts, where a page is asked for.
    """

    model: str
    engine_args: dict[str, Any]
    vtoken_config: dict[str, Any]
    block_size: int
    num_blocks: int
    needles: int
    runs: dict[str, RunResult]
    repeats: list[dict[str, RunResult]]
    recordings: list[Recording] = field(default_factory=list)

    @property
    def nothing_evicted(self) -> bool:
        return any(turn["vtoken"].tokens_evicted == 0 for turn in self.repeats)

    def to_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "model": self.model,
            "engine_args": self.engine_args,
            "vtoken_config": self.vtoken_config,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "runs": {name: result.to_json() for name, result in self.runs.items()},
        }
        if len(self.repeats) > 1:
            report["repeats"] = [{name: run.to_json() for name, run in turn.items()} for turn in self.repeats]
        return report


class Report(Protocol):
    def to_json(self) -> dict[str, Any]: ...


def write_json(report: Report, path: Path) -> None:
    path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")


def table(report: DemoReport) -> Table:
    """native | vtoken | vtoken / native, one row per figure; naive eviction in between, where it has run."""
    grid = Table(title=table_title(report))
    headings, rows = comparison(report)
    for place, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if place else "left")
    for row in rows:
        grid.add_row(*row)
    return grid


def table_title(report: DemoReport) -> str:
    turns = len(report.repeats)
    median = f", median of {turns} runs" if turns > 1 else ""
    return f"{report.num_blocks} blocks of {report.block_size} tokens{median}"


def comparison(report: DemoReport) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table; the last column is vtoken's share of native vLLM's figure."""
    runs = {name: report.runs[name] for name in HEADINGS if name in report.runs}
    rows = []
    for label, key, unit, decimals, factor in ROWS:
        of = {name: getattr(run, key) * factor for name, run in runs.items()}
        ratio = f"{of['vtoken'] / of['native']:.2f}x" if of["native"] else "-"
        rows.append([label, *(_show(value, unit, decimals) for value in of.values()), ratio])
    rows.append(["needles found", *(f"{run.needle_hits:g} of {report.needles}" for run in runs.values()), ""])
    return ["", *(HEADINGS[name] for name in runs), "ratio"], rows


def every_run(report: DemoReport) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table with each run by itself, turn by turn."""
    runs = [
        (f"{HEADINGS[name]} {n}", turn[name])
        for n, turn in enumerate(report.repeats, 1)
        for name in HEADINGS
        if name in turn
    ]
    rows = [
        [label, *(_show(getattr(run, key) * factor, unit, decimals) for _, run in runs)]
        for label, key, unit, decimals, factor in ROWS
    ]
    rows.append(["needles found", *(f"{run.needle_hits:g} of {report.needles}" for _, run in runs)])
    return ["", *(heading for heading, _ in runs)], rows


def _show(value: float, unit: str, decimals: int) -> str:
    return f"{value:,.{decimals}f} {unit}".rstrip()
