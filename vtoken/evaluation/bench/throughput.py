"""Output tokens per second on equal block budgets, beside the bound that computing the prompts sets."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import Bench
from vtoken.evaluation.bench.figures import COLOURS, LABELS, new_figure
from vtoken.evaluation.bench.intervals import Interval, interval, ratio
from vtoken.evaluation.bench.load import RUN_LOAD, as_arguments
from vtoken.evaluation.bench.tables import Column, Table
from vtoken.evaluation.bench.ways import (
    AGAIN,
    EVICTING,
    FILL,
    NAIVE,
    NATIVE,
    PACK,
    POLICIES,
    QUALITY_COLUMNS,
    QUICK_BLOCKS,
    SHARE,
    WAYS,
    blocks_for,
    config_of,
    quality_cells,
)
from vtoken.evaluation.workloads import Workload

PROMPTS = "prompts alone"
REQUESTS, OUTPUTS = 4, 320
LONGEST = 1850
"""Tokens of a prompt: the four shortest summaries have no more."""
QUICK_REQUESTS, QUICK_PROMPT, QUICK_OUTPUTS = 3, 160, 24
FULL_REQUESTS = 2
"""The pool holds so many of the longest request without eviction."""
TARGET = 1.5


class Throughput(Experiment):
    name = "throughput"
    question = (
        "How many output tokens per second do native vLLM, naive eviction, pack and fill get out of the same pool of "
        "blocks when they sum up long texts?"
    )

    def measure(self, bench: Bench) -> list[Run]:
        works = _workloads(bench)
        blocks = QUICK_BLOCKS if bench.quick else blocks_for(works, FULL_REQUESTS)
        engines = {way: bench.engine(config_of(way), num_blocks=blocks, copy=int(way == AGAIN)) for way in VARIANTS}
        prompts = [replace(work, max_tokens=1) for work in works]
        about = {
            "part": "load",
            "blocks": blocks,
            "full_blocks": blocks_for(works, 1),
            "prompt_tokens": [len(work.prompt_token_ids) for work in works],
        }
        runs: list[Run] = []
        for repeat, way in bench.interleaved((*VARIANTS, PROMPTS), "throughput"):
            if way == PROMPTS:
                found = engines[NATIVE].do(RUN_LOAD, workloads=as_arguments(prompts), concurrency=1)
            else:
                found = engines[way].do(RUN_LOAD, workloads=as_arguments(works))
            runs.append({**about, "variant": way, "repeat": repeat, **found})
        runs.append({"part": "quality", **bench.quality_of(POLICIES[0], SHARE)})
        return runs

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        return [_table(runs), _quality_table(runs)]

    def figure(self, runs: Sequence[Run]) -> Any:
        figure, axes = new_figure(width=6.2, height=3.4)
        for place, way in enumerate(WAYS):
            rates = interval(_rates(runs, way))
            error = [[max(rates.median - rates.low, 0.0)], [max(rates.high - rates.median, 0.0)]]
            axes.bar([place], [rates.median], yerr=error, width=0.6, color=COLOURS[way], capsize=4)
            against = "" if way == NATIVE else f"\n{_against(runs, way, NATIVE).median:.2f} x native"
            axes.annotate(
                f"{rates.median:.1f}{against}",
                (place, max(rates.high, rates.median)),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        ceiling = _ceiling(runs).median * interval(_rates(runs, NATIVE)).median
        axes.axhline(ceiling, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            "if output tokens took no time: the prompts alone",
            (len(WAYS) - 0.6, ceiling),
            (0, 3),
            textcoords="offset points",
            fontsize=8,
            ha="right",
        )
        axes.set_xticks(range(len(WAYS)), [LABELS[way].replace(" (", "\n(") for way in WAYS])
        axes.set_ylim(0, 1.12 * ceiling)
        axes.set_ylabel("output tokens/s, 95 % interval")
        about = _load(runs, NATIVE)[0]
        axes.set_title(
            f"How fast are {about['requests']} summaries in {about['blocks']} blocks "
            f"({about['blocks'] / about['full_blocks']:.1f} full requests)?"
        )
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        checks = []
        for way in (*EVICTING, AGAIN):
            least = min(run["tokens_evicted"] for run in _load(runs, way))
            checks.append(Check(f"{way}: every run evicts", "more than 0 tokens", f"{least:,}", least > 0))
        found = _against(runs, FILL, NATIVE)
        bound = _ceiling(runs)
        checks.append(
            Check(
                "fill against native, output tokens/s",
                f"at least {TARGET} x",
                _shown(found),
                found.median >= TARGET,
                "aim",
                f"computing the prompts takes {1 / bound.median:.0%} of native's time and bounds it to "
                f"{bound.median:.2f} x; what is left is a decode step that gets longer with more requests in it",
            )
        )
        for way in (NAIVE, PACK):
            found = _against(runs, FILL, way)
            checks.append(
                Check(
                    f"fill against {way}, output tokens/s",
                    "not below it beyond the interval",
                    _shown(found),
                    found.high >= 1.0,
                    "aim",
                    f"{way} is faster on this load, by more than the repeats scatter",
                )
            )
        return checks


VARIANTS = (*WAYS, AGAIN)


def _workloads(bench: Bench) -> list[Workload]:
    """Summaries, the shortest ones; in the quick form the beginnings of long prompts."""
    if bench.quick:
        works = bench.requests.long(QUICK_REQUESTS, bench.requests.context, max_tokens=QUICK_OUTPUTS)
        return [replace(work, prompt_token_ids=work.prompt_token_ids[:QUICK_PROMPT]) for work in works]
    return bench.requests.long(REQUESTS, LONGEST, "summary", max_tokens=OUTPUTS)


def _load(runs: Sequence[Run], variant: str) -> list[Run]:
    return [run for run in runs if run["part"] == "load" and run["variant"] == variant]


def _rates(runs: Sequence[Run], variant: str) -> list[float]:
    return [run["output_tokens_per_s"] for run in _load(runs, variant)]


def _against(runs: Sequence[Run], ours: str, theirs: str) -> Interval:
    return ratio(_rates(runs, ours), _rates(runs, theirs))


def _ceiling(runs: Sequence[Run]) -> Interval:
    """By how much native would be faster if it had only the prompts to compute."""
    return ratio([run["seconds"] for run in _load(runs, NATIVE)], [run["seconds"] for run in _load(runs, PROMPTS)])


def _table(runs: Sequence[Run]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for way in VARIANTS:
        mine = _load(runs, way)
        rows.append(
            (
                way,
                interval([run["seconds"] for run in mine]),
                interval(_rates(runs, way)),
                None if way == NATIVE else _against(runs, way, NATIVE),
                interval([run["mean_running"] for run in mine]).median,
                interval([run["tpot_p50_ms"] for run in mine]).median,
                interval([float(run["preemptions"]) for run in mine]).median,
                max(run["tokens_evicted"] for run in mine),
            )
        )
    alone = interval([run["seconds"] for run in _load(runs, PROMPTS)])
    rows.append((PROMPTS, alone, None, _ceiling(runs), 1.0, None, 0.0, 0))
    columns = [
        Column("variant"),
        Column("seconds", 1),
        Column("output tokens/s", 1),
        Column("against native", 2),
        Column("running", 1),
        Column("ms per output token", 0),
        Column("preemptions", 0),
        Column("tokens evicted"),
    ]
    about, floor = _load(runs, NATIVE)[0], _against(runs, AGAIN, FILL)
    outputs = about["output_tokens"] // about["requests"]
    note = (
        f"The {about['requests']} shortest texts to sum up, {min(about['prompt_tokens'])} to "
        f"{max(about['prompt_tokens'])} tokens, "
        f"{outputs} output tokens each, all at once; {about['blocks']} blocks, and a full request takes "
        f"{about['full_blocks']}. h2o keeps half of the prompt. {floor.repeats} repeats in turns, medians with 95 % "
        "intervals, ratios paired by repeat. In decode steps h2o attends with vtoken's kernel, whatever the way of "
        "reclaiming, so that part of what all three gain on native is the kernel. "
        f"The A/A pair (fill again / fill) gives {_shown(floor)}. '{PROMPTS}' computes the same prompts one "
        "after the other and one token of each: nobody can be faster than that."
    )
    return Table("The same prompts, the same pool", columns, rows, note)


def _quality_table(runs: Sequence[Run]) -> Table:
    rows = [(run["policy"], *quality_cells(run)) for run in runs if run["part"] == "quality"]
    return Table("What it costs in quality", [Column("policy, half of the prompt"), *QUALITY_COLUMNS], rows)


def _shown(found: Interval) -> str:
    return f"{found.median:.2f} x ({found.low:.2f} to {found.high:.2f})"
