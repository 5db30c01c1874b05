"""Memory: the same decisions under all three ways of reclaiming, and the blocks that each of them holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from vtoken.config import VTokenConfig
from vtoken.core.history import Recording
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import POLICIES, Bench
from vtoken.evaluation.bench.engines import RunningEngine
from vtoken.evaluation.bench.figures import COLOURS, LABELS, new_figure
from vtoken.evaluation.bench.load import as_arguments
from vtoken.evaluation.bench.occupancy import WATCH_BLOCKS
from vtoken.evaluation.bench.quality_of import QUALITY_COLUMNS, quality_cells
from vtoken.evaluation.bench.tables import Column, Table
from vtoken.evaluation.recorded_victims import POLICY
from vtoken.evaluation.recorder import unpacked
from vtoken.evaluation.workloads import Workload
from vtoken.vllm_plugin.engine import FORCED_TOKENS, FORCED_TOKENS_PROCESSOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGET = 0.5
EVICTING = ("h2o", "scissorhands", "random")
REPLAYING: dict[str, dict[str, Any]] = {
    "none": {},
    # Whenever there is anything to pack: what it can reach, however much memory happens to be free.
    "pack": {"low_watermark": 1.0, "check_interval": 1, "headroom": 0.1},
}
MODES = (*REPLAYING, "fill")
LOGITS: dict[str, Any] = {"logits_processors": [FORCED_TOKENS_PROCESSOR]}
FRAMES = {"none": 60, "fill": 60}
"""Pictures of the pool that are kept of a run."""
PAPER_UTILIZATION = 0.219
PAPER_FEWER = 0.272
TITLE = f"Blocks held in steady decoding, budget {BUDGET:g} of the prompt, the same victims and outputs in all three"


@dataclass(frozen=True)
class Sizes:
    policies: tuple[str, ...]
    requests: int
    shortest: int
    longest: int
    outputs: int


FULL = Sizes(EVICTING, requests=8, shortest=160, longest=448, outputs=48)
QUICK = Sizes(EVICTING[:1], requests=3, shortest=96, longest=192, outputs=12)


class Memory(Experiment):
    """Victims and outputs are those of fill, recorded first; none and pack get the same."""

    name: ClassVar[str] = "memory"
    question: ClassVar[str] = (
        "Of the memory that a request holds after eviction, how much is in use, and how many blocks does it keep?"
    )

    def measure(self, bench: Bench) -> list[Run]:
        sizes = QUICK if bench.quick else FULL
        works = distinct(bench.requests.chat(sizes.requests, sizes.longest, sizes.shortest, sizes.outputs))
        longest = max(work.total_tokens for work in works)
        runs: list[Run] = []
        with TemporaryDirectory() as folder:
            victims = Path(folder) / "victims.json"
            recording, replaying = _recording(bench), {m: _replaying(bench, m, victims, longest) for m in REPLAYING}
            with bench.progress("memory", len(sizes.policies) * len(MODES)) as tick:
                for policy in sizes.policies:
                    asked = [replace(work, extra_args={"vtoken.policy": policy}) for work in works]
                    recorded = recording.do(
                        WATCH_BLOCKS,
                        workloads=as_arguments(asked),
                        record=str(victims),
                        outputs=True,
                        frames=FRAMES["fill"],
                    )
                    outputs = recorded.pop("outputs")
                    runs.append({"policy": policy, "mode": "fill", "same_outputs": True, **recorded})
                    tick()
                    again = [_forced(work, outputs[work.request_id]) for work in works]
                    for mode, engine in replaying.items():
                        found = engine.do(
                            WATCH_BLOCKS, workloads=as_arguments(again), outputs=True, frames=FRAMES.get(mode, 0)
                        )
                        same = found.pop("outputs") == outputs
                        runs.append({"policy": policy, "mode": mode, "same_outputs": same, **found})
                        tick()
        for run in runs:
            run["quality"] = bench.quality_of(run["policy"], BUDGET)
        return sorted(runs, key=lambda run: (EVICTING.index(run["policy"]), MODES.index(run["mode"])))

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        columns = [
            Column("policy"),
            Column("reclaim"),
            Column("slots in use", 1, percent=True),
            Column("against none", 1, percent=True, signed=True),
            Column("blocks per request", 2),
            Column("against none", 1, percent=True, signed=True),
            Column("tokens evicted"),
            Column("tokens moved"),
            *QUALITY_COLUMNS,
        ]
        naive = {run["policy"]: run for run in runs if run["mode"] == "none"}
        rows = []
        for run in runs:
            baseline = naive[run["policy"]]
            gains = [_change(run, baseline, name) for name in ("utilization", "blocks_per_request")]
            use, blocks = gains if run is not baseline else (None, None)
            rows.append(
                [
                    run["policy"],
                    run["mode"],
                    run["utilization"],
                    use,
                    run["blocks_per_request"],
                    blocks,
                    run["tokens_evicted"],
                    run["tokens_moved"],
                    *quality_cells(run["quality"]),
                ]
            )
        first = runs[0]
        note = (
            f"{first['requests']} chat requests at once, blocks of {first['block_size']}; means over all steps of each "
            "request after its first output. Block counts of vLLM's own pool, which depend on no clock, so that there "
            "is nothing to repeat. none and pack get the victims and outputs that fill recorded; pack packs whenever F "
            "is above theta_f, as if memory were always short. The paper, on its own workloads: +21.9 % mean "
            "utilization, and 27.2 to 72.3 % fewer retained blocks per request than naive eviction."
        )
        return [Table(TITLE, columns, rows, note)]

    def figure(self, runs: Sequence[Run]) -> "Figure":
        policies = list(dict.fromkeys(run["policy"] for run in runs))
        figure, axes = new_figure(columns=len(policies) + 1, width=3.3, squeeze=False)
        most = 0.0
        for axis, policy in zip(axes[0], policies, strict=False):
            for run in (run for run in runs if run["policy"] == policy):
                steps = [n for n, seen in enumerate(run["seen"]) if seen]
                held = [run["held"][n] / run["seen"][n] for n in steps]
                most = max(most, *held)
                axis.plot(steps, held, color=COLOURS[run["mode"]], label=LABELS[run["mode"]])
            axis.set(title=f"{policy}: blocks held per request", xlabel="output tokens produced", ylabel="blocks")
        for axis in axes[0, :-1]:
            axis.set_ylim(0, 1.1 * most)
        last = axes[0, -1]
        for place, mode in enumerate(MODES):
            use = [100 * run["utilization"] for run in runs if run["mode"] == mode]
            bars = last.bar([n + 0.27 * (place - 1) for n in range(len(use))], use, 0.25, color=COLOURS[mode])
            last.bar_label(bars, fmt="%.0f", fontsize=7)
        last.set_xticks(range(len(policies)), policies)
        last.set(title="Slots of held blocks in use", ylabel="%", ylim=(0, 105))
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(MODES))
        figure.suptitle(f"How much memory does the same eviction leave held? (budget {BUDGET:g} of the prompt)")
        return figure

    def recordings(self, runs: Sequence[Run]) -> list[Recording]:
        return [
            replace(
                unpacked(run["recording"]),
                name=f"{run['policy']}: {LABELS[run['mode']]}",
                settings=f"chat requests, budget {BUDGET:g} of the prompt, the same victims under both",
            )
            for run in runs
            if "recording" in run
        ]

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        return [check for policy in dict.fromkeys(run["policy"] for run in runs) for check in _checks(policy, runs)]


def _checks(policy: str, runs: Sequence[Run]) -> list[Check]:
    of = {run["mode"]: run for run in runs if run["policy"] == policy}
    evicted = [of[mode]["tokens_evicted"] for mode in MODES]
    same = all(run["same_outputs"] and run["live"] == of["fill"]["live"] for run in of.values())
    fill = of["fill"]
    use = _change(fill, of["none"], "utilization")
    fewer = -_change(fill, of["none"], "blocks_per_request")
    return [
        Check(
            f"{policy}: tokens evicted under {', '.join(MODES)}",
            "the same, above 0",
            ", ".join(f"{n:,}" for n in evicted),
            evicted[0] > 0 and len(set(evicted)) == 1,
        ),
        Check(
            f"{policy}: outputs, and live tokens after every step",
            "the same in all",
            "the same" if same else "others",
            same,
        ),
        Check(
            f"{policy}: blocks of all requests against those missing from vLLM's pool",
            "the same after every step",
            f"{sum(run['pool_differs'] for run in of.values())} steps differ",
            not any(run["pool_differs"] for run in of.values()),
        ),
        Check(
            f"{policy}: preemptions", "none", str(total := sum(run["preemptions"] for run in of.values())), total == 0
        ),
        Check(
            f"{policy}, fill: blocks of a request",
            "exactly ceil(n/S), for every request after every step",
            f"{fill['not_dense']} of {fill['looked']:,} differ",
            fill["looked"] > 0 and fill["not_dense"] == 0,
        ),
        Check(
            f"{policy}, fill: waste ratio F of a request",
            "at most S/(n+S), for every request after every step",
            f"{fill['wasteful']} of {fill['looked']:,} exceed it",
            fill["looked"] > 0 and fill["wasteful"] == 0,
        ),
        Check(
            f"{policy}, fill: slots in use against none",
            f"at least {PAPER_UTILIZATION:+.1%} (paper)",
            f"{use:+.1%}",
            use >= PAPER_UTILIZATION,
            "aim",
            "the longer a request decodes, the more naive eviction holds: these outputs are short",
        ),
        Check(
            f"{policy}, fill: blocks per request against none",
            f"at least {PAPER_FEWER:.1%} fewer (paper's least)",
            f"{fewer:.1%} fewer",
            fewer >= PAPER_FEWER,
            "aim",
            "the longer a request decodes, the more naive eviction holds: these outputs are short",
        ),
    ]


def distinct(workloads: Sequence[Workload]) -> list[Workload]:
    """The first of those with equal prompts, where these are told apart by what they say, or count once."""
    first: dict[tuple[int, ...], Workload] = {}
    for work in workloads:
        first.setdefault(tuple(work.prompt_token_ids), work)
    return list(first.values())


def _recording(bench: Bench) -> RunningEngine:
    options: dict[str, Any] = {"request_policies": POLICIES, "record_trace": True}
    return bench.engine(VTokenConfig(policy="streaming_llm", budget=BUDGET, **options), **LOGITS)


def _replaying(bench: Bench, mode: str, victims: Path, longest: int) -> RunningEngine:
    """Its own budget is one that no request exceeds: each says itself when it evicts, and has victims in the file."""
    options: dict[str, Any] = {"policy_options": {"file": str(victims)}, "reclaim": mode, **REPLAYING[mode]}
    return bench.engine(VTokenConfig(policy=POLICY, budget=max(longest, 1024), **options), **LOGITS)


def _forced(work: Workload, outputs: list[int]) -> Workload:
    return replace(work, extra_args={"vtoken.budget": BUDGET, FORCED_TOKENS: outputs})


def _change(run: Run, baseline: Run, name: str) -> float:
    return float(run[name] / baseline[name] - 1)
