"""What vtoken's indirection costs where nothing is evicted, where time in a step goes, and what copies make wait."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import BLOCKS, Bench
from vtoken.evaluation.bench.engines import RunningEngine
from vtoken.evaluation.bench.figures import new_figure
from vtoken.evaluation.bench.intervals import interval, ratio
from vtoken.evaluation.bench.overhead_shown import (
    AGAIN,
    ASYNC_AGAIN,
    EVICTING,
    HOOKS,
    MEASURES,
    MODES,
    MOST_REPEATS,
    NARROW,
    SLICES,
    STOCK,
    against_stock,
    breakdowns,
    concurrencies,
    copy_table,
    draw_phases,
    draw_ratios,
    draw_stalls,
    load_table,
    part_of,
    phase_table,
    quality_table,
    share_table,
    widths,
)
from vtoken.evaluation.bench.overhead_task import SETTLE, TASK
from vtoken.evaluation.bench.tables import Column, Table
from vtoken.vllm_plugin.compiler import missing_compiler

IN_PLACE: dict[str, Any] = {"policy": "streaming_llm", "budget": 0.5}
IN_BURSTS: dict[str, Any] = {"policy": "random", "budget": 0.5, "copies": "inline"}
TARGET = 0.01


class Overhead(Experiment):
    name = "overhead"
    question = (
        "What does vtoken cost a step in which nothing is evicted, where does a step's time go, and does the host "
        "stand still for copies?"
    )

    def measure(self, bench: Bench) -> list[Run]:
        sizes = _Sizes.of(bench)
        runs: list[Run] = []
        for concurrency in sizes.concurrency:
            runs += _indirection(bench, sizes, concurrency)
        runs += _evicting(bench, sizes)
        runs += _copies(bench, sizes)
        runs.append({"part": "quality", **bench.quality_of(IN_PLACE["policy"], IN_PLACE["budget"])})
        in_bursts = {} if bench.quick else {"interval": sizes.copy_interval}
        runs.append({"part": "quality", **bench.quality_of(IN_BURSTS["policy"], IN_BURSTS["budget"], **in_bursts)})
        return runs

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        return [load_table(runs), share_table(runs), phase_table(runs), copy_table(runs), quality_table(runs)]

    def figure(self, runs: Sequence[Run]) -> Any:
        figure, (ratios, phases, stalls) = new_figure(columns=3, width=4.6, height=3.4)
        draw_ratios(ratios, runs)
        draw_phases(phases, runs)
        draw_stalls(stalls, runs)
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        return [*_load_checks(runs), *_share_checks(runs), *_copy_checks(runs)]


class _Sizes:
    """How much is run.

    Attributes:
        blocks: of every engine's pool.
        concurrency: requests that decode.
        prompt: tokens of each, where nothing is evicted.
        steps: in a slice.
        least, most: repeats of the A/A comparison.
        breakdown: steps under the clock, in each repeat of that.
        compiled: vLLM's compilation is on, as it is for users; it shortens the step of which hooks are a share.
        evicting: tokens of a prompt of which half is kept.
        copy_requests, copy_interval, copy_steps: of the comparison of copies: requests, tokens between two evictions of
            each, and steps in a turn.
    """

    blocks = 768
    concurrency: tuple[int, ...] = (16, 48)
    prompt = 64
    steps = 8
    breakdown = 8
    evicting = 256
    copy_requests, copy_interval, copy_steps = 8, 16, 32
    least = most = 5
    compiled = True

    @classmethod
    def of(cls, bench: Bench) -> "_Sizes":
        sizes = cls()
        sizes.least = bench.repeats
        sizes.most = max(sizes.least, MOST_REPEATS)
        if bench.quick:
            sizes.blocks, sizes.concurrency, sizes.steps, sizes.breakdown = BLOCKS, (4,), 2, 6
            sizes.most, sizes.compiled = sizes.least, False
            sizes.evicting, sizes.copy_requests, sizes.copy_steps = 96, 4, 16
        return sizes


def _indirection(bench: Bench, sizes: _Sizes, concurrency: int) -> list[Run]:
    """Two stock engines and one with hooks, in turns on the same requests; more repeats until A and A agree."""
    engines = {
        STOCK: _engine(bench, sizes, None),
        AGAIN: _engine(bench, sizes, None, copy=1),
        HOOKS: _engine(bench, sizes, VTokenConfig(**IN_PLACE)),
    }
    longest = min(engine.num_blocks for engine in engines.values()) // concurrency * engines[HOOKS].block_size
    clocked = sizes.least * sizes.breakdown
    most = min(sizes.most, (longest - sizes.prompt - SETTLE - clocked - 1) // (SLICES * sizes.steps))
    # A budget that counts, since the request could outgrow it, and that is not reached in the steps that are run.
    reserved = {"vtoken.budget": longest}
    prompts = _prompts(bench, concurrency, sizes.prompt)
    for name, engine in engines.items():
        extra = reserved if name == HOOKS else None
        engine.do(TASK + "begin", prompts=prompts, max_tokens=longest, extra_args=extra)
    runs: list[Run] = []
    with bench.progress(f"hooks alone, {concurrency} requests, at most", most) as tick:
        for repeat in range(most):
            runs += _repeat(engines, repeat, concurrency, sizes.steps)
            tick()
            if repeat + 1 >= sizes.least and all(width <= NARROW for width in widths(runs, concurrency)):
                break
    for repeat, name in bench.interleaved((STOCK, HOOKS), f"phases, {concurrency} requests", sizes.least):
        told = engines[name].do(TASK + "break_down", running=concurrency, steps=sizes.breakdown)
        runs.append({"part": "breakdown", "concurrency": concurrency, "variant": name, "repeat": repeat, **told})
    for engine in engines.values():
        engine.do(TASK + "end", running=concurrency)
    return runs


def _repeat(engines: Mapping[str, RunningEngine], repeat: int, concurrency: int, steps: int) -> list[Run]:
    found: dict[str, Run] = {name: {"step_ms": [], "tokens_evicted": 0} for name in engines}
    names = list(engines)
    for turn in range(SLICES):
        first = (repeat + turn) % len(names)
        for name in [*names[first:], *names[:first]]:
            told = engines[name].do(TASK + "decode", running=concurrency, steps=steps)
            found[name]["step_ms"] += told["step_ms"]
            found[name]["tokens_evicted"] += told["tokens_evicted"]
    about = {"part": "load", "concurrency": concurrency, "repeat": repeat}
    return [{**about, "variant": name, **run, **_rates(run, concurrency)} for name, run in found.items()]


def _evicting(bench: Bench, sizes: _Sizes) -> list[Run]:
    """Each request forgets a token in each step."""
    concurrency = sizes.concurrency[0]
    engine = _engine(bench, sizes, VTokenConfig(**IN_PLACE))
    prompts = _prompts(bench, concurrency, sizes.evicting)
    engine.do(TASK + "begin", prompts=prompts, max_tokens=sizes.least * sizes.breakdown + 2 * SETTLE + 2)
    runs: list[Run] = []
    for repeat in range(sizes.least):
        told = engine.do(TASK + "break_down", running=concurrency, steps=sizes.breakdown)
        runs.append({"part": "breakdown", "concurrency": concurrency, "variant": EVICTING, "repeat": repeat, **told})
    engine.do(TASK + "end", running=concurrency)
    return runs


def _engine(bench: Bench, sizes: _Sizes, config: VTokenConfig | None, copy: int = 0) -> RunningEngine:
    eager = not sizes.compiled or missing_compiler() is not None
    return bench.engine(config, num_blocks=sizes.blocks, copy=copy, enforce_eager=eager)


def _copies(bench: Bench, sizes: _Sizes) -> list[Run]:
    """One engine, the same requests all the time; from turn to turn only the way of copying is exchanged."""
    settings: dict[str, Any] = {**IN_BURSTS, "interval": sizes.copy_interval}
    engine = bench.engine(VTokenConfig(**settings), num_blocks=sizes.blocks)
    running, steps = sizes.copy_requests, sizes.copy_steps
    variants = (*MODES, ASYNC_AGAIN)
    turns = len(variants) * bench.repeats + len(MODES)
    prompts = _prompts(bench, running, sizes.evicting)
    engine.do(TASK + "begin", prompts=prompts, max_tokens=turns * steps + 2 * SETTLE)
    for mode in MODES:  # what only the first copies of a kind pay for is paid for
        engine.do(TASK + "decode_copying", running=running, steps=sizes.copy_interval, mode=mode)
    runs: list[Run] = []
    for repeat, variant in bench.interleaved(variants, "ways of copying"):
        mode = "async" if variant == ASYNC_AGAIN else variant
        told = engine.do(TASK + "decode_copying", running=running, steps=steps, mode=mode)
        runs.append({"part": "copies", "variant": variant, "repeat": repeat, **told, **_rates(told, running)})
    engine.do(TASK + "end", running=running)
    return runs


def _prompts(bench: Bench, count: int, tokens: int) -> list[list[int]]:
    return [work.prompt_token_ids for work in bench.requests.exactly(count, tokens)]


def _rates(run: Run, running: int) -> dict[str, float]:
    """While everybody decodes, a step is everybody's time per output token."""
    times = run["step_ms"]
    return {
        "output_tokens_per_s": 1e3 * running * len(times) / sum(times),
        "tpot_p95_ms": float(np.percentile(times, 95)),
    }


def _load_checks(runs: Sequence[Run]) -> list[Check]:
    checks = []
    evicted = sum(run["tokens_evicted"] for run in part_of(runs, "load"))
    checks.append(Check("evictions while the indirection alone is measured", "0", str(evicted), evicted == 0))
    for concurrency in concurrencies(runs):
        for (name, shown), width in zip(MEASURES, widths(runs, concurrency), strict=True):
            floor, cost = (against_stock(runs, name, concurrency, variant) for variant in (AGAIN, HOOKS))
            repeats = f"{floor.repeats} repeats"
            checks.append(
                Check(
                    f"{concurrency} requests, {shown}: half-width of the A/A interval",
                    f"at most {NARROW:.0%}",
                    f"{width:.1%} after {repeats}",
                    width <= NARROW,
                    "aim",
                    f"the machine is not quieter than that within {repeats}",
                )
            )
            better_is_more = name == "output_tokens_per_s"
            held = cost.median >= floor.low if better_is_more else cost.median <= floor.high
            checks.append(
                Check(
                    f"{concurrency} requests, {shown}: hooks / stock",
                    f"no worse than the A/A interval, {floor.low:.1%} to {floor.high:.1%}",
                    f"{cost.median:.1%} ({cost.low:.1%} to {cost.high:.1%})",
                    held,
                    "aim",
                    "the time inside the hooks, see the table of shares, and what it displaces from caches",
                )
            )
    return checks


def _share_checks(runs: Sequence[Run]) -> list[Check]:
    checks = []
    for (concurrency, variant), mine in breakdowns(runs).items():
        if variant == STOCK:
            continue
        due = sum(run["steps"] * concurrency if variant == EVICTING else 0 for run in mine)
        evicted = sum(run["tokens_evicted"] for run in mine)
        which = f"{concurrency} requests, {variant}"
        checks.append(Check(f"{which}: evictions", str(due), str(evicted), evicted == due))
        if variant == HOOKS:
            share = interval([run["hooks_share"] for run in mine])
            checks.append(
                Check(
                    f"{which}: time inside our hooks",
                    f"under {TARGET:.0%} of the step",
                    Column("", 2, percent=True).show(share),
                    share.median < TARGET,
                    "aim",
                    "what a step costs whatever the number of requests weighs more where a step is short",
                )
            )
    return checks


def _copy_checks(runs: Sequence[Run]) -> list[Check]:
    checks = []
    for mode in MODES:
        mine = part_of(runs, "copies", variant=mode)
        least = min(min(run["tokens_evicted"], run["tokens_moved"]) for run in mine)
        checks.append(Check(f"copies {mode}: every run evicts and moves tokens", "more than 0", str(least), least > 0))
    stalls = {mode: [run["stall_ms"] for run in part_of(runs, "copies", variant=mode)] for mode in MODES}
    found = ratio(stalls["async"], stalls["force_sync"])
    checks.append(
        Check(
            "the host stands still for async copies, against those that it is forced to wait for",
            "below 1 beyond the interval",
            Column("", 2).show(found),
            found.high < 1.0,
            "aim",
            "the copy is not over when the next forward begins, and where no core is to spare it takes its time from "
            "what it runs beside",
        )
    )
    return checks
