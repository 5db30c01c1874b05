"""The queue over time, as a figure."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.evaluation.bench.figures import COLOURS, STYLE, new_figure
from vtoken.planning.report import HEADINGS, PlanReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
WIDTHS = {"native": 0.8, "none": 1.6, "fill": 0.9}
"""Naive eviction often does what vtoken does, and is seen behind it then."""
BEHIND = {"native": 2.2, "none": 2.1, "fill": 2.3}


def queue_figure(report: PlanReport) -> "Figure":
    """Requests that wait and run, and blocks held, of all variants: the most of each stretch of time."""
    figure, (waiting, running, held) = new_figure(3, 1, width=7.5, height=2.1, sharex=True)
    for name, found in report.found.items():
        course = found["series"]
        minutes = [second / 60 for second in course["seconds"]]
        share = [100 * blocks / report.pool.num_blocks for blocks in course["held"]]
        for axes, values in ((waiting, course["waiting"]), (running, course["running"]), (held, share)):
            axes.plot(minutes, values, color=COLOURS[name], label=HEADINGS[name], lw=WIDTHS[name], zorder=BEHIND[name])
    arrivals_end = report.workload.seconds / 60
    for axes in (waiting, running, held):
        if arrivals_end:
            axes.axvline(arrivals_end, color="black", linestyle=":", linewidth=0.8, label="last arrival")
        axes.set_ylim(bottom=0)
    limit = report.setting.max_num_seqs
    if max(max(found["series"]["running"]) for found in report.found.values()) > 0.7 * limit:
        running.axhline(limit, color="black", linestyle="--", linewidth=0.8, label=f"max_num_seqs = {limit}")
    waiting.set(title=_title(report), ylabel="requests waiting")
    running.set(ylabel="requests running")
    held.set(ylabel="blocks held, %", xlabel="minutes since the first arrival", ylim=(0, 104), xlim=(0, None))
    figure.legend(*running.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def write_figure(report: PlanReport, path: Path) -> None:
    """Write it as PNG, SVG or PDF, by the end of its name."""
    from matplotlib import rc_context

    kind = path.suffix.lower()
    metadata: dict[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None}}
    with rc_context(STYLE):
        queue_figure(report).savefig(path, metadata=metadata.get(kind))


def _title(report: PlanReport) -> str:
    return (
        f"{len(report.workload.arrivals):,} requests of {Path(report.source).name}, "
        f"{Path(report.model.name).name} on {report.gpu.name}, {report.pool.num_blocks:,} blocks"
    )
