"""Prefix: prompts that begin alike, with prefix caching on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import Bench
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


@dataclass(frozen=True)
class Sizes:
    """Each prompt has ``half`` tokens in common with the others of its group, and as many of its own."""

    requests: int
    degrees: tuple[int, ...]
    half: int
    outputs: int


FULL = Sizes(requests=8, degrees=(1, 2, 4, 8), half=128, outputs=64)
QUICK = Sizes(requests=4, degrees=(1, 4), half=64, outputs=12)


@dataclass(frozen=True)
class Groups:
    """Prompts, those of a group one after another, and one further prompt per group that begins like it."""

    prompts: list[list[int]]
    probes: list[list[int]]


class Prefix(Experiment):
    """Native vLLM is the reference for hits; of its blocks nothing is reclaimed, and none is counted."""

    name: ClassVar[str] = "prefix"
    question: ClassVar[str] = (
        "Where prompts begin alike: does eviction cost hits in the prefix cache, and how many blocks are held?"
    )

    def measure(self, bench: Bench) -> list[Run]:
        sizes = QUICK if bench.quick else FULL
        groups = _groups(bench, sizes)
        runs: list[Run] = []
        with bench.progress("prefix", (1 + len(MODES)) * len(sizes.degrees)) as tick:
            for mode in (NATIVE, *MODES):
                engine = _engine(bench, mode, 2 * sizes.half * sizes.requests)
                for degree in sizes.degrees:
                    found = engine.do(
                        RUN_GROUPS,
                        prompts=groups[degree].prompts,
                        outputs=sizes.outputs,
                        probes=groups[degree].probes,
                        off=None if mode == NATIVE else OFF,
                    )
                    runs.append({"mode": mode, "degree": degree, "half": sizes.half, **found})
                    tick()
        quality = bench.quality_of(POLICY, BUDGET)
        return [run if run["mode"] == NATIVE else {**run, "quality": quality} for run in runs]

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        columns = [
            Column("sharing a beginning"),
            Column("tokens from the cache, native"),
            Column("the same, with eviction"),
            Column("none: blocks per request", 1),
            Column("pack", 1),
            Column("fill", 1),
            Column("pack against none", percent=True, signed=True),
            Column("fill against none", percent=True, signed=True),
            *QUALITY_COLUMNS,
        ]
        rows: list[list[Cell]] = []
        for degree in _degrees(runs):
            of = _by_mode(runs, degree)
            rows.append(
                [
                    degree,
                    sum(of[NATIVE]["hits"]),
                    " / ".join(f"{n:,}" for n in dict.fromkeys(sum(of[mode]["hits"]) for mode in MODES)),
                    *(of[mode]["blocks_per_request"] for mode in MODES),
                    *(_against_none(of, mode) for mode in ("pack", "fill")),
                    *quality_cells(of[NAIVE]["quality"]),
                ]
            )
        first = runs[0]
        note = (
            f"{first['requests']} requests at once, {first['half']} shared + {first['half']} private tokens each, "
            f"{len(first['held'])} steps in which all decode; blocks of {first['block_size']}; {POLICY} keeps half of "
            "the prompt. A block that several requests hold counts once. Block counts of vLLM's own pool, which depend "
            "on no clock, so that there is nothing to repeat. What naive eviction holds grows with what is generated, "
            "so the ratios do. The paper, with 8K + 8K tokens: the same hit rate, 28.6 to 42.2 % fewer blocks."
        )
        return [Table("Blocks held where prompts share their beginning, prefix caching on", columns, rows, note)]

    def figure(self, runs: Sequence[Run]) -> "Figure":
        degrees = _degrees(runs)
        figure, (left, right) = new_figure(columns=2)
        for mode in MODES:
            held = [_by_mode(runs, degree)[mode]["blocks_per_request"] for degree in degrees]
            left.plot(range(len(degrees)), held, color=COLOURS[mode], marker=MARKERS[mode], label=LABELS[mode])
        left.set(title="Blocks held, shared ones counted once", ylabel="blocks per request", ylim=(0, None))
        left.legend()
        for place, mode in ((-0.2, NATIVE), (0.2, "fill")):
            hits = [sum(_by_mode(runs, degree)[mode]["hits"]) for degree in degrees]
            label = LABELS[mode]
            right.bar([n + place for n in range(len(degrees))], hits, 0.38, color=COLOURS[mode], label=label)
        right.set(title="Prompt tokens taken from the prefix cache", ylabel="tokens of all requests")
        right.legend()
        for axis in (left, right):
            axis.set_xticks(range(len(degrees)), degrees)
            axis.set_xlabel("requests that share the first half of their prompts")
        figure.suptitle("What does eviction do to shared beginnings?")
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        checks = []
        for degree in _degrees(runs):
            of = _by_mode(runs, degree)
            native = of[NATIVE]
            for mode in MODES:
                checks += _checks(f"{degree} sharing, {mode}", of[mode], native)
            fewer = -_against_none(of, "fill")
            checks.append(
                Check(
                    f"{degree} sharing, fill: blocks per request against none",
                    f"at least {PAPER_FEWER:.1%} fewer (paper's least)",
                    f"{fewer:.1%} fewer",
                    fewer >= PAPER_FEWER,
                    "aim",
                    "the fewer tokens a request generates of its own, the less naive eviction holds",
                )
            )
        return checks


def _checks(name: str, run: Run, native: Run) -> list[Check]:
    half = run["half"]
    probes = list(zip(run["probe_outputs"], native["probe_outputs"], strict=True))
    worst = max(abs(ours[1] - theirs[1]) for ours, theirs in probes)
    same_tokens = all(ours[0] == theirs[0] for ours, theirs in probes)
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


def _engine(bench: Bench, mode: str, tokens: int) -> RunningEngine:
    config = None
    if mode != NATIVE:
        options: dict[str, Any] = {"reclaim": mode, **MODES[mode]}
        config = VTokenConfig(policy=POLICY, budget=BUDGET, **options)
    # All prompts in one step, as if they had queued: whoever is reduced finds its beginning shared.
    return bench.engine(config, enable_prefix_caching=True, max_num_batched_tokens=max(tokens, 4096))
