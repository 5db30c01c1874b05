"""Prefix: prompts that begin alike, with prefix caching on, on the model and at the paper's size without one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import Bench
from vtoken.evaluation.bench.counted import POLICY as COUNTED_POLICY
from vtoken.evaluation.bench.counted import count_all
from vtoken.evaluation.bench.engines import RunningEngine
from vtoken.evaluation.bench.figures import COLOURS, LABELS, MARKERS, new_figure
from vtoken.evaluation.bench.prefix_task import RUN_GROUPS
from vtoken.evaluation.bench.quality_of import QUALITY_COLUMNS, quality_cells
from vtoken.evaluation.bench.tables import Cell, Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY, BUDGET = "h2o", 0.5
NATIVE, NAIVE = "native", "none"
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    # Whenever there is anything to pack, however much memory is free.
    "pack": {"low_watermark": 1.0, "check_interval": 1, "headroom": 0.1},
    "fill": {},
}
OFF = {"vtoken.off": True}
TOLERANCE = 1e-3
"""Of a log-probability, between a request that hits blocks under vtoken and under native vLLM."""
PAPER_FEWER = 0.286


MODEL, COUNTED = "model", "counted"
COLUMNS = [
    Column("sharing a beginning"),
    Column("tokens from the cache, native"),
    Column("the same, with eviction"),
    Column("none: blocks per request", 1),
    Column("pack", 1),
    Column("fill", 1),
    Column("pack against none", percent=True, signed=True),
    Column("fill against none", percent=True, signed=True),
]


@dataclass(frozen=True)
class Sizes:
    """Each prompt has ``half`` tokens in common with the others of its group, and as many of its own.

    ``modes`` are those of the model; ``counted_half`` and ``counted_block_size`` are for the counts without one.
    """

    modes: tuple[str, ...]
    requests: int
    degrees: tuple[int, ...]
    half: int
    outputs: int
    counted_half: int
    counted_block_size: int = 16


FULL = Sizes(tuple(MODES), requests=8, degrees=(1, 2, 4, 8), half=64, outputs=48, counted_half=8192)
QUICK = Sizes(("none", "fill"), requests=4, degrees=(1, 4), half=64, outputs=12, counted_half=1024)


@dataclass(frozen=True)
class Groups:
    """Prompts, those of a group one after another, and one further prompt per group that begins like it."""

    prompts: list[list[int]]
    probes: list[list[int]]


class Prefix(Experiment):
    """Native vLLM is the reference for hits, naive eviction that for blocks."""

    name: ClassVar[str] = "prefix"
    question: ClassVar[str] = (
        "Where prompts begin alike: does eviction cost hits in the prefix cache, and how many blocks are held?"
    )

    def measure(self, bench: Bench) -> list[Run]:
        sizes = QUICK if bench.quick else FULL
        groups = _groups(bench, sizes)
        runs = _counted(bench, sizes)
        engines = {mode: _engine(bench, mode, 2 * sizes.half * sizes.requests) for mode in (NATIVE, *sizes.modes)}
        with bench.progress("prefix", len(engines) * len(sizes.degrees)) as tick:
            for mode, engine in engines.items():
                for degree in sizes.degrees:
                    found = engine.do(
                        RUN_GROUPS,
                        prompts=groups[degree].prompts,
                        outputs=sizes.outputs,
                        probes=groups[degree].probes,
                        off=None if mode == NATIVE else OFF,
                    )
                    about = {"kind": MODEL, "mode": mode, "degree": degree, "half": sizes.half}
                    runs.append({**about, "outputs": sizes.outputs, **found})
                    tick()
        quality = bench.quality_of(POLICY, BUDGET)
        return [{**run, "quality": quality} if run["kind"] == MODEL else run for run in runs]

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        model, counted = _of_kind(runs, MODEL), _of_kind(runs, COUNTED)
        first = model[0]
        note = (
            f"{_load(first)}; {POLICY} keeps half of the prompt. A block that several requests hold counts once. Means "
            "over the steps in which all decode, of vLLM's own pool: they depend on no clock, so that there is nothing "
            "to repeat. What naive eviction holds grows with what is generated, so the ratios do. Quality is that of "
            f"prompts without hits: after a hit, {POLICY} has not seen the queries of the prefix, and may keep others."
        )
        rows = [[*row, *quality_cells(first["quality"])] for row in _rows(model)]
        tables = [Table("Blocks held where prompts begin alike", [*COLUMNS, *QUALITY_COLUMNS], rows, note)]
        note = (
            f"Block counts of vLLM's real scheduler, block pool and prefix cache without a model, not timed runs. "
            f"{_load(counted[0])}; victims of '{COUNTED_POLICY}', half of the prompt is kept. pack copies at most 8 "
            "blocks of a request at a time, and has not come to the end of such prompts here. The paper, with 8K + 8K "
            "tokens: the same hit rate, 28.6 to 42.2 % fewer blocks, shared ones untouched."
        )
        return [*tables, Table("Counted without a model, at the paper's size", COLUMNS, _rows(counted), note)]

    def figure(self, runs: Sequence[Run]) -> "Figure":
        figure, axes = new_figure(columns=3, width=4.4)
        for axis, kind in zip(axes, (MODEL, COUNTED), strict=False):
            of = _of_kind(runs, kind)
            degrees = _degrees(of)
            for mode in _modes(of):
                held = [_by_mode(of, degree)[mode]["blocks_per_request"] for degree in degrees]
                axis.plot(range(len(degrees)), held, color=COLOURS[mode], marker=MARKERS[mode], label=LABELS[mode])
            about = "model" if kind == MODEL else "counted"
            half, size = of[0]["half"], of[0]["block_size"]
            axis.set(title=f"{about}: {half:,} + {half:,} tokens, blocks of {size}", ylabel="blocks per request")
            axis.set_ylim(0, 1.1 * axis.dataLim.y1)
        axes[0].legend()
        of = _of_kind(runs, MODEL)
        degrees = _degrees(of)
        for place, mode in ((-0.2, NATIVE), (0.2, "fill")):
            hits = [sum(_by_mode(of, degree)[mode]["hits"]) for degree in degrees]
            axes[2].bar([n + place for n in range(len(degrees))], hits, 0.38, color=COLOURS[mode], label=LABELS[mode])
        axes[2].set(title="model: tokens from the prefix cache", ylabel="tokens of all requests")
        axes[2].legend(loc="upper left")
        for axis in axes:
            axis.set_xticks(range(len(degrees)), degrees)
            axis.set_xlabel("requests that share the first half of their prompts")
        figure.suptitle("What does eviction do to shared beginnings? (shared blocks counted once)")
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        checks = []
        for kind in (MODEL, COUNTED):
            of_kind = _of_kind(runs, kind)
            for degree in _degrees(of_kind):
                of, name = _by_mode(of_kind, degree), f"{kind}, {degree} sharing"
                for mode in _modes(of_kind):
                    checks += _checks(f"{name}, {mode}", of[mode], of[NATIVE])
                    if kind == MODEL:
                        checks += _probe_checks(f"{name}, {mode}", of[mode], of[NATIVE])
                fewer = -_against_none(of, "fill")
                checks.append(
                    Check(
                        f"{name}, fill: blocks per request against none",
                        f"at least {PAPER_FEWER:.1%} fewer (paper's least)",
                        f"{fewer:.1%} fewer",
                        fewer >= PAPER_FEWER,
                        "aim",
                        "the fewer tokens a request generates of its own, the less naive eviction holds",
                    )
                )
        return checks


def _checks(name: str, run: Run, native: Run) -> list[Check]:
    return [
        Check(
            f"{name}: tokens evicted, preemptions",
            "above 0, none",
            f"{run['tokens_evicted']:,}, {run['preemptions']}",
            run["tokens_evicted"] > 0 and run["preemptions"] == 0,
        ),
        Check(
            f"{name}: tokens of each prompt from the cache",
            f"as native, {sum(native['hits']):,}",
            f"{sum(run['hits']):,}",
            run["hits"] == native["hits"],
        ),
    ]


def _probe_checks(name: str, run: Run, native: Run) -> list[Check]:
    half = run["half"]
    probes = list(zip(run["probe_outputs"], native["probe_outputs"], strict=True))
    worst = max(abs(ours[1] - theirs[1]) for ours, theirs in probes)
    same_tokens = all(ours[0] == theirs[0] for ours, theirs in probes)
    return [
        Check(
            f"{name}: what later requests take from the cache",
            f"the shared half, {half} tokens",
            _range(run["probe_hits"]),
            run["probe_hits"] == native["probe_hits"] == [half] * len(run["probe_hits"]),
        ),
        Check(
            f"{name}: shared blocks untouched: their log-likelihoods against native",
            f"the same tokens, within {TOLERANCE:g}",
            f"{'the same' if same_tokens else 'other'} tokens, {worst:.1g}",
            same_tokens and worst <= TOLERANCE,
        ),
    ]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def _against_none(of: dict[str, Run], mode: str) -> float:
    return float(of[mode]["blocks_per_request"] / of[NAIVE]["blocks_per_request"] - 1)


def _rows(runs: Sequence[Run]) -> list[list[Cell]]:
    """Under ``COLUMNS``, one per degree."""
    rows: list[list[Cell]] = []
    modes = _modes(runs)
    for degree in _degrees(runs):
        of = _by_mode(runs, degree)
        hits = dict.fromkeys(sum(of[mode]["hits"]) for mode in modes)
        blocks = [of[mode]["blocks_per_request"] if mode in modes else None for mode in MODES]
        against = [_against_none(of, mode) if mode in modes else None for mode in ("pack", "fill")]
        rows.append([degree, sum(of[NATIVE]["hits"]), " / ".join(f"{n:,}" for n in hits), *blocks, *against])
    return rows


def _modes(runs: Sequence[Run]) -> list[str]:
    """Those that were run, in their usual order."""
    return [mode for mode in MODES if any(run["mode"] == mode for run in runs)]


def _load(run: Run) -> str:
    half = run["half"]
    return (
        f"{run['requests']} requests at once, {half:,} shared + {half:,} private + {run['outputs']} generated tokens, "
        f"blocks of {run['block_size']}"
    )


def _of_kind(runs: Sequence[Run], kind: str) -> list[Run]:
    return [run for run in runs if run["kind"] == kind]


def _degrees(runs: Sequence[Run]) -> list[int]:
    return list(dict.fromkeys(run["degree"] for run in runs))


def _by_mode(runs: Sequence[Run], degree: int) -> dict[str, Run]:
    return {run["mode"]: run for run in runs if run["degree"] == degree}


def _groups(bench: Bench, sizes: Sizes) -> dict[int, Groups]:
    """For each degree prompts of its own, so that none hits what another has left behind."""
    needed = sum(2 * (sizes.requests // degree) + sizes.requests for degree in sizes.degrees)
    texts = iter([work.prompt_token_ids for work in bench.requests.exactly(needed, sizes.half)])
    found = {}
    for degree in sizes.degrees:
        groups = Groups([], [])
        for _ in range(sizes.requests // degree):
            common = next(texts)
            groups.prompts.extend(common + next(texts) for _ in range(degree))
            groups.probes.append(common + next(texts))
        found[degree] = groups
    return found


def _counted(bench: Bench, sizes: Sizes) -> list[Run]:
    about: list[Run] = []
    asked = []
    for degree in sizes.degrees:
        for mode in (NATIVE, *MODES):
            half, size = sizes.counted_half, sizes.counted_block_size
            settings = None if mode == NATIVE else {"budget": BUDGET, "reclaim": mode, **MODES[mode]}
            load = {"block_size": size, "outputs": sizes.outputs, "degree": degree}
            asked.append({"settings": settings, "lengths": [2 * half] * sizes.requests, "shared": half, **load})
            about.append({"kind": COUNTED, "mode": mode, "half": half, "requests": sizes.requests, **load})
    with bench.progress("prefix, counted", len(asked)) as tick:
        found = count_all(asked, tick)
    return [{**run, **counts} for run, counts in zip(about, found, strict=True)]


def _engine(bench: Bench, mode: str, tokens: int) -> RunningEngine:
    config = None
    if mode != NATIVE:
        options: dict[str, Any] = {"reclaim": mode, **MODES[mode]}
        config = VTokenConfig(policy=POLICY, budget=BUDGET, **options)
    # All prompts in one step, as if they had queued: whoever is reduced finds its beginning shared.
    return bench.engine(config, enable_prefix_caching=True, max_num_batched_tokens=max(tokens, 4096))
