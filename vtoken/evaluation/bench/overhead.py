"""What vtoken's indirection costs where nothing is evicted, where time in a step goes, and what copies make wait."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import BLOCKS, Bench
from vtoken.evaluation.bench.engines import RunningEngine
from vtoken.evaluation.bench.figures import COLOURS, FURTHER, new_figure
from vtoken.evaluation.bench.intervals import Interval, interval, ratio
from vtoken.evaluation.bench.overhead_task import SETTLE, TASK
from vtoken.evaluation.bench.tables import Column, Table
from vtoken.evaluation.bench.ways import QUALITY_COLUMNS, quality_cells

STOCK, AGAIN, HOOKS = "stock", "stock again", "hooks on, nothing to evict"
EVICTING = "one eviction per request and step"
IN_PLACE: dict[str, Any] = {"policy": "streaming_llm", "budget": 0.5}
IN_BURSTS: dict[str, Any] = {"policy": "random", "budget": 0.5, "copies": "inline"}
MODES = ("async", "inline", "force_sync")
NARROW = 0.03
"""The half-width of the A/A interval that is asked for."""
MOST_REPEATS = 14
SLICES = 3
"""Turns that each engine takes within a repeat."""
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
        return [_load_table(runs), _share_table(runs), _phase_table(runs), _copy_table(runs), _quality_table(runs)]

    def figure(self, runs: Sequence[Run]) -> Any:
        figure, (ratios, phases, stalls) = new_figure(columns=3, width=4.6, height=3.4)
        _draw_ratios(ratios, runs)
        _draw_phases(phases, runs)
        _draw_stalls(stalls, runs)
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
            if repeat + 1 >= sizes.least and all(width <= NARROW for width in _widths(runs, concurrency)):
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


# -- what the runs say ----------------------------------------------------------------------------------------


def _part(runs: Sequence[Run], part: str, **fields: Any) -> list[Run]:
    return [run for run in runs if run["part"] == part and all(run[name] == value for name, value in fields.items())]


def _concurrencies(runs: Sequence[Run]) -> list[int]:
    return sorted({run["concurrency"] for run in _part(runs, "load")})


def _values(runs: Sequence[Run], name: str, **fields: Any) -> list[float]:
    return [run[name] for run in _part(runs, "load", **fields)]


def _against(runs: Sequence[Run], name: str, concurrency: int, variant: str) -> Interval:
    """How a variant compares with stock; with both stock engines, unless it is one of them."""
    ours = _values(runs, name, concurrency=concurrency, variant=variant)
    stock = _values(runs, name, concurrency=concurrency, variant=STOCK)
    if variant == HOOKS:
        again = _values(runs, name, concurrency=concurrency, variant=AGAIN)
        stock = [float(np.sqrt(a * b)) for a, b in zip(stock, again, strict=True)]
    return ratio(ours, stock)


MEASURES = (("output_tokens_per_s", "output tokens/s"), ("tpot_p95_ms", "p95 ms per output token"))


def _widths(runs: Sequence[Run], concurrency: int) -> list[float]:
    return [_against(runs, name, concurrency, AGAIN).half_width for name, _ in MEASURES]


def _load_table(runs: Sequence[Run]) -> Table:
    rows = []
    for concurrency in _concurrencies(runs):
        for name, shown in MEASURES:
            stock, ours = (
                interval(_values(runs, name, concurrency=concurrency, variant=variant)) for variant in (STOCK, HOOKS)
            )
            floor, cost = (_against(runs, name, concurrency, variant) for variant in (AGAIN, HOOKS))
            rows.append((concurrency, shown, stock.repeats, stock, ours, cost, floor))
    columns = [
        Column("requests"),
        Column("measure"),
        Column("repeats"),
        Column("stock vLLM", 1),
        Column("hooks on", 1),
        Column("hooks / stock", 1, percent=True),
        Column("A/A: stock / stock", 1, percent=True),
    ]
    steps = len(_part(runs, "load")[0]["step_ms"])
    note = (
        f"All requests decode; a repeat is {steps} steps of each engine, in {SLICES} turns. Medians with 95 % "
        f"intervals; ratios are paired by repeat, and repeats are added until the A/A intervals are within "
        f"{NARROW:.0%} either way, or there are {MOST_REPEATS}, or the pool is full. Each request has a budget, "
        "which it does not reach."
    )
    return Table("The indirection alone", columns, rows, note)


def _share_table(runs: Sequence[Run]) -> Table:
    rows = [
        (
            run["concurrency"],
            run["variant"],
            run["tokens_evicted"] / run["steps"],
            run["step_ms"],
            run["phases"]["hooks"],
            run["hooks_share"],
            run["phases"]["relocation"],
        )
        for run in _part(runs, "breakdown")
        if run["variant"] != STOCK
    ]
    columns = [
        Column("requests"),
        Column("what"),
        Column("evictions per step", 1),
        Column("step, ms", 1),
        Column("in hooks, ms", 2),
        Column("share of the step", 2, percent=True),
        Column("relocation, ms", 2),
    ]
    note = "Hooks: outermost frames of vtoken less the vLLM calls inside them, with the clock's own cost in them."
    return Table("Time inside our hooks", columns, rows, note)


def _phase_table(runs: Sequence[Run]) -> Table:
    found = _of_smallest(runs)
    columns = [Column("phase"), *(Column(f"{run['variant']}, ms", 2) for run in found)]
    rows: list[tuple[Any, ...]] = [(phase, *(run["phases"][phase] for run in found)) for phase in found[0]["phases"]]
    rows.append(("step", *(run["step_ms"] for run in found)))
    note = (
        "Mean of so many steps: "
        + ", ".join(f"{run['steps']} ({run['variant']})" for run in found)
        + ". Every moment counts for the innermost phase. Where there are evictions contexts are longer, so forwards "
        "do not compare across columns."
    )
    return Table(f"A decode step of {found[0]['concurrency']} requests, phase by phase", columns, rows, note)


def _of_smallest(runs: Sequence[Run]) -> list[Run]:
    """The breakdowns at the smallest number of requests, where all three are."""
    return _part(runs, "breakdown", concurrency=min(run["concurrency"] for run in _part(runs, "breakdown")))


def _copy_table(runs: Sequence[Run]) -> Table:
    rows = []
    inline = [run["output_tokens_per_s"] for run in _part(runs, "copies", variant="inline")]
    for mode in MODES:
        mine = _part(runs, "copies", variant=mode)
        rows.append(
            (
                mode,
                sum(run["relocations"] for run in mine),
                sum(run["tokens_moved"] for run in mine),
                *(interval([run[name] for run in mine]) for name in ("copy_ms", "stall_ms")),
                interval([run["output_tokens_per_s"] for run in mine]),
                None if mode == "inline" else ratio([run["output_tokens_per_s"] for run in mine], inline),
            )
        )
    columns = [
        Column("copies"),
        Column("relocations"),
        Column("tokens moved"),
        Column("the copy itself, ms", 2),
        Column("host stands still, ms", 2),
        Column("output tokens/s", 1),
        Column("against inline", 1, percent=True),
    ]
    note = (
        "fill, random victims in bursts, one engine whose way of copying is exchanged; per relocation. async copies "
        "on a thread beside sampling and scheduling; force_sync does that and waits at once; inline copies on the "
        "host's own thread."
    )
    return Table("Copies", columns, rows, note)


def _quality_table(runs: Sequence[Run]) -> Table:
    rows = [(run["policy"], *quality_cells(run)) for run in _part(runs, "quality")]
    columns = [Column("policy, half of the prompt"), *QUALITY_COLUMNS]
    return Table("What evicting as in these runs costs in quality", columns, rows)


def _load_checks(runs: Sequence[Run]) -> list[Check]:
    checks = []
    evicted = sum(run["tokens_evicted"] for run in _part(runs, "load"))
    checks.append(Check("evictions while the indirection alone is measured", "0", str(evicted), evicted == 0))
    for concurrency in _concurrencies(runs):
        for (name, shown), width in zip(MEASURES, _widths(runs, concurrency), strict=True):
            floor, cost = (_against(runs, name, concurrency, variant) for variant in (AGAIN, HOOKS))
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
    for run in _part(runs, "breakdown"):
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
        mine = _part(runs, "copies", variant=mode)
        least = min(min(run["tokens_evicted"], run["tokens_moved"]) for run in mine)
        checks.append(Check(f"copies {mode}: every run evicts and moves tokens", "more than 0", str(least), least > 0))
    stall = {mode: interval([run["stall_ms"] for run in _part(runs, "copies", variant=mode)]) for mode in MODES}
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


def _draw_ratios(axes: Any, runs: Sequence[Run]) -> None:
    labels: list[str] = []
    for concurrency in _concurrencies(runs):
        for name, shown in MEASURES:
            place = len(labels)
            for variant, colour, marker, shift in (
                (AGAIN, COLOURS["native"], "s", 0.15),
                (HOOKS, COLOURS["fill"], "o", -0.15),
            ):
                found = _against(runs, name, concurrency, variant)
                middle = 100 * found.median
                spread = [[max(middle - 100 * found.low, 0.0)], [max(100 * found.high - middle, 0.0)]]
                label = {AGAIN: "stock / stock (A/A)", HOOKS: "hooks on / stock"}[variant] if not labels else None
                axes.errorbar([middle], [place + shift], xerr=spread, fmt=marker, color=colour, capsize=3, label=label)
            labels.append(f"{concurrency} requests,\n{shown}")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -1.1)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("% of stock vLLM, 95 % interval")
    axes.set_title("What do idle hooks cost?")
    axes.legend(loc="upper center", fontsize=7, ncols=2)


def _draw_phases(axes: Any, runs: Sequence[Run]) -> None:
    """Without the forward, beside which nothing else could be seen."""
    found = _of_smallest(runs)
    names = {STOCK: "stock", HOOKS: "hooks on,\nnothing to evict", EVICTING: "one eviction per\nrequest and step"}
    colours = ("#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#000000", "#cc79a7", "#f0e442")
    bottom = np.zeros(len(found))
    for phase, colour in zip([phase for phase in found[0]["phases"] if phase != "forward"], colours, strict=True):
        values = np.array([run["phases"][phase] for run in found])
        axes.bar(range(len(found)), values, bottom=bottom, color=colour, label=phase, width=0.6)
        bottom += values
    labels = [f"{names[run['variant']]}\n(forward: {run['phases']['forward']:.0f} ms)" for run in found]
    axes.set_xticks(range(len(found)), labels, fontsize=8)
    axes.set_ylabel("ms per step beside the forward")
    axes.set_title(f"Where does a step of {found[0]['concurrency']} requests go?")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_stalls(axes: Any, runs: Sequence[Run]) -> None:
    for shift, name, label, colour in (
        (-0.18, "copy_ms", "the copy itself", FURTHER[2]),
        (0.18, "stall_ms", "the host stands still", COLOURS["none"]),
    ):
        found = [interval([run[name] for run in _part(runs, "copies", variant=mode)]) for mode in MODES]
        spread = [
            [max(one.median - one.low, 0.0) for one in found],
            [max(one.high - one.median, 0.0) for one in found],
        ]
        places = [n + shift for n in range(len(MODES))]
        axes.bar(places, [one.median for one in found], 0.34, yerr=spread, capsize=3, color=colour, label=label)
    axes.set_xticks(range(len(MODES)), MODES)
    axes.set_ylim(0, 1.3 * max(bar.get_height() for bar in axes.patches))
    axes.set_ylabel("ms per relocation, 95 % interval")
    axes.set_title("Does the host wait for copies?")
    axes.legend(fontsize=8, loc="upper center", ncols=2)
