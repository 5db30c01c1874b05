"""What the runs of ``overhead`` say: its tables and figures."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vtoken.evaluation.bench.base import Run
from vtoken.evaluation.bench.figures import COLOURS, FURTHER
from vtoken.evaluation.bench.intervals import Interval, interval, ratio
from vtoken.evaluation.bench.tables import Column, Table
from vtoken.evaluation.bench.ways import QUALITY_COLUMNS, quality_cells

STOCK, AGAIN, HOOKS = "stock", "stock again", "hooks on, nothing to evict"
EVICTING = "one eviction per request and step"
MODES = ("async", "inline", "force_sync")
ASYNC_AGAIN = "async again"
NARROW = 0.03
"""The half-width of the A/A interval that is asked for."""
MOST_REPEATS = 14
SLICES = 3
"""Turns that each engine takes within a repeat."""
MEASURES = (("output_tokens_per_s", "output tokens/s"), ("tpot_p95_ms", "p95 ms per output token"))


def part_of(runs: Sequence[Run], part: str, **fields: Any) -> list[Run]:
    """The runs of one part of the experiment, with these values."""
    return [run for run in runs if run["part"] == part and all(run[name] == value for name, value in fields.items())]


def concurrencies(runs: Sequence[Run]) -> list[int]:
    """How many requests decoded where the indirection alone was measured."""
    return sorted({run["concurrency"] for run in part_of(runs, "load")})


def breakdowns(runs: Sequence[Run]) -> dict[tuple[int, str], list[Run]]:
    """The repeats under the clock, by number of requests and variant."""
    counts = sorted({run["concurrency"] for run in part_of(runs, "breakdown")})
    found = {
        (count, variant): part_of(runs, "breakdown", concurrency=count, variant=variant)
        for count in counts
        for variant in (STOCK, HOOKS, EVICTING)
    }
    return {of: mine for of, mine in found.items() if mine}


def _values(runs: Sequence[Run], name: str, **fields: Any) -> list[float]:
    return [run[name] for run in part_of(runs, "load", **fields)]


def against_stock(runs: Sequence[Run], name: str, concurrency: int, variant: str) -> Interval:
    """How a variant compares with stock; with both stock engines, unless it is one of them."""
    ours = _values(runs, name, concurrency=concurrency, variant=variant)
    stock = _values(runs, name, concurrency=concurrency, variant=STOCK)
    if variant == HOOKS:
        again = _values(runs, name, concurrency=concurrency, variant=AGAIN)
        stock = [float(np.sqrt(a * b)) for a, b in zip(stock, again, strict=True)]
    return ratio(ours, stock)


def widths(runs: Sequence[Run], concurrency: int) -> list[float]:
    """Half-widths of the A/A intervals, one for each of ``MEASURES``."""
    return [against_stock(runs, name, concurrency, AGAIN).half_width for name, _ in MEASURES]


def load_table(runs: Sequence[Run]) -> Table:
    rows = []
    for concurrency in concurrencies(runs):
        for name, shown in MEASURES:
            stock, ours = (
                interval(_values(runs, name, concurrency=concurrency, variant=variant)) for variant in (STOCK, HOOKS)
            )
            floor, cost = (against_stock(runs, name, concurrency, variant) for variant in (AGAIN, HOOKS))
            rows.append((concurrency, shown, stock.repeats, stock, ours, cost, floor))
    columns = [
        Column("requests"),
        Column("measure"),
        Column("repeats"),
        Column("stock vLLM", 1),
        Column("hooks on", 1),
        Column("hooks / stock", 1, percent=True),
        Column("A/A: stock / stock", 1, percent=True),
    ]
    steps = len(part_of(runs, "load")[0]["step_ms"])
    note = (
        f"All requests decode; a repeat is {steps} steps of each engine, in {SLICES} turns. Medians with 95 % "
        f"intervals; ratios are paired by repeat, and repeats are added until the A/A intervals are within "
        f"{NARROW:.0%} either way, or there are {MOST_REPEATS}, or the pool is full. Each request has a budget, "
        "which it does not reach. hooks on: streaming_llm, which never looks at attention; vLLM's compilation is on."
    )
    return Table("The indirection alone", columns, rows, note)


def share_table(runs: Sequence[Run]) -> Table:
    rows = [
        (
            concurrency,
            variant,
            sum(run["tokens_evicted"] for run in mine) / sum(run["steps"] for run in mine),
            interval([run["step_ms"] for run in mine]),
            interval([run["phases"]["hooks"] for run in mine]),
            interval([run["hooks_share"] for run in mine]),
            interval([run["phases"]["relocation"] for run in mine]),
        )
        for (concurrency, variant), mine in breakdowns(runs).items()
        if variant != STOCK
    ]
    columns = [
        Column("requests"),
        Column("what"),
        Column("evictions per step", 1),
        Column("step, ms", 1),
        Column("in hooks, ms", 2),
        Column("share of the step", 2, percent=True),
        Column("relocation, ms", 2),
    ]
    one = part_of(runs, "breakdown")[0]
    note = (
        "Hooks: outermost frames of vtoken less the vLLM calls inside them, with the clock's own cost in them. "
        f"Repeats of {one['steps']} steps."
    )
    return Table("Time inside our hooks", columns, rows, note)


def phase_table(runs: Sequence[Run]) -> Table:
    found = _mean_phases(runs)
    columns = [Column("phase"), *(Column(f"{variant}, ms", 2) for variant in found)]
    rows: list[tuple[Any, ...]] = [
        (phase, *(phases[phase] for phases in found.values())) for phase in next(iter(found.values()))
    ]
    rows.append(("step", *(sum(phases.values()) for phases in found.values())))
    note = (
        "Means of the same steps. Every moment counts for the innermost phase. Where there are evictions contexts are "
        "longer, so forwards do not compare across columns."
    )
    return Table(f"A decode step of {_smallest(runs)} requests, phase by phase", columns, rows, note)


def _smallest(runs: Sequence[Run]) -> int:
    """The number of requests at which all three variants were under the clock."""
    return min(run["concurrency"] for run in part_of(runs, "breakdown"))


def _mean_phases(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Milliseconds per step by phase, of each variant."""
    return {
        variant: {phase: float(np.mean([run["phases"][phase] for run in mine])) for phase in mine[0]["phases"]}
        for (concurrency, variant), mine in breakdowns(runs).items()
        if concurrency == _smallest(runs)
    }


def copy_table(runs: Sequence[Run]) -> Table:
    rows = []
    inline = [run["output_tokens_per_s"] for run in part_of(runs, "copies", variant="inline")]
    for mode in (*MODES, ASYNC_AGAIN):
        mine = part_of(runs, "copies", variant=mode)
        rows.append(
            (
                mode,
                sum(run["relocations"] for run in mine),
                sum(run["tokens_moved"] for run in mine),
                *(interval([run[name] for run in mine]) for name in ("copy_ms", "stall_ms")),
                interval([run["output_tokens_per_s"] for run in mine]),
                None if mode == "inline" else ratio([run["output_tokens_per_s"] for run in mine], inline),
            )
        )
    columns = [
        Column("copies"),
        Column("relocations"),
        Column("tokens moved"),
        Column("the copy itself, ms", 2),
        Column("host stands still, ms", 2),
        Column("output tokens/s", 1),
        Column("against inline", 1, percent=True),
    ]
    note = (
        "fill, random victims in bursts, one engine whose way of copying is exchanged; per relocation. async copies "
        "on a thread beside sampling and scheduling; force_sync does that and waits at once; inline copies on the "
        "host's own thread. async stands there twice (A/A)."
    )
    return Table("Copies", columns, rows, note)


def quality_table(runs: Sequence[Run]) -> Table:
    rows = [(run["policy"], *quality_cells(run)) for run in part_of(runs, "quality")]
    columns = [Column("policy, half of the prompt"), *QUALITY_COLUMNS]
    return Table("What evicting as in these runs costs in quality", columns, rows)


def draw_ratios(axes: Any, runs: Sequence[Run]) -> None:
    labels: list[str] = []
    for concurrency in concurrencies(runs):
        for name, shown in MEASURES:
            place = len(labels)
            for variant, colour, marker, shift in (
                (AGAIN, COLOURS["native"], "s", 0.15),
                (HOOKS, COLOURS["fill"], "o", -0.15),
            ):
                found = against_stock(runs, name, concurrency, variant)
                middle = 100 * found.median
                spread = [[max(middle - 100 * found.low, 0.0)], [max(100 * found.high - middle, 0.0)]]
                label = {AGAIN: "stock / stock (A/A)", HOOKS: "hooks on / stock"}[variant] if not labels else None
                axes.errorbar([middle], [place + shift], xerr=spread, fmt=marker, color=colour, capsize=3, label=label)
            labels.append(f"{concurrency} requests,\n{shown}")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -1.1)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("% of stock vLLM, 95 % interval")
    axes.set_title("What do idle hooks cost?")
    axes.legend(loc="upper center", fontsize=7, ncols=2)


def draw_phases(axes: Any, runs: Sequence[Run]) -> None:
    """Without the forward, beside which nothing else could be seen."""
    found = _mean_phases(runs)
    names = {STOCK: "stock", HOOKS: "hooks on,\nnothing to evict", EVICTING: "one eviction per\nrequest and step"}
    colours = ("#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#000000", "#cc79a7", "#f0e442")
    bottom = np.zeros(len(found))
    phases = [phase for phase in next(iter(found.values())) if phase != "forward"]
    for phase, colour in zip(phases, colours, strict=True):
        values = np.array([spent[phase] for spent in found.values()])
        axes.bar(range(len(found)), values, bottom=bottom, color=colour, label=phase, width=0.6)
        bottom += values
    labels = [f"{names[variant]}\n(forward: {spent['forward']:.0f} ms)" for variant, spent in found.items()]
    axes.set_xticks(range(len(found)), labels, fontsize=8)
    axes.set_ylabel("ms per step beside the forward")
    axes.set_title(f"Where does a step of {_smallest(runs)} requests go?")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_stalls(axes: Any, runs: Sequence[Run]) -> None:
    for shift, name, label, colour in (
        (-0.18, "copy_ms", "the copy itself", FURTHER[2]),
        (0.18, "stall_ms", "the host stands still", COLOURS["none"]),
    ):
        found = [interval([run[name] for run in part_of(runs, "copies", variant=mode)]) for mode in MODES]
        spread = [
            [max(one.median - one.low, 0.0) for one in found],
            [max(one.high - one.median, 0.0) for one in found],
        ]
        places = [n + shift for n in range(len(MODES))]
        axes.bar(places, [one.median for one in found], 0.34, yerr=spread, capsize=3, color=colour, label=label)
    axes.set_xticks(range(len(MODES)), MODES)
    axes.set_ylim(0, 1.3 * max(bar.get_height() for bar in axes.patches))
    axes.set_ylabel("ms per relocation, 95 % interval")
    axes.set_title("Does the host wait for copies?")
    axes.legend(fontsize=8, loc="upper center", ncols=2)
