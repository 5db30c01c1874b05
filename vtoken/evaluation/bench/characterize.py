"""Characterize: how full blocks are where tokens are evicted one by one and nothing is reclaimed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import BLOCKS, MAX_MODEL_LEN, POLICIES, Bench
from vtoken.evaluation.bench.figures import FURTHER, new_figure
from vtoken.evaluation.bench.load import as_arguments
from vtoken.evaluation.bench.occupancy import WATCH_BLOCKS, at_most_half_full
from vtoken.evaluation.bench.requests import OUTPUT_TOKENS
from vtoken.evaluation.bench.tables import Column, Table
from vtoken.evaluation.plan import BLOCK_SIZE
from vtoken.evaluation.prompt_file import read_prompt_file
from vtoken.evaluation.questions import spread
from vtoken.evaluation.workloads import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGET = 0.5
OWN = "your prompts"
PAPER_HALF_FULL = (0.56, 0.67)
PAPER_WASTE = (0.4, 0.6)
TYPICAL = "h2o"
"""The policy whose figures stand beside the paper's."""
PAPER_BLOCK = 16
PINK, ORANGE, BLUE, _, BLACK = FURTHER
LINES = {
    "h2o": (PINK, "-"),
    "scissorhands": (ORANGE, "-"),
    "random": (BLUE, "-"),
    "snapkv": (BLACK, "-"),
    "streaming_llm": (BLUE, "--"),
    "tova": (PINK, "--"),
    "key_norm": (BLACK, "--"),
}
"""Colour and style of each policy: seven colours that differ for all eyes would be too many."""


@dataclass(frozen=True)
class Sizes:
    """``own`` prompts at most of a user's file; long prompts have 1,024 to ``longest`` tokens."""

    policies: tuple[str, ...]
    chat: int
    long: int
    longest: int
    outputs: int
    own: int


FULL = Sizes(POLICIES, chat=8, long=3, longest=1600, outputs=64, own=16)
QUICK = Sizes(("h2o", "streaming_llm"), chat=2, long=1, longest=1400, outputs=8, own=3)


@dataclass(frozen=True)
class Sample:
    """Some of the prompts that there are."""

    name: str
    works: list[Workload]
    available: int


class Characterize(Experiment):
    """One engine; the requests say which policy."""

    name: ClassVar[str] = "characterize"
    question: ClassVar[str] = "What is trapped in the cache: how full are the blocks that eviction alone leaves behind?"

    def measure(self, bench: Bench) -> list[Run]:
        sizes = QUICK if bench.quick else FULL
        samples = _samples(bench, sizes)
        longest = max([MAX_MODEL_LEN, *(work.total_tokens for sample in samples for work in sample.works)])
        # Whoever finds no room waits until there is some.
        blocks = max(BLOCKS, 2 * -(-longest // BLOCK_SIZE))
        options: dict[str, Any] = {"reclaim": "none", "request_policies": POLICIES}
        config = VTokenConfig(policy="streaming_llm", budget=BUDGET, **options)
        engine = bench.engine(config, num_blocks=blocks, max_model_len=longest)
        runs: list[Run] = []
        with bench.progress("characterize", len(samples) * len(sizes.policies)) as tick:
            for sample in samples:
                about = {
                    "workload": sample.name,
                    "available": sample.available,
                    "prompt_tokens": sum(len(work.prompt_token_ids) for work in sample.works),
                }
                for policy in sizes.policies:
                    asked = [replace(work, extra_args={"vtoken.policy": policy}) for work in sample.works]
                    found = engine.do(WATCH_BLOCKS, workloads=as_arguments(asked))
                    if sample.name == OWN and found["tokens_evicted"] == 0:
                        raise ValueError(
                            f"of the prompts in {bench.requests.file} nothing is evicted at a budget of {BUDGET:g}, "
                            f"since {config.protected} tokens are protected; give --workload longer ones."
                        )
                    runs.append({**about, "policy": policy, **found})
                    tick()
        return runs

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        columns = [
            Column("prompts"),
            Column("policy"),
            Column("tokens evicted"),
            Column("blocks held per request", 1),
            Column("enough would be", 1),
            Column("trapped", percent=True),
            Column("blocks at most half full", percent=True),
            Column("F", percent=True),
            Column("F, quartiles"),
        ]
        rows = [
            [
                run["workload"],
                run["policy"],
                run["tokens_evicted"],
                run["blocks_per_request"],
                run["needed_per_request"],
                _trapped(run),
                at_most_half_full(run["full"]),
                run["waste_ratio"],
                " / ".join(f"{100 * quartile:.0f}" for quartile in run["waste_quartiles"]) + " %",
            ]
            for run in runs
        ]
        used = " and ".join(_used(run) for run in _one_per_workload(runs))
        note = (
            f"{used}; blocks of {runs[0]['block_size']} tokens, all requests of a row at once, means over all steps "
            "of each after its first output. F is the share of held slots without a live token, its quartiles those "
            "over each request after each such step. Naive eviction: a block goes back once all of its tokens are "
            "dead. Counts that depend on no clock, so that there is nothing to repeat. The paper, at blocks of 16: "
            "56 to 67 % of blocks at most half full, F of 40 to 60 %."
        )
        return [
            Table(f"Blocks after eviction down to {BUDGET:g} of the prompt, nothing reclaimed", columns, rows, note)
        ]

    def figure(self, runs: Sequence[Run]) -> "Figure":
        workloads = list(dict.fromkeys(run["workload"] for run in runs))
        figure, rows = new_figure(2, len(workloads), squeeze=False, sharey="row")
        for (blocks, requests), workload in zip(rows.T, workloads, strict=True):
            of = [run for run in runs if run["workload"] == workload]
            _draw_blocks(blocks, of)
            _draw_requests(requests, of)
            blocks.set_title(f"{workload}: how full blocks are")
            requests.set_title(f"{workload}: what requests waste (F)")
        rows[0, 0].set_ylabel("% of the blocks held")
        rows[1, 0].set_ylabel("% of requests, after each step")
        figure.legend(*rows[0, 0].get_legend_handles_labels(), loc="outside right center")
        figure.suptitle(f"How empty are blocks when tokens are evicted one by one? (budget {BUDGET:g} of the prompt)")
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        checks = [
            Check(
                f"{run['workload']}, {run['policy']}: tokens evicted, of these moved",
                "above 0, none",
                f"{run['tokens_evicted']:,}, {run['tokens_moved']:,}",
                run["tokens_evicted"] > 0 and run["tokens_moved"] == 0,
            )
            for run in runs
        ]
        differs = sum(run["pool_differs"] for run in runs)
        checks.append(
            Check(
                "blocks of all requests against those missing from vLLM's pool",
                "the same after every step",
                f"{differs} steps differ",
                differs == 0,
            )
        )
        for run in runs:
            if run["policy"] == TYPICAL and run["workload"] != OWN:
                half, size = at_most_half_full(run["full"]), run["block_size"]
                reason = "" if size == PAPER_BLOCK else f"blocks have {size} tokens here, {PAPER_BLOCK} in the paper"
                for what, found, (low, high) in (
                    ("blocks at most half full", half, PAPER_HALF_FULL),
                    ("F", run["waste_ratio"], PAPER_WASTE),
                ):
                    name = f"{run['workload']}, {TYPICAL}: {what}"
                    target = f"{low:.0%} to {high:.0%} (paper)"
                    checks.append(Check(name, target, f"{found:.0%}", low <= found <= high, "aim", reason))
        return checks

    def conclusion(self, runs: Sequence[Run]) -> str:
        sentences = []
        for first in _one_per_workload(runs):
            of = [run for run in runs if run["workload"] == first["workload"]]
            most, least = max(of, key=_trapped), min(of, key=_trapped)
            sentences.append(
                f"{_used(first)}: of the {most['blocks_per_request']:.1f} blocks that a request holds on average, "
                f"{most['blocks_per_request'] - most['needed_per_request']:.1f} ({_trapped(most):.0%}) are trapped "
                f"under {most['policy']}, the most, and {_trapped(least):.0%} of {least['blocks_per_request']:.1f} "
                f"under {least['policy']}, the least: as many would be free if what is alive lay together."
            )
        return "\n".join(sentences)


def _samples(bench: Bench, sizes: Sizes) -> list[Sample]:
    requests = bench.requests
    if requests.file is None:
        chat = requests.chat(sizes.chat, 512, 96, sizes.outputs)
        long = requests.long(sizes.long, sizes.longest, shortest=1024, max_tokens=sizes.outputs)
        return [Sample("chat", chat, len(chat)), Sample("long", long, len(long))]
    every = read_prompt_file(requests.file, requests.tokenizer, requests.context, OUTPUT_TOKENS)
    some = spread(every, sizes.own)
    if bench.quick:
        some = [replace(work, max_tokens=min(work.max_tokens, sizes.outputs)) for work in some]
    return [Sample(OWN, some, len(every))]


def _draw_blocks(axes: Any, runs: Sequence[Run]) -> None:
    """Blocks by their live tokens, summed up; a grey bar where the paper's are at most half full."""
    for run in runs:
        size = run["block_size"]
        fullness = [100 * live / size for live in range(size + 1)]
        colour, style = LINES[run["policy"]]
        axes.plot(fullness, _summed(run["full"]), style, color=colour, label=run["policy"], drawstyle="steps-post")
    axes.axvline(50, color="grey", linewidth=0.8, linestyle=":")
    paper = [100 * share for share in PAPER_HALF_FULL]
    axes.plot([50, 50], paper, color="grey", linewidth=6, alpha=0.5, solid_capstyle="butt", label="the paper's range")
    axes.set(xlabel="slots of the block in use, % at most", xlim=(0, 100), ylim=(0, 102))


def _draw_requests(axes: Any, runs: Sequence[Run]) -> None:
    """Requests by their waste ratio, summed up; a grey bar over what the paper has."""
    for run in runs:
        bounds = [100 * place / len(run["waste"]) for place in range(len(run["waste"]) + 1)]
        colour, style = LINES[run["policy"]]
        axes.plot(bounds, [0.0, *_summed(run["waste"])], style, color=colour, label=run["policy"])
    axes.axvspan(*(100 * share for share in PAPER_WASTE), color="grey", alpha=0.25, linewidth=0)
    axes.set(xlabel="slots held without a live token, % below", xlim=(0, 100), ylim=(0, 102))


def _summed(counts: Sequence[int]) -> list[float]:
    """Of counts, the share in % up to each."""
    return [100 * count / sum(counts) for count in accumulate(counts)]


def _trapped(run: Run) -> float:
    """The share of held blocks that could be free."""
    return 1 - float(run["needed_per_request"] / run["blocks_per_request"])


def _one_per_workload(runs: Sequence[Run]) -> list[Run]:
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(run["workload"], run)
    return list(first.values())


def _used(run: Run) -> str:
    """Which prompts, and how many of how many."""
    count = f"{run['requests']}"
    if run["available"] > run["requests"]:
        count += f" of {run['available']}"
    return f"{run['workload']} ({count}, {run['prompt_tokens']:,} tokens)"
