"""The demo's figures as one table and as one JSON file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

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


@dataclass(frozen=True)
class DemoReport:
    """All that the demo found out. ``runs`` has the medians of ``repeats``; ``needles`` counts questions."""

    model: str
    engine_args: dict[str, Any]
    vtoken_config: dict[str, Any]
    block_size: int
    num_blocks: int
    needles: int
    runs: dict[str, RunResult]
    repeats: list[dict[str, RunResult]]

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
    """native | vtoken | vtoken / native, one row per figure."""
    native, vtoken = report.runs["native"], report.runs["vtoken"]
    turns = len(report.repeats)
    title = f"{report.num_blocks} blocks of {report.block_size} tokens" + (
        f", median of {turns} runs" if turns > 1 else ""
    )
    grid = Table(title=title)
    grid.add_column("")
    for heading in ("native vLLM", "vtoken", "ratio"):
        grid.add_column(heading, justify="right")
    for label, key, unit, decimals, factor in ROWS:
        before, after = (getattr(run, key) * factor for run in (native, vtoken))
        ratio = f"{after / before:.2f}x" if before else "-"
        grid.add_row(label, _show(before, unit, decimals), _show(after, unit, decimals), ratio)
    hits = (f"{run.needle_hits:g} of {report.needles}" for run in (native, vtoken))
    grid.add_row("needles found", *hits, "")
    return grid


def _show(value: float, unit: str, decimals: int) -> str:
    return f"{value:,.{decimals}f} {unit}".rstrip()
