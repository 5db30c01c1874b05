"""Long quiet stretches, then mass eviction: how far waste and the time of a step spike, and for how long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import Bench
from vtoken.evaluation.bench.figures import COLOURS, FURTHER, LABELS, new_figure
from vtoken.evaluation.bench.intervals import Interval, interval, ratio
from vtoken.evaluation.bench.load import RUN_LOAD, as_arguments
from vtoken.evaluation.bench.quality_of import in_words
from vtoken.evaluation.bench.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY = "h2o"
BUDGET = 0.75
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"reclaim": "none"},
    "pack": {"reclaim": "pack"},
    "pack at once": {"reclaim": "pack", "sudden_rise": 0.1},
    "fill": {"reclaim": "fill"},
    "fill again": {"reclaim": "fill"},
}
"""The last one is the one before it in another engine: what they differ by is noise."""
PACKING: dict[str, Any] = {"low_watermark": 1.0, "headroom": 0.1}
"""Waste alone decides whether to pack, however many blocks are free, and there is room to copy into."""
NAMES = {**LABELS, "pack at once": "vtoken, pack with sudden_rise", "fill again": "vtoken, fill (A/A)"}
LINES = {**COLOURS, "pack at once": FURTHER[0]}
AFTER = 16
"""Steps from a burst on, that one included, among which the slowest is sought."""
MOST_NOISE = 1e-9


@dataclass(frozen=True)
class Sizes:
    """All requests start together, and forget ``interval`` tokens each at the same time.

    Attributes:
        requests: at once, with prompts of ``prompt`` tokens.
        interval: tokens between two evictions.
        bursts: mass evictions after that at the prompt's end.
    """

    requests: int = 4
    prompt: int = 256
    interval: int = 64
    bursts: int = 2

    @property
    def outputs(self) -> int:
        """The last burst is followed by ``AFTER`` more steps."""
        return self.bursts * self.interval + AFTER + 2


QUICK = Sizes(requests=2, prompt=192, interval=32, bursts=1)


class Bursty(Experiment):
    name = "bursty"
    question = "When all requests forget much at once, how far do waste and the time of a step spike, and for how long?"

    def measure(self, bench: Bench) -> list[Run]:
        sizes = QUICK if bench.quick else Sizes()
        variants = [name for name in VARIANTS if not (bench.quick and name in ("pack", "fill again"))]
        repeats = bench.wanted_repeats or (1 if bench.quick else bench.repeats)
        works = as_arguments(bench.requests.exactly(sizes.requests, sizes.prompt, sizes.outputs))
        quality = bench.quality_of(POLICY, BUDGET, **({} if bench.quick else {"interval": sizes.interval}))
        runs: list[Run] = [{"variant": "quality", **quality}]
        engines = {
            variant: bench.engine(
                settings(variant, sizes.interval),
                num_blocks=2 * sizes.requests * -(-(sizes.prompt + sizes.outputs) // 32),
                max_model_len=1024,
                copy=int(variant == "fill again"),
                max_num_batched_tokens=max(sizes.requests * sizes.prompt, 2048),  # all prompts end in one step
            )
            for variant in variants
        }
        for repeat, variant in bench.interleaved(variants, "bursty", repeats):
            engine = engines[variant]
            told = engine.do(RUN_LOAD, workloads=works, series=True)
            kept = ("series", "tokens_evicted", "tokens_moved", "blocks_reclaimed", "preemptions", "peak_blocks")
            runs.append(
                {
                    "variant": variant,
                    "repeat": repeat,
                    "requests": sizes.requests,
                    "bursts": sizes.bursts,
                    "interval": sizes.interval,
                    "block_size": engine.block_size,
                    "theta_f": settings(variant, sizes.interval).theta_f,
                    **{name: told[name] for name in kept},
                }
            )
        return runs

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        columns = [
            Column("variant"),
            Column("bursts"),
            Column("tokens evicted"),
            Column("peak F after a burst", 1, percent=True),
            Column("steps until F is at most theta_F"),
            Column("of all steps, above it", percent=True),
            Column("peak blocks"),
            Column("tokens moved"),
            Column("blocks handed back"),
            Column("median step, ms", 1),
            Column("slowest step after a burst / median", 2),
        ]
        rows: list[list[Any]] = []
        for variant in variants_of(runs):
            mine = [run for run in runs if run["variant"] == variant]
            bursts = [burst for run in mine for burst in bursts_of(run)]
            rows.append(
                [
                    NAMES[variant],
                    len(bursts),
                    mine[0]["tokens_evicted"],
                    max((burst.peak_waste for burst in bursts), default=None),
                    _recovery(bursts),
                    float(np.mean([burst.above for burst in bursts])) if bursts else None,
                    max(run["peak_blocks"] for run in mine),
                    mine[0]["tokens_moved"],
                    mine[0]["blocks_reclaimed"],
                    float(np.median([burst.median_ms for burst in bursts])) if bursts else None,
                    interval([burst.slowest for burst in bursts]) if bursts else None,
                ]
            )
        first = next(run for run in runs if run["variant"] != "quality")
        note = (
            f"{first['requests']} requests that start together; each forgets {first['interval']} tokens at the same "
            f"step, every {first['interval']} tokens. Tokens and blocks are those of one run, the prompts' end "
            f"included. The slowest of the {AFTER} steps from a burst on, as a multiple of the median of those before "
            f"it, has the 95 % interval of the mean over the bursts. pack: low_watermark={PACKING['low_watermark']:g}, "
            f"headroom={PACKING['headroom']:g}, looks every 16 steps; with sudden_rise=0.1 at once. "
            + in_words(next(run for run in runs if run["variant"] == "quality"))
        )
        tables = [Table("Mass evictions", columns, rows, note)]
        if compared := ratios(runs):
            shown = [Column("slowest step after a burst"), Column("ratio", 2), Column("bursts")]
            lines: list[list[Any]] = [[what, found, found.repeats] for what, found in compared.items()]
            tables.append(Table("Against each other, burst by burst", shown, lines))
        return tables

    def figure(self, runs: Sequence[Run]) -> "Figure":
        figure, (waste, times) = new_figure(2, 1, width=7.5, height=2.6, sharex=True)
        for variant in variants_of(runs):
            if variant == "fill again":
                continue
            run = next(run for run in runs if run["variant"] == variant)
            steps = range(len(run["series"]))
            waste.plot(steps, waste_of(run) * 100, color=LINES[variant], label=NAMES[variant])
            times.plot(steps[1:], step_times(run)[1:], color=LINES[variant], linewidth=0.8)
        shown = next(run for run in runs if run["variant"] != "quality")
        waste.axhline(shown["theta_f"] * 100, color=COLOURS["native"], linestyle="--", linewidth=1, label="theta_F")
        for burst in bursts_of(shown):
            for axes in (waste, times):
                axes.axvline(burst.step, color=COLOURS["native"], linewidth=0.6, alpha=0.6)
        waste.set(title="Mass evictions: slots that are held and hold nothing", ylabel="F, %")
        times.set(title="The time that each step takes", xlabel="step", ylabel="ms", ylim=(0, None))
        figure.legend(loc="outside upper center", ncols=3)
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        checks = []
        for variant in variants_of(runs):
            mine = [run for run in runs if run["variant"] == variant]
            counts = [len(bursts_of(run)) for run in mine]
            checks.append(
                Check(
                    f"mass evictions in every run, {NAMES[variant]}",
                    str(mine[0]["bursts"]),
                    ", ".join(map(str, counts)),
                    all(count == run["bursts"] for count, run in zip(counts, mine, strict=True)),
                )
            )
        filled = [run for run in runs if run["variant"] in ("fill", "fill again")]
        over = max(most_over_bound(run) for run in filled)
        checks.append(Check("fill: F less S/(n+S), at most, over all steps", "0", f"{over:+.4f}", over <= MOST_NOISE))
        late = [burst.recovery for run in filled for burst in bursts_of(run)]
        checks.append(
            Check(
                "fill: F is at most theta_F when the step of a burst ends",
                f"{len(late)} of {len(late)} bursts",
                str(sum(steps == 0 for steps in late)),
                all(steps == 0 for steps in late),
                "aim",
                "S/(n+S) itself is above theta_F for a request that keeps less than three blocks of tokens",
            )
        )
        if compared := ratios(runs).get(FILL_AGAINST_NONE):
            checks.append(
                Check(
                    f"slowest step after a burst, {FILL_AGAINST_NONE}",
                    "not above 1 beyond the interval",
                    Column("", 2).show(compared),
                    compared.low <= 1.0,
                    "aim",
                    f"fill moves {_moved_in_a_burst(runs, 'fill'):.0f} tokens in a burst, none moves nothing",
                )
            )
        return checks


FILL_AGAINST_NONE = "fill / none"


def _moved_in_a_burst(runs: Sequence[Run], variant: str) -> float:
    run = next(run for run in runs if run["variant"] == variant)
    return float(run["tokens_moved"] / run["bursts"])


COMPARED = {
    "fill / the same again (A/A)": ("fill", "fill again"),
    FILL_AGAINST_NONE: ("fill", "none"),
    "pack / none": ("pack", "none"),
    "pack with sudden_rise / none": ("pack at once", "none"),
}


@dataclass(frozen=True)
class Burst:
    """What followed a mass eviction.

    Attributes:
        step: that evicted, 0-based.
        peak_waste: largest F from there to the next one.
        recovery: steps until F was at most theta_F, 0 if at once; None if it never was before the next one.
        above: share of the steps from there to the next one after which F was above theta_F.
        median_ms: of the steps before it, since the last one.
        slowest: of the ``AFTER`` steps from it on, as a multiple of that.
    """

    step: int
    peak_waste: float
    recovery: int | None
    above: float
    median_ms: float
    slowest: float


def settings(variant: str, every: int) -> VTokenConfig:
    options = VARIANTS[variant]
    packing: dict[str, Any] = PACKING if options["reclaim"] == "pack" else {}
    return VTokenConfig(policy=POLICY, budget=BUDGET, interval=every, **options, **packing)


def variants_of(runs: Sequence[Run]) -> list[str]:
    return [name for name in VARIANTS if any(run["variant"] == name for run in runs)]


def waste_of(run: Run) -> Any:
    """F after each step; 0 where nothing is held."""
    held, live = np.array([[held, live] for _, held, live, _, _ in run["series"]], dtype=float).T
    return np.where(held > 0, 1 - live / np.maximum(held * run["block_size"], 1), 0.0)


def step_times(run: Run) -> Any:
    """Milliseconds of each step."""
    return np.diff([0.0, *(row[0] for row in run["series"])]) * 1e3


def bursts_of(run: Run) -> list[Burst]:
    """Every step after which all requests together attend much fewer tokens than before it."""
    running = np.array([row[3] for row in run["series"]])
    live = np.array([row[2] for row in run["series"]])
    whole = (running[1:] == run["requests"]) & (running[:-1] == run["requests"])
    dropped = live[:-1] - live[1:] > run["requests"] * run["interval"] / 2
    steps = (np.flatnonzero(whole & dropped) + 1).tolist()
    end = int(np.flatnonzero(running == run["requests"])[-1]) + 1
    waste, times = waste_of(run), step_times(run)
    bursts = []
    for step, before, after in zip(steps, [0, *steps], [*steps[1:], end], strict=False):
        median = float(np.median(times[before + 1 : step]))
        low = np.flatnonzero(waste[step:after] <= run["theta_f"])
        bursts.append(
            Burst(
                step,
                float(waste[step:after].max()),
                int(low[0]) if len(low) else None,
                1 - len(low) / (after - step),
                median,
                float(times[step : min(step + AFTER, after)].max()) / median,
            )
        )
    return bursts


def most_over_bound(run: Run) -> float:
    """By how much F exceeds S/(n+S) at most, n being the tokens of each request: all have as many."""
    rows = [row for row in run["series"] if row[3] == run["requests"]]
    size = run["block_size"]
    return max(
        1 - live / (held * size) - size / (live / run["requests"] + size) for _, held, live, _, _ in rows if held
    )


def ratios(runs: Sequence[Run]) -> dict[str, Interval]:
    """Of the slowest steps after bursts, paired by burst and repeat; only of what was run."""
    slowest: dict[str, dict[tuple[int, int], float]] = {
        variant: {
            (run["repeat"], place): burst.slowest
            for run in runs
            if run["variant"] == variant
            for place, burst in enumerate(bursts_of(run))
        }
        for variant in variants_of(runs)
    }
    found = {}
    for what, (one, other) in COMPARED.items():
        ours, theirs = slowest.get(one, {}), slowest.get(other, {})
        if both := sorted(ours.keys() & theirs.keys()):
            found[what] = ratio([ours[key] for key in both], [theirs[key] for key in both])
    return found


def _recovery(bursts: Sequence[Burst]) -> str:
    steps = [burst.recovery for burst in bursts]
    late = sum(step is None for step in steps)
    known = sorted(step for step in steps if step is not None)
    shown = f"{known[0]} to {known[-1]}" if known and known[0] != known[-1] else str(known[0]) if known else ""
    return ", ".join(part for part in (shown, f"not before the next ({late} of {len(steps)})" if late else "") if part)
