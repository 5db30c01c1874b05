"""How many long requests a pool holds at once, at the paper's two settings, and what that is worth in time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.capacity_task import BATCHED_TOKENS, Setting, find_capacity, measure_demand
from vtoken.evaluation.bench.figures import COLOURS, FURTHER, LABELS, MARKERS, new_figure
from vtoken.evaluation.bench.intervals import interval, ratio
from vtoken.evaluation.bench.load import RUN_LOAD, as_arguments
from vtoken.evaluation.bench.quality_of import in_words
from vtoken.evaluation.bench.simulations import cores, simulate
from vtoken.evaluation.bench.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vtoken.evaluation.bench.bench import Bench
    from vtoken.evaluation.bench.engines import RunningEngine

PAPER = {
    5427: {"native": 5, "vToken": 8},
    11519: {"native": 11, "vToken": 22},
}
"""Concurrent requests of 16,320 tokens by the pool's blocks: arXiv 2608.13263."""
SETTINGS = [Setting(prompt=4320, outputs=12000, budget=8192, pool=pool) for pool in PAPER]
EVICTED_SHARE = 512
"""Of the budget that is evicted at a time, one part in so many: 16 tokens of 8,192, which saves most of the time."""
COUNTED_POLICY = "random"
WAYS: dict[str, dict[str, Any] | None] = {
    "native": None,
    "none": {"policy": COUNTED_POLICY, "reclaim": "none"},
    "none, window": {"policy": "streaming_llm", "reclaim": "none"},
    "pack": {"policy": COUNTED_POLICY, "reclaim": "pack"},
    "pack, eager": {"policy": COUNTED_POLICY, "reclaim": "pack", "theta_f": 0.02},
    "fill": {"policy": COUNTED_POLICY, "reclaim": "fill"},
}
NAMES = {**LABELS, "none, window": "none, sliding window", "pack, eager": "vtoken, pack with theta_F 0.02"}
DEMANDING = ("native", "none", "fill")
"""Where requests do not touch each other's blocks, so that one run tells what any number of them takes."""
RATIOS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
RATIO_WAYS = ("native", "none", "pack", "fill")
PILOT = RATIO_PART = QUICK_PART = 16
"""What lengths and pools are divided by: where the search begins, over the eviction ratio, and with --quick."""
TIMED_POLICY, TIMED_REQUESTS = "h2o", 10
TIMED_PART, TIMED = 64, ("native", "none", "pack", "fill", "fill again")
LONG_PART, LONG, LONG_REPEATS = 4, ("native", "fill"), 3
"""A quarter of the length, at which a run takes minutes."""
QUICK_TIMED_PART, QUICK_TIMED = 128, ("native", "fill")


class Capacity(Experiment):
    """Feasible is a number of requests that are submitted together, all run at once, and none of which is ever
    preempted or refused."""

    name = "capacity"
    question = "How many long requests run at once to their ends in a given pool?"

    def measure(self, bench: "Bench") -> list[Run]:
        tasks = _simulations(bench.quick)
        with bench.progress("capacity, block counts", len(tasks)) as tick:
            runs = simulate(_simulated, tasks, tick, cores())
        runs += [{"part": "quality", **bench.quality_of(policy, 0.5)} for policy in (TIMED_POLICY, COUNTED_POLICY)]
        if bench.quick:
            return [*runs, *self._timed(bench, "timed", QUICK_TIMED_PART, QUICK_TIMED, bench.wanted_repeats or 1)]
        runs += self._timed(bench, "timed", TIMED_PART, TIMED, bench.repeats)
        return [*runs, *self._timed(bench, "long", LONG_PART, LONG, bench.wanted_repeats or LONG_REPEATS)]

    def _timed(self, bench: "Bench", part: str, scale: int, ways: Sequence[str], repeats: int) -> list[Run]:
        setting = SETTINGS[0].scaled(scale)
        works = as_arguments(bench.requests.exactly(TIMED_REQUESTS, setting.prompt, setting.outputs))
        engines = {way: _engine(bench, way, setting) for way in ways}
        runs: list[Run] = []
        for repeat, way in bench.interleaved(ways, f"capacity, 1/{scale} of the length, timed", repeats):
            engine = engines[way]
            told = engine.do(RUN_LOAD, workloads=works)
            kept = ("output_tokens_per_s", "seconds", "peak_running", "peak_blocks", "preemptions", "tokens_evicted")
            runs.append(
                {
                    "part": part,
                    "scale": scale,
                    "way": way,
                    "repeat": repeat,
                    "setting": setting.to_json(),
                    "num_blocks": engine.num_blocks,
                    "block_size": engine.block_size,
                    **{name: told[name] for name in kept},
                }
            )
        return runs

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        parts = [part for part in ("timed", "long") if _of_part(runs, part)]
        return [_capacities(runs), _over_ratio(runs), _demand(runs), *(_timed_table(runs, part) for part in parts)]

    def figure(self, runs: Sequence[Run]) -> "Figure":
        figure, (left, right) = new_figure(1, 2)
        demands = [run for run in runs if run["part"] == "demand"]
        for run in demands:
            way = run["way"]
            counts = range(1, len(run["demand"]) + 1)
            style = "--" if way == "none" else "-"  # it lies on native's line
            left.plot(counts, run["demand"], style, color=COLOURS[way], label=NAMES[way])
        for n, pool in enumerate(_pools(runs)):
            left.axhline(pool, color=FURTHER[-1], linestyle=("--", ":")[n % 2], linewidth=1)
            left.annotate(f"pool of {pool:,} blocks", (1, pool), xytext=(0, 3), textcoords="offset points", fontsize=8)
        left.set_xlabel("requests that run at once")
        left.set_ylabel("most blocks held together")
        left.set_title("How many blocks do they take?")
        left.legend()
        ratios = [run for run in runs if run["part"] == "ratio"]
        for way in dict.fromkeys(run["way"] for run in ratios):
            found = sorted((run["ratio"], run["capacity"]) for run in ratios if run["way"] == way)
            right.plot(*zip(*found, strict=True), color=COLOURS[way], marker=MARKERS[way], label=NAMES[way])
        ideal = sorted({(run["ratio"], Setting(**run["setting"]).ideal) for run in ratios})
        right.plot(*zip(*ideal, strict=True), ":", color=FURTHER[-1], label="ideal packing")
        right.set_xlabel("share of a full-length request that is evicted")
        right.set_ylabel("requests that run at once to their ends")
        right.set_ylim(bottom=0)
        right.set_title("What does evicting more bring?")
        right.legend()
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        checks: list[Check] = []
        for pool in _pools(runs):
            found = {run["way"]: run for run in runs if run["part"] == "capacity" and run["setting"]["pool"] == pool}
            setting = Setting(**found["fill"]["setting"])
            checks += _capacity_checks(setting, found)
        for part in ("timed", "long"):
            if timed := _of_part(runs, part):
                checks += _timed_checks(timed)
        return checks


def _of_part(runs: Sequence[Run], part: str) -> list[Run]:
    return [run for run in runs if run["part"] == part]


def _timed_checks(timed: Sequence[Run]) -> list[Check]:
    scale = timed[0]["scale"]
    checks: list[Check] = []
    for way in dict.fromkeys(run["way"] for run in timed if run["way"] != "native"):
        evicted = min(run["tokens_evicted"] for run in timed if run["way"] == way)
        checks.append(Check(f"timed, 1/{scale}, {way}: evictions fired", "more than 0", f"{evicted:,}", evicted > 0))
    speeds = {way: [run["output_tokens_per_s"] for run in timed if run["way"] == way] for way in ("fill", "native")}
    gain = ratio(speeds["fill"], speeds["native"])
    checks.append(
        Check(
            f"timed, 1/{scale}: fill is faster than native",
            "above 1",
            f"{gain.median:.2f}",
            gain.median > 1,
            "aim",
            "twice the requests share the cores, and a step takes longer with them",
        )
    )
    return checks


def _engine(bench: "Bench", way: str, setting: "Setting") -> "RunningEngine":
    reclaim = way.split(maxsplit=1)[0]
    settings: dict[str, Any] = {"policy": TIMED_POLICY, "budget": setting.budget, "reclaim": reclaim}
    return bench.engine(
        VTokenConfig(**settings) if reclaim != "native" else None,
        num_blocks=setting.pool * 16 // 32,
        max_model_len=setting.prompt + setting.outputs,
        copy=int(way.endswith("again")),
    )


def _simulations(quick: bool) -> list[dict[str, Any]]:
    """Arguments of all runs without a model, the longest first."""
    settings = [setting.scaled(QUICK_PART) for setting in SETTINGS[:1]] if quick else SETTINGS[::-1]
    capacities = [
        {"task": "capacity", "way": way, "setting": setting.to_json(), "pilot": 0 if quick else PILOT}
        for setting in settings
        for way in WAYS
    ]
    demands = [
        {"task": "demand", "way": way, "setting": settings[0].to_json(), "concurrency": settings[0].ideal}
        for way in DEMANDING
    ]
    small = SETTINGS[0].scaled(RATIO_PART)
    ratios = [
        {"task": "ratio", "way": way, "ratio": share, "setting": _with_ratio(small, share).to_json()}
        for share in (RATIOS[::3] if quick else RATIOS)
        for way in RATIO_WAYS
    ]
    return [*demands, *capacities, *ratios]


def _simulated(task: str, way: str, setting: dict[str, int], **more: Any) -> Run:
    vtoken, own, budget = None, WAYS[way], setting["budget"]
    if own is not None:
        vtoken = {"budget": budget, "interval": max(1, budget // EVICTED_SHARE), **own}
    if task == "demand":
        return measure_demand(way, vtoken, setting, **more)
    return {**find_capacity(way, vtoken, setting, **more), "part": task}


def _with_ratio(setting: Setting, share: float) -> Setting:
    """The budget that leaves out this share of a full-length request."""
    budget = round((1 - share) * (setting.prompt + setting.outputs))
    return Setting(setting.prompt, setting.outputs, budget, setting.pool)


def _pools(runs: Sequence[Run]) -> list[int]:
    return sorted({run["setting"]["pool"] for run in runs if run["part"] == "capacity"})


def _at_capacity(run: Run) -> Run:
    """Of a search, the run with the most requests that was feasible."""
    return next(one for one in run["runs"] if one["concurrency"] == run["capacity"])


def _capacity_checks(setting: Setting, found: dict[str, Run]) -> list[Check]:
    pool, capacity = setting.pool, {way: run["capacity"] for way, run in found.items()}
    checks = [
        Check(
            f"{pool:,} blocks: native holds as many full requests as fit",
            str(pool // setting.full_blocks),
            str(capacity["native"]),
            capacity["native"] == pool // setting.full_blocks,
        )
    ]
    for way in (way for way in found if way != "native"):
        evicted = _at_capacity(found[way])["tokens_evicted"]
        checks.append(Check(f"{pool:,} blocks, {way}: evictions fired", "more than 0", f"{evicted:,}", evicted > 0))
    others = max(number for way, number in capacity.items() if way != "fill")
    checks.append(
        Check(
            f"{pool:,} blocks: fill holds no fewer requests than any other way",
            f"at least {others}",
            str(capacity["fill"]),
            capacity["fill"] >= others,
        )
    )
    most = capacity["fill"] * setting.packed_blocks
    held = _at_capacity(found["fill"])["peak_blocks"]
    checks.append(
        Check(
            f"{pool:,} blocks: fill never holds more than each request's budget takes",
            f"at most {most:,} blocks",
            f"{held:,}",
            held <= most,
        )
    )
    checks.append(
        Check(
            f"{pool:,} blocks: fill holds what ideal packing allows",
            str(setting.ideal),
            str(capacity["fill"]),
            capacity["fill"] >= setting.ideal,
            "aim",
            "a prompt needs its whole length at once before it is reduced, or requests overlap less than their lengths",
        )
    )
    return checks


def _capacities(runs: Sequence[Run]) -> Table:
    found = [run for run in runs if run["part"] == "capacity"]
    rows: list[list[Any]] = []
    for pool in _pools(runs):
        for run in (run for run in found if run["setting"]["pool"] == pool):
            last = next((one for one in run["runs"] if one["concurrency"] == run["capacity"] + 1), None)
            best = _at_capacity(run)
            paper = PAPER.get(pool, {}).get("native" if run["way"] == "native" else "vToken")
            told = paper if run["way"] in ("native", "fill", "pack") else None
            rows.append(
                [
                    pool,
                    NAMES[run["way"]],
                    run["capacity"],
                    Setting(**run["setting"]).ideal if run["way"] != "native" else None,
                    told,
                    best["peak_blocks"],
                    best["tokens_moved"],
                    f"{last['why']} after {last['steps']:,} steps" if last else "",
                ]
            )
    first = found[0]["setting"]
    columns = [
        Column("pool, blocks"),
        Column("way of reclaiming"),
        Column("requests at once"),
        Column("ideal packing"),
        Column("paper"),
        Column("most blocks held"),
        Column("tokens moved"),
        Column("one more request"),
    ]
    note = (
        "Block counts, no timed run: vLLM's real scheduler and block pool and vtoken's real worker without a model. "
        f"Requests of {first['prompt']:,} + {first['outputs']:,} tokens, all submitted at once, blocks of 16, at most "
        f"{BATCHED_TOKENS:,} tokens per step, budget {first['budget']:,} tokens, of which one in {EVICTED_SHARE} is "
        "evicted at a time; victims random, or all but a sliding window. Each number has been run, and so has the next "
        "one, which fails as the last column says. pack with its defaults packs only where more than theta_F = 0.25 of "
        "all slots are waste, so that a request takes up to a third more than its budget; fill has no such threshold. "
        f"The paper's numbers were measured on one H100. {_quality(runs, COUNTED_POLICY)}"
    )
    return Table("Requests that run at once to their ends", columns, rows, note)


def _over_ratio(runs: Sequence[Run]) -> Table:
    found = [run for run in runs if run["part"] == "ratio"]
    ways = list(dict.fromkeys(run["way"] for run in found))
    rows: list[list[Any]] = []
    for share in sorted({run["ratio"] for run in found}):
        by_way = {run["way"]: run for run in found if run["ratio"] == share}
        setting = Setting(**by_way["fill"]["setting"])
        rows.append([share, setting.budget, *(by_way[way]["capacity"] for way in ways), setting.ideal])
    columns = [
        Column("evicted share of a full-length request", 0, percent=True),
        Column("budget, tokens"),
        *(Column(NAMES[way]) for way in ways),
        Column("ideal packing"),
    ]
    first = found[0]["setting"]
    note = (
        f"As above, with everything divided by {RATIO_PART}: requests of {first['prompt']:,} + {first['outputs']:,} "
        f"tokens, a pool of {first['pool']:,} blocks, of which a full request takes "
        f"{Setting(**first).full_blocks}. A prompt is there whole once, before it is reduced, so with small budgets "
        f"it is prompts that limit how many can begin. {_quality(runs, COUNTED_POLICY)}"
    )
    return Table("Requests at once over the eviction ratio", columns, rows, note)


def _demand(runs: Sequence[Run]) -> Table:
    found = {run["way"]: run for run in runs if run["part"] == "demand"}
    most = max(len(run["demand"]) for run in found.values())
    counts = sorted({1, 2, *range(4, most + 1, 4), most})
    rows = [[count, *(run["demand"][count - 1] for run in found.values())] for count in counts if count <= most]
    note = (
        "Most blocks that so many requests hold together, where the pool never ends. Nobody waits there and nobody's "
        "blocks depend on others, so the first ones of one run hold what they would hold alone. What pack holds "
        "depends on the pool, since it packs when blocks are few."
    )
    columns = [Column("requests at once"), *(Column(f"{NAMES[way]}, blocks") for way in found)]
    return Table("Block demand over concurrency", columns, rows, note)


def _quality(runs: Sequence[Run], policy: str) -> str:
    return in_words(next(run for run in _of_part(runs, "quality") if run["policy"] == policy))


def _timed_table(runs: Sequence[Run], part: str) -> Table:
    timed = _of_part(runs, part)
    ways = [way for way in TIMED if any(run["way"] == way for run in timed)]
    speeds = {way: [run["output_tokens_per_s"] for run in timed if run["way"] == way] for way in ways}
    rows = []
    for way in ways:
        mine = [run for run in timed if run["way"] == way]
        rows.append(
            [
                NAMES.get(way, f"{NAMES[way.split()[0]]} (A/A)"),
                max(run["peak_running"] for run in mine),
                interval([run["seconds"] for run in mine]),
                interval(speeds[way]),
                ratio(speeds[way], speeds["native"]),
                max(run["peak_blocks"] for run in mine),
                max(run["preemptions"] for run in mine),
                max(run["tokens_evicted"] for run in mine),
            ]
        )
    columns = [
        Column("way of reclaiming"),
        Column("most running at once"),
        Column("seconds", 1),
        Column("output tokens/s", 1),
        Column("over native", 2),
        Column("most blocks held"),
        Column("preemptions"),
        Column("tokens evicted"),
    ]
    first = timed[0]
    floor = "" if len(timed) > len(ways) else " One run each."
    if "fill again" in speeds:
        again = ratio(speeds["fill again"], speeds["fill"])
        floor = f" The same twice (A/A) differs by {again.low:.2f} to {again.high:.2f}."
    note = (
        f"Timed, with the real model and everything divided by {first['scale']}, since this takes a processor: "
        f"{TIMED_REQUESTS} requests of {first['setting']['prompt']} + {first['setting']['outputs']} tokens at once, a "
        f"pool of {first['num_blocks']} blocks of {first['block_size']}, {TIMED_POLICY} with a budget of "
        f"{first['setting']['budget']} tokens. Whom vLLM admits beyond what fits to the end it preempts, and computes "
        f"anew.{floor} {_quality(runs, TIMED_POLICY)}"
    )
    return Table(f"The same in time, with a model, at 1/{first['scale']} of the length", columns, rows, note)
