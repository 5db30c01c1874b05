"""Sensitivity: one setting at a time, away from a common default."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import POLICIES, Bench
from vtoken.evaluation.bench.counted import POLICY as COUNTED_POLICY
from vtoken.evaluation.bench.counted import count_all
from vtoken.evaluation.bench.engines import RunningEngine
from vtoken.evaluation.bench.figures import COLOURS, LABELS, MARKERS, new_figure
from vtoken.evaluation.bench.intervals import interval, ratio
from vtoken.evaluation.bench.load import RUN_LOAD, as_arguments
from vtoken.evaluation.bench.quality_of import ENGINE_ARGS, QUALITY_COLUMNS, quality_cells
from vtoken.evaluation.bench.tables import Cell, Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY = "h2o"
PACKING: dict[str, Any] = {"low_watermark": 1.0, "check_interval": 1, "headroom": 0.1}
"""As if memory were always short: theta_f alone says when to pack."""
DEFAULTS: dict[str, float] = {
    "block size": 32,
    "eviction ratio": 0.5,
    "theta_F": 0.25,
    "batch M": 8,
    "score interval": 1,
}
DEFAULT, AGAIN = "default", "default again"
MOST_HALF_WIDTH = 0.03


@dataclass(frozen=True)
class Sizes:
    """Prompts, outputs, and the values that are tried, of runs that are counted and of runs that are timed.

    Block counts come from a scheduler without a model, which takes any block size; the model's attention on a CPU
    takes multiples of 32.
    """

    lengths: tuple[int, ...]
    counted_outputs: int
    counted: dict[str, tuple[float, ...]]
    requests: int
    prompt: int
    outputs: int
    timed: dict[str, tuple[float, ...]]


FULL = Sizes(
    lengths=tuple(range(256, 1153, 128)),
    counted_outputs=128,
    counted={
        "block size": (16, 32, 48, 64, 128),
        "eviction ratio": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
        "theta_F": (0.05, 0.1, 0.2, 0.25, 0.35, 0.5, 0.7, 0.9),
        "batch M": (2, 4, 8, 16, 32),
    },
    requests=4,
    prompt=192,
    outputs=96,
    timed={
        "block size": (64, 128),
        "eviction ratio": (0.3, 0.8),
        "score interval": (8,),
        "theta_F": (0.05, 0.9),
        "batch M": (2,),
    },
)
QUICK = Sizes(
    lengths=(128, 192),
    counted_outputs=16,
    counted={"block size": (16, 32, 128), "eviction ratio": (0.3, 0.8), "theta_F": (0.05, 0.9), "batch M": (2, 8)},
    requests=2,
    prompt=96,
    outputs=6,
    timed={"eviction ratio": (0.3,)},
)


@dataclass(frozen=True)
class Point:
    """One setting with one value; all others are the default's."""

    parameter: str
    value: float | None
    mode: str
    settings: dict[str, Any] = field(default_factory=dict)
    block_size: int = int(DEFAULTS["block size"])
    budget: float = 1 - DEFAULTS["eviction ratio"]
    copy: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Of the engine, but for policy and budget."""
        packing = PACKING if self.mode == "pack" else {}
        return {"reclaim": self.mode, **packing, **self.settings}


class Sensitivity(Experiment):
    """Counts of a scheduler without a model over the whole range, and timed runs of the model at some of its points."""

    name: ClassVar[str] = "sensitivity"
    question: ClassVar[str] = "How much does each setting matter, when all others stay as they are?"

    def measure(self, bench: Bench) -> list[Run]:
        sizes = QUICK if bench.quick else FULL
        runs = _counted(bench, sizes)
        groups = [[Point(DEFAULT, None, "fill"), Point(AGAIN, None, "fill", copy=1), *_timed_points(sizes, "fill")]]
        if packed := _timed_points(sizes, "pack"):
            groups.append([Point(DEFAULT, None, "pack"), *packed])
        works = bench.requests.exactly(sizes.requests, sizes.prompt, sizes.outputs)
        for group in groups:
            engines = [_engine(bench, point) for point in group]
            for repeat, n in bench.interleaved(range(len(group)), f"sensitivity, {group[0].mode}"):
                point = group[n]
                extra = {"vtoken.policy": POLICY, "vtoken.budget": point.budget}
                asked = [replace(work, extra_args=extra) for work in works]
                found = engines[n].do(RUN_LOAD, workloads=as_arguments(asked))
                load = {"prompt": sizes.prompt, "outputs": sizes.outputs}
                runs.append({"kind": "timed", "repeat": repeat, **_about(point), **load, **found})
        for run in runs:
            if run["kind"] == "timed" and run["repeat"] == 0:
                of_engine = {"score_interval": int(run["value"])} if run["parameter"] == "score interval" else {}
                run["quality"] = bench.quality_of(POLICY, run["budget"], **of_engine)
        return runs

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        return [_counted_table(runs), _timed_table(runs)]

    def figure(self, runs: Sequence[Run]) -> "Figure":
        counted = _of_kind(runs, "counted")
        parameters = list(dict.fromkeys(run["parameter"] for run in counted))
        figure, axes = new_figure(rows=2, columns=len(parameters), width=3.2, height=2.6, squeeze=False)
        for column, parameter in enumerate(parameters):
            upper, lower = axes[:, column]
            size = 1 if parameter != "block size" else None
            for mode in COLOURS:
                points = [run for run in counted if run["parameter"] == parameter and run["mode"] == mode]
                if not points:
                    continue
                values = [run["value"] for run in points]
                look: dict[str, Any] = {"color": COLOURS[mode], "marker": MARKERS[mode], "markersize": 4}
                tokens = [run["blocks_per_request"] * (1 if size else run["block_size"]) for run in points]
                upper.plot(values, tokens, label=LABELS[mode], **look)
                lower.plot(values, [100 * run["waste_ratio"] for run in points], **look)
            upper.set(title=parameter, ylabel="blocks per request" if size else "slots held per request")
            lower.set(xlabel=parameter, ylabel="F, %")
            for axis in (upper, lower):
                axis.set_ylim(0, 1.1 * axis.dataLim.y1)
                axis.axvline(DEFAULTS[parameter], color="grey", linewidth=0.8, linestyle=":")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS))
        figure.suptitle("What does each setting change? (one at a time; dotted: the default)")
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        counted, timed = _of_kind(runs, "counted"), _of_kind(runs, "timed")
        checks = []
        for name, some in (("counted", counted), ("timed", timed)):
            least, preempted = min(run["tokens_evicted"] for run in some), sum(run["preemptions"] for run in some)
            checks.append(
                Check(
                    f"{name}: tokens evicted in each of {len(some)} runs, preemptions in all",
                    "above 0, none",
                    f"{least:,} or more, {preempted}",
                    least > 0 and preempted == 0,
                )
            )
        for parameter in dict.fromkeys(run["parameter"] for run in counted if run["mode"] == "fill"):
            of = {mode: _series(counted, parameter, mode) for mode in ("none", "fill")}
            never = all(of["fill"][value] <= blocks for value, blocks in of["none"].items())
            found = f"{sum(of['fill'].values()):.1f} and {sum(of['none'].values()):.1f} in all"
            checks.append(Check(f"{parameter}: blocks under fill and none", "never more under fill", found, never))
        for point in _points_of(timed):
            counts = {_counts(run) for run in timed if _key(run) == point}
            name = " ".join(str(part) for part in point if part is not None)
            found = f"{len(counts)} different"
            checks.append(Check(f"timed, {name}: counts of all repeats", "the same", found, len(counts) == 1))
        floor = ratio(*(_speeds(timed, (name, None, "fill")) for name in (AGAIN, DEFAULT)))
        found = f"{floor.half_width:.1%}"
        reason = "cores shared with other machines; more repeats narrow it"
        target = f"at most {MOST_HALF_WIDTH:.0%}"
        held = floor.half_width <= MOST_HALF_WIDTH
        checks.append(Check("half-width of the A/A interval", target, found, held, "aim", reason))
        return checks


def _counted_table(runs: Sequence[Run]) -> Table:
    columns = [
        Column("setting"),
        Column("value"),
        Column("reclaim"),
        Column("blocks per request", 1),
        Column("F", 1, percent=True),
        Column("tokens evicted"),
        Column("tokens moved"),
    ]
    counted = _of_kind(runs, "counted")
    rows = [
        [
            run["parameter"],
            f"{run['value']:g}",
            run["mode"],
            run["blocks_per_request"],
            run["waste_ratio"],
            run["tokens_evicted"],
            run["tokens_moved"],
        ]
        for run in counted
    ]
    lengths = counted[0]["lengths"]
    note = (
        f"Block counts of vLLM's real scheduler and block pool without a model, not timed runs, and the same in every "
        f"run. {len(lengths)} requests with prompts of {lengths[0]:,} to {lengths[-1]:,} tokens and "
        f"{counted[0]['outputs']} outputs, victims of '{COUNTED_POLICY}'; means over the steps in which all decode. "
        f"Where a line does not say otherwise: {_defaults()}. pack packs as if memory were always short. The paper "
        "tries block sizes 16, 32 and 48, ratios 0.3 to 0.7, and theta_F 0.20, 0.25 and 0.35."
    )
    return Table("Counted: blocks held, one setting at a time", columns, rows, note)


def _timed_table(runs: Sequence[Run]) -> Table:
    columns = [
        Column("setting"),
        Column("value"),
        Column("reclaim"),
        Column("blocks held, mean", 1),
        Column("F", 1, percent=True),
        Column("tokens moved"),
        Column("output tokens/s", 1),
        Column("against the default", 3),
        Column("step, ms", 1),
        *QUALITY_COLUMNS,
    ]
    timed = _of_kind(runs, "timed")
    rows: list[list[Cell]] = []
    for key in _points_of(timed):
        of = [run for run in timed if _key(run) == key]
        parameter, value, mode = key
        speeds = _speeds(timed, key)
        rows.append(
            [
                parameter,
                "" if value is None else f"{value:g}",
                mode,
                of[0]["mean_blocks"],
                of[0]["waste_ratio"],
                of[0]["tokens_moved"],
                interval(speeds),
                None if parameter == DEFAULT else ratio(speeds, _speeds(timed, (DEFAULT, None, mode))),
                interval([run["step_ms"] for run in of]),
                *quality_cells(next(run["quality"] for run in of if "quality" in run)),
            ]
        )
    first = timed[0]
    note = (
        f"Timed runs of the model, {len({run['repeat'] for run in timed})} repeats in turn; {first['requests']} "
        f"requests of {first['prompt']} + {first['outputs']} tokens at once, {POLICY}. The default is {_defaults()}; "
        f"'{AGAIN}' is the same in another engine, so its ratio is what noise alone does. Blocks, F and moves, means "
        "over all steps, depend on no clock. The step is the median one, a decode step. On a CPU the model takes block "
        "sizes that are multiples of 32. What a score interval changes is time and quality, not blocks."
    )
    return Table("Timed: one setting at a time", columns, rows, note)


def _counted(bench: Bench, sizes: Sizes) -> list[Run]:
    points = list(_counted_points(sizes))
    asked = [
        {
            "settings": {"budget": point.budget, **point.options},
            "block_size": point.block_size,
            "lengths": list(sizes.lengths),
            "outputs": sizes.counted_outputs,
        }
        for point in points
    ]
    with bench.progress("sensitivity, counted", len(points)) as tick:
        found = count_all(asked, tick)
    about = {"kind": "counted", "lengths": list(sizes.lengths), "outputs": sizes.counted_outputs}
    return [{**about, **_about(point), **counts} for point, counts in zip(points, found, strict=True)]


def _counted_points(sizes: Sizes) -> Iterator[Point]:
    for parameter, values in sizes.counted.items():
        for value in values:
            for mode in ("pack",) if parameter in ("theta_F", "batch M") else ("none", "pack", "fill"):
                yield _point(parameter, value, mode)


def _timed_points(sizes: Sizes, mode: str) -> list[Point]:
    packing = ("theta_F", "batch M")
    return [
        _point(parameter, value, mode)
        for parameter, values in sizes.timed.items()
        for value in values
        if (parameter in packing) == (mode == "pack")
    ]


def _point(parameter: str, value: float, mode: str) -> Point:
    if parameter == "block size":
        return Point(parameter, value, mode, block_size=int(value))
    if parameter == "eviction ratio":
        return Point(parameter, value, mode, budget=round(1 - value, 3))
    option = {"theta_F": "theta_f", "batch M": "pack_blocks", "score interval": "score_interval"}[parameter]
    return Point(parameter, value, mode, {option: value if parameter == "theta_F" else int(value)})


def _engine(bench: Bench, point: Point) -> RunningEngine:
    """fill has the engines that quality is asked of as well."""
    options = {**point.options, "request_policies": POLICIES}
    config = VTokenConfig(policy="streaming_llm", budget=0.5, **options)
    return bench.engine(config, block_size=point.block_size, copy=point.copy, **ENGINE_ARGS)


def _about(point: Point) -> Run:
    return {
        "parameter": point.parameter,
        "value": point.value,
        "mode": point.mode,
        "block_size": point.block_size,
        "budget": point.budget,
    }


def _defaults() -> str:
    return ", ".join(f"{name} {value:g}" for name, value in DEFAULTS.items())


def _of_kind(runs: Sequence[Run], kind: str) -> list[Run]:
    return [run for run in runs if run["kind"] == kind]


def _key(run: Run) -> tuple[str, float | None, str]:
    return run["parameter"], run["value"], run["mode"]


def _points_of(timed: Sequence[Run]) -> list[tuple[str, float | None, str]]:
    """What was timed, in the order of the settings, whatever the order of the turns."""
    names = [DEFAULT, AGAIN, *FULL.timed]
    return sorted({_key(run) for run in timed}, key=lambda key: (key[2] != "fill", names.index(key[0]), key[1] or 0))


def _speeds(timed: Sequence[Run], key: tuple[str, float | None, str]) -> list[float]:
    """In the order of the repeats."""
    of = sorted((run for run in timed if _key(run) == key), key=lambda run: int(run["repeat"]))
    return [run["output_tokens_per_s"] for run in of]


def _series(counted: Sequence[Run], parameter: str, mode: str) -> dict[float, float]:
    of = [run for run in counted if run["parameter"] == parameter and run["mode"] == mode]
    return {run["value"]: run["blocks_per_request"] for run in of}


def _counts(run: Run) -> tuple[float, ...]:
    return run["steps"], run["mean_blocks"], run["tokens_evicted"], run["tokens_moved"], run["waste_ratio"]
