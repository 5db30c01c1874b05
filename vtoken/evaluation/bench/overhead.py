"""What vtoken's indirection costs where nothing is evicted, where time in a step goes, and what copies make wait."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import BLOCKS, Bench
from vtoken.evaluation.bench.engines import RunningEngine
from vtoken.evaluation.bench.figures import new_figure
from vtoken.evaluation.bench.intervals import interval
from vtoken.evaluation.bench.overhead_shown import (
    AGAIN,
    EVICTING,
    HOOKS,
    MEASURES,
    MODES,
    MOST_REPEATS,
    NARROW,
    SLICES,
    STOCK,
    against_stock,
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
from vtoken.evaluation.bench.tables import Table

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
        for policy in ("streaming_llm", "random"):
            runs.append({"part": "quality", **bench.quality_of(policy, 0.5)})
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
        breakdown: steps under the clock.
        evicting: tokens of a prompt of which half is kept.
        copy_requests, copy_interval, copy_steps: of the comparison of copies: requests, tokens between two evictions of
            each, and steps in a turn.
    """

    blocks = 768
    concurrency: tuple[int, ...] = (16, 48)
    prompt = 64
    steps = 8
    breakdown = 32
    evicting = 256
    copy_requests, copy_interval, copy_steps = 8, 16, 32
    least = most = 5

    @classmethod
    def of(cls, bench: Bench) -> "_Sizes":
        sizes = cls()
        sizes.least = bench.repeats
        sizes.most = max(sizes.least, MOST_REPEATS)
        if bench.quick:
            sizes.blocks, sizes.concurrency, sizes.steps, sizes.breakdown = BLOCKS, (4,), 2, 6
            sizes.most = sizes.least
            sizes.evicting, sizes.copy_requests, sizes.copy_steps = 96, 4, 16
        return sizes


def _indirection(bench: Bench, sizes: _Sizes, concurrency: int) -> list[Run]:
    """Two stock engines and one with hooks, in turns on the same requests; more repeats until A and A agree."""
    pool = {"num_blocks": sizes.blocks}
    engines = {
        STOCK: bench.engine(None, **pool),
        AGAIN: bench.engine(None, copy=1, **pool),
        HOOKS: bench.engine(VTokenConfig(**IN_PLACE), **pool),
    }
    longest = min(engine.num_blocks for engine in engines.values()) // concurrency * engines[HOOKS].block_size
    most = min(sizes.most, (longest - sizes.prompt - SETTLE - sizes.breakdown - 1) // (SLICES * sizes.steps))
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
    for name in (STOCK, HOOKS):
        told = engines[name].do(TASK + "break_down", running=concurrency, steps=sizes.breakdown)
        runs.append({"part": "breakdown", "concurrency": concurrency, "variant": name, **told})
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
    engine = bench.engine(VTokenConfig(**IN_PLACE), num_blocks=sizes.blocks)
    told = _decoding(engine, _prompts(bench, concurrency, sizes.evicting), "break_down", steps=sizes.breakdown)
    return [{"part": "breakdown", "concurrency": concurrency, "variant": EVICTING, **told}]


def _decoding(engine: RunningEngine, prompts: list[list[int]], task: str, steps: int) -> dict[str, Any]:
    running = len(prompts)
    engine.do(TASK + "begin", prompts=prompts, max_tokens=steps + 2 * SETTLE + 2)
    told: dict[str, Any] = engine.do(TASK + task, running=running, steps=steps)
    engine.do(TASK + "end", running=running)
    return told


def _copies(bench: Bench, sizes: _Sizes) -> list[Run]:
    """One engine, the same requests all the time; from turn to turn only the way of copying is exchanged."""
    settings: dict[str, Any] = {**IN_BURSTS, "interval": sizes.copy_interval}
    engine = bench.engine(VTokenConfig(**settings), num_blocks=sizes.blocks)
    running, steps = sizes.copy_requests, sizes.copy_steps
    turns = len(MODES) * (bench.repeats + 1)
    prompts = _prompts(bench, running, sizes.evicting)
    engine.do(TASK + "begin", prompts=prompts, max_tokens=turns * steps + 2 * SETTLE)
    for mode in MODES:  # what only the first copies of a kind pay for is paid for
        engine.do(TASK + "decode_copying", running=running, steps=sizes.copy_interval, mode=mode)
    runs: list[Run] = []
    for repeat, mode in bench.interleaved(MODES, "ways of copying"):
        told = engine.do(TASK + "decode_copying", running=running, steps=steps, mode=mode)
        runs.append({"part": "copies", "variant": mode, "repeat": repeat, **told, **_rates(told, running)})
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
    for run in part_of(runs, "breakdown"):
        if run["variant"] == STOCK:
            continue
        due = run["steps"] * run["concurrency"] if run["variant"] == EVICTING else 0
        which = f"{run['concurrency']} requests, {run['variant']}"
        checks.append(Check(f"{which}: evictions", str(due), str(run["tokens_evicted"]), run["tokens_evicted"] == due))
        if run["variant"] == HOOKS:
            checks.append(
                Check(
                    f"{which}: time inside our hooks",
                    f"under {TARGET:.0%} of the step",
                    f"{run['hooks_share']:.2%}",
                    run["hooks_share"] < TARGET,
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
    stall = {mode: interval([run["stall_ms"] for run in part_of(runs, "copies", variant=mode)]) for mode in MODES}
    ours, theirs = stall["async"].median, stall["force_sync"].median
    checks.append(
        Check(
            "the host stands still for async copies",
            f"for less than forced to wait, {theirs:.2f} ms",
            f"{ours:.2f} ms",
            ours < theirs,
            "aim",
            "the copy is not over when the next forward begins, and where no core is to spare it takes its time from "
            "what it runs beside",
        )
    )
    return checks
