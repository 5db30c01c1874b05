"""Unrelated work on the same cores: does anything of ours wait longer than its share?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import Bench
from vtoken.evaluation.bench.burner import burning, usable_cores
from vtoken.evaluation.bench.contention_task import RUN_TIMED
from vtoken.evaluation.bench.figures import COLOURS, LABELS, new_figure
from vtoken.evaluation.bench.intervals import Interval, interval, interval_of_factors, ratio
from vtoken.evaluation.bench.load import RUN_LOAD, as_arguments
from vtoken.evaluation.bench.quality_of import in_words
from vtoken.evaluation.bench.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY = "h2o"
BUDGET = 0.75
INTERVAL = 8
VARIANTS = ("native", "pack", "fill", "fill again")
"""The last one is the one before it in another engine: what they differ by is noise."""
NAMES = {**LABELS, "fill again": "vtoken, fill (A/A)"}
QUIET, BUSY = "quiet", "busy"
MOST_SECONDS = 120.0
"""After which the unrelated work ends by itself, whatever becomes of us."""
MOST_WAITED = 0.01
"""Share of a run that the host may wait for copies."""


@dataclass(frozen=True)
class Sizes:
    """Requests that start together, with prompts of ``prompt`` tokens."""

    requests: int = 4
    prompt: int = 64
    outputs: int = 65


QUICK = Sizes(requests=2, prompt=64, outputs=17)


class Contention(Experiment):
    name = "contention"
    question = "With unrelated work on every core, does anything of ours wait longer than its share?"

    def measure(self, bench: Bench) -> list[Run]:
        sizes = QUICK if bench.quick else Sizes()
        variants = [name for name in VARIANTS if not (bench.quick and name in ("pack", "fill again"))]
        works = as_arguments(bench.requests.exactly(sizes.requests, sizes.prompt, sizes.outputs))
        cores = usable_cores()
        quality = bench.quality_of(POLICY, BUDGET, **({} if bench.quick else {"interval": INTERVAL}))
        runs: list[Run] = [{"variant": "quality", **quality}]
        engines = {name: bench.engine(settings(name), copy=int(name == "fill again")) for name in variants}
        for repeat, variant in bench.interleaved(variants, "contention"):
            engine = engines[variant]
            task = RUN_LOAD if variant == "native" else RUN_TIMED
            arguments: dict[str, Any] = {"workloads": works, **({"series": True} if variant == "native" else {})}
            for state in (QUIET, BUSY) if repeat % 2 == 0 else (BUSY, QUIET):
                with burning(cores if state == BUSY else [], MOST_SECONDS):
                    told = engine.do(task, **arguments)
                kept = ("output_tokens_per_s", "seconds", "tokens_evicted", "tokens_moved", "preemptions")
                runs.append(
                    {
                        "variant": variant,
                        "repeat": repeat,
                        "state": state,
                        "cores": len(cores),
                        "copy_wait_ms": told.get("copy_wait_ms"),
                        "step_ms": (np.diff([row[0] for row in told["series"]]) * 1e3).tolist(),
                        **{name: told[name] for name in kept},
                    }
                )
        return runs

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        columns = [
            Column("variant"),
            Column("tokens/s, quiet", 1),
            Column("tokens/s, busy", 1),
            Column("busy / quiet", 2),
            Column("p95 step, quiet, ms", 1),
            Column("p95 step, busy, ms", 1),
            Column("busy / quiet, p95", 2),
            Column("host waits for copies, quiet", 2, percent=True),
            Column("the same, busy", 2, percent=True),
            Column("tokens evicted"),
            Column("tokens moved"),
        ]
        rows: list[list[Any]] = []
        for variant in variants_of(runs):
            quiet, busy = (figures_of(runs, variant, state) for state in (QUIET, BUSY))
            rows.append(
                [
                    NAMES[variant],
                    interval_of_factors(quiet.throughput),
                    interval_of_factors(busy.throughput),
                    ratio(busy.throughput, quiet.throughput),
                    interval_of_factors(quiet.p95_ms),
                    interval_of_factors(busy.p95_ms),
                    ratio(busy.p95_ms, quiet.p95_ms),
                    interval(quiet.waited) if quiet.waited else None,
                    interval(busy.waited) if busy.waited else None,
                    sum(run["tokens_evicted"] for run in runs if run["variant"] == variant),
                    sum(run["tokens_moved"] for run in runs if run["variant"] == variant),
                ]
            )
        one = next(run for run in runs if run["variant"] != "quality")
        note = (
            f"Busy: a process that counts, on each of the {one['cores']} cores. Steps are decode steps. Waiting for "
            "copies, which run beside the host's work (copies: async), is a share of the run. "
            + in_words(next(run for run in runs if run["variant"] == "quality"))
        )
        columns_of_ratios = [Column("what of the own quiet throughput is left"), Column("ratio", 3), Column("repeats")]
        kept: list[list[Any]] = [[what, found, found.repeats] for what, found in kept_against(runs).items()]
        return [
            Table("Unrelated work on the same cores", columns, rows, note),
            Table(
                "Is a variant slowed down more than native vLLM?",
                columns_of_ratios,
                kept,
                "Busy / quiet of the one over busy / quiet of the other, paired by repeat: below 1, the first one "
                "loses more.",
            ),
        ]

    def figure(self, runs: Sequence[Run]) -> "Figure":
        figure, (throughput, steps) = new_figure(1, 2)
        names = variants_of(runs)
        for axes, values, unit in (
            (throughput, lambda found: found.throughput, "output tokens/s"),
            (steps, lambda found: found.p95_ms, "ms"),
        ):
            for place, state in enumerate((QUIET, BUSY)):
                found = [interval_of_factors(values(figures_of(runs, variant, state))) for variant in names]
                at = [n + (place - 0.5) * 0.4 for n in range(len(names))]
                heights = [value.median for value in found]
                colours = [COLOURS[variant.split()[0]] for variant in names]
                axes.bar(at, heights, 0.4, color=colours, alpha=1.0 if state == QUIET else 0.45, edgecolor="white")
                low = [max(value.median - value.low, 0.0) for value in found]
                high = [max(value.high - value.median, 0.0) for value in found]
                if any(low + high):
                    axes.errorbar(at, heights, [low, high], fmt="none", ecolor="black", elinewidth=1, capsize=2)
                ink = "white" if state == QUIET else "black"
                place_of_name = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "ha": "center"}
                for x in at:
                    axes.annotate(state, (x, 0), (0, 3), **place_of_name, fontsize=7, color=ink)
            axes.set_xticks(range(len(names)), [NAMES[variant].replace(", ", ",\n") for variant in names])
            axes.set(ylabel=unit)
        throughput.set(title="Throughput beside unrelated work", ylim=(0, None))
        steps.set(title="95th percentile of a decode step", yscale="log")
        steps.set_ylim(bottom=min(bar.get_height() for bar in steps.patches) / 2)
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        checks = []
        for variant in variants_of(runs):
            mine = [run for run in runs if run["variant"] == variant]
            for what, counted in (("evictions", "tokens_evicted"), ("copies that may have to wait", "tokens_moved")):
                having = sum(run[counted] > 0 for run in mine)
                if variant != "native":
                    checks.append(
                        Check(
                            f"runs with {what}, {NAMES[variant]}",
                            f"{len(mine)} of {len(mine)}",
                            str(having),
                            having == len(mine),
                        )
                    )
        slowed = ratio(*(figures_of(runs, "native", state).throughput for state in (BUSY, QUIET)))
        checks.append(
            Check(
                "the unrelated work slows native vLLM down, busy / quiet",
                "below 1 beyond the interval",
                Column("", 2).show(slowed),
                slowed.high < 1.0,
                "aim",
                "without contention there is nothing to tell: the cores were busy before",
            )
        )
        for what, found in kept_against(runs).items():
            if what.endswith(" / native"):
                checks.append(
                    Check(
                        f"throughput left under contention, {what}",
                        "not below 1 beyond the interval",
                        Column("", 3).show(found),
                        found.high >= 1.0,
                        "aim",
                        "vtoken's own work on the host has to share its core, too",
                    )
                )
        for variant in variants_of(runs):
            if waited := figures_of(runs, variant, BUSY).waited:
                share = interval(waited)
                checks.append(
                    Check(
                        f"share of a busy run that the host waits for copies, {NAMES[variant]}",
                        f"at most {MOST_WAITED:.0%}",
                        Column("", 2, percent=True).show(share),
                        share.median <= MOST_WAITED,
                        "aim",
                        "the copying thread gets a core later than it would on a quiet machine",
                    )
                )
        return checks


@dataclass(frozen=True)
class Figures:
    """Of one variant in one state, repeat by repeat.

    Attributes:
        throughput: output tokens/s.
        p95_ms: 95th percentile of the decode steps.
        waited: share of the run that the host waited for copies; empty where none are made.
    """

    throughput: list[float]
    p95_ms: list[float]
    waited: list[float]


def figures_of(runs: Sequence[Run], variant: str, state: str) -> Figures:
    mine = [run for run in runs if run["variant"] == variant and run["state"] == state]
    mine.sort(key=lambda run: int(run["repeat"]))
    return Figures(
        [run["output_tokens_per_s"] for run in mine],
        [float(np.percentile(run["step_ms"], 95)) for run in mine],
        [run["copy_wait_ms"] / 1e3 / run["seconds"] for run in mine if run["copy_wait_ms"] is not None],
    )


def kept_against(runs: Sequence[Run]) -> dict[str, Interval]:
    """What is left of the own quiet throughput, of one variant over another one, paired by repeat."""
    left = {}
    for variant in variants_of(runs):
        quiet, busy = (figures_of(runs, variant, state).throughput for state in (QUIET, BUSY))
        left[variant] = [b / q for b, q in zip(busy, quiet, strict=True)]
    pairs = [("fill", "native"), ("pack", "native"), ("fill", "fill again")]
    return {
        "fill / the same again (A/A)" if other == "fill again" else f"{one} / {other}": ratio(left[one], left[other])
        for one, other in pairs
        if one in left and other in left
    }


def variants_of(runs: Sequence[Run]) -> list[str]:
    return [name for name in VARIANTS if any(run["variant"] == name for run in runs)]


def settings(variant: str) -> VTokenConfig | None:
    """pack looks at every step and packs what there is: copies are what may have to wait."""
    if variant == "native":
        return None
    packing: dict[str, Any] = (
        {"reclaim": "pack", "low_watermark": 1.0, "theta_f": 0.1, "check_interval": 1} if variant == "pack" else {}
    )
    return VTokenConfig(policy=POLICY, budget=BUDGET, interval=INTERVAL, **packing)
