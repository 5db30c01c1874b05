"""How much load each variant bears while its time per output token stays within a bound: a closed-loop sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import Bench, in_any_order
from vtoken.evaluation.bench.engines import RunningEngine
from vtoken.evaluation.bench.figures import COLOURS, LABELS, MARKERS, new_figure
from vtoken.evaluation.bench.intervals import Interval, interval, ratio
from vtoken.evaluation.bench.load import RUN_LOAD, as_arguments
from vtoken.evaluation.bench.tables import Column, Table
from vtoken.evaluation.bench.ways import (
    AGAIN,
    EVICTING,
    FILL,
    NAIVE,
    NATIVE,
    POLICIES,
    QUALITY_COLUMNS,
    QUICK_BLOCKS,
    SHARE,
    WAYS,
    blocks_for,
    config_of,
    quality_cells,
)

PROMPT, OUTPUTS = 128, 64
FULL_REQUESTS = 5
"""The pool holds so many requests that evict nothing."""
CLIENTS = (4, 8, 16)
BASE = 8
"""Clients at which naive eviction sets the bound."""
SLACK = 1.05
CLOSE = 0.15
"""A point whose first run is within this share of the bound, on either side, is repeated as the selected one is."""
PROMPTS = "prompts alone"


class Sla(Experiment):
    name = "sla"
    question = (
        f"How many clients, and how many output tokens per second, does each variant bear while the 95th percentile of "
        f"its time per output token stays within {SLACK} x that of naive eviction with {BASE} clients?"
    )

    def measure(self, bench: Bench) -> list[Run]:
        return _Sweep(bench).run()

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        return [_selected_table(runs), _sweep_table(runs), _quality_table(runs)]

    def figure(self, runs: Sequence[Run]) -> Any:
        policies = _policies(runs)
        width = 3.6 if len(policies) > 1 else 6.0
        figure, axes = new_figure(2, len(policies), width=width, height=2.9, squeeze=False, sharex=True, sharey="row")
        for place, policy in enumerate(policies):
            _draw(axes[0][place], axes[1][place], runs, policy)
        axes[0][0].set_ylabel("p95 ms per output token")
        axes[1][0].set_ylabel("output tokens/s")
        axes[0][0].legend(fontsize=8)
        figure.suptitle("How much load fits under the latency bound? (filled: selected; 95 % intervals)", fontsize=10)
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        checks = []
        for policy in _policies(runs):
            for way in EVICTING:
                least = min(run["tokens_evicted"] for run in _load(runs, way, policy))
                checks.append(Check(f"{way}, {policy}: every run evicts", "more than 0", f"{least:,}", least > 0))
            picks = {way: _selected(runs, way, policy) for way in WAYS}
            ours, theirs = picks[FILL], picks[NAIVE]
            if ours is None or theirs is None:
                found, held = "nothing within the bound", False
            else:
                gain = _gain(runs, policy, FILL)
                found, held = f"{ours} clients, {_shown(gain)}", gain.high >= 1.0
            checks.append(
                Check(
                    f"{policy}: fill's output tokens/s at its selected point, against naive eviction's",
                    "not below it beyond the interval",
                    found,
                    held,
                    "aim",
                    "fill's longer steps with more requests in them leave it at fewer clients",
                )
            )
        return checks


@dataclass(frozen=True)
class _Point:
    way: str
    policy: str
    clients: int


class _Sweep:
    """First every variant once at each number of clients that is needed to find its point; then those again."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._policies = POLICIES[:1] if bench.quick else POLICIES
        self._clients = (2, 4, 8) if bench.quick else CLIENTS
        self._base = 4 if bench.quick else BASE
        prompt, outputs = (64, 12) if bench.quick else (PROMPT, OUTPUTS)
        self._most = _requests_of(max(self._clients))
        self._works = bench.requests.exactly(self._most, prompt, outputs)
        self._blocks = QUICK_BLOCKS if bench.quick else blocks_for(self._works, FULL_REQUESTS)
        self._engines: dict[str, RunningEngine] = {}
        self._runs: list[Run] = []

    def run(self) -> list[Run]:
        self._engines = {
            way: self._bench.engine(config_of(way), num_blocks=self._blocks, copy=int(way == AGAIN))
            for way in (*WAYS, AGAIN)
        }
        alone = [replace(work, max_tokens=1) for work in self._works]
        told = self._engines[NATIVE].do(RUN_LOAD, workloads=as_arguments(alone), concurrency=1)
        each = told["seconds"] / len(alone)
        self._runs.append({"part": PROMPTS, "seconds_each": each, "requests": len(alone)})
        everybody = [(NATIVE, self._policies[0]), *((way, policy) for policy in self._policies for way in EVICTING)]
        self._measure([_Point(way, policy, self._base) for way, policy in everybody], "first runs")
        more = [n for n in self._clients if n > self._base]
        fewer = [n for n in reversed(self._clients) if n < self._base]
        for way, policy in everybody:
            fits = self._fits(_Point(way, policy, self._base))
            for clients in more if fits else fewer:
                point = _Point(way, policy, clients)
                self._measure([point], f"{way}, {policy}, {clients} clients")
                if self._fits(point) != fits:
                    break
        self._again(everybody)
        for policy in self._policies:
            self._runs.append({"part": "quality", **self._bench.quality_of(policy, SHARE)})
        return self._runs

    def _again(self, everybody: Sequence[tuple[str, str]]) -> None:
        """The points that decide: the bound's, the selected ones, and those that might have been; and the A/A pair."""
        points = []
        for way, policy in everybody:
            bound = _bound(self._runs, policy)
            chosen = _selected(self._runs, way, policy)
            for clients in _tried(self._runs, way, policy):
                close = abs(_p95(self._runs, way, policy, clients) / bound - 1.0) <= CLOSE
                if clients == chosen or close or (way == NAIVE and clients == self._base):
                    points.append(_Point(way, policy, clients))
        first = self._policies[0]
        at = _selected(self._runs, FILL, first) or self._base
        points += [_Point(AGAIN, first, at), *({_Point(FILL, first, at)} - set(points))]
        for repeat in range(1, self._bench.repeats):
            self._measure(in_any_order(points, repeat), f"repeat {repeat + 1}", repeat)

    def _measure(self, points: Sequence[_Point], what: str, repeat: int = 0) -> None:
        with self._bench.progress(what, len(points)) as tick:
            for point in points:
                self._runs.append(self._one(point, repeat))
                tick()

    def _one(self, point: _Point, repeat: int) -> Run:
        works = self._works[: _requests_of(point.clients)]
        if point.way != NATIVE:
            works = [replace(work, extra_args={"vtoken.policy": point.policy}) for work in works]
        found = self._engines[point.way].do(RUN_LOAD, workloads=as_arguments(works), concurrency=point.clients)
        return {
            "part": "load",
            "variant": point.way,
            "policy": point.policy,
            "clients": point.clients,
            "repeat": repeat,
            "blocks": self._blocks,
            "base": self._base,
            "prompt_tokens": len(works[0].prompt_token_ids),
            "full_blocks": blocks_for(works, 1),
            **found,
        }

    def _fits(self, point: _Point) -> bool:
        return _p95(self._runs, point.way, point.policy, point.clients) <= _bound(self._runs, point.policy)


def _requests_of(clients: int) -> int:
    """Every client sends one request and every other one a second, so that there is always somebody to take over."""
    return max(3 * clients // 2, 4)


# -- what the runs say ----------------------------------------------------------------------------------------


def _policies(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run["policy"] for run in runs if run["part"] == "load"))


def _load(runs: Sequence[Run], way: str, policy: str, clients: int | None = None) -> list[Run]:
    """A variant's runs. Native vLLM has no policy: its runs are everybody's."""
    return [
        run
        for run in runs
        if run["part"] == "load"
        and run["variant"] == way
        and (way == NATIVE or run["policy"] == policy)
        and clients in (None, run["clients"])
    ]


def _tried(runs: Sequence[Run], way: str, policy: str) -> list[int]:
    return sorted({run["clients"] for run in _load(runs, way, policy)})


def _p95(runs: Sequence[Run], way: str, policy: str, clients: int) -> float:
    return float(median(run["tpot_p95_ms"] for run in _load(runs, way, policy, clients)))


def _bound(runs: Sequence[Run], policy: str) -> float:
    """Milliseconds per output token."""
    base = next(run["base"] for run in runs if run["part"] == "load")
    return SLACK * _p95(runs, NAIVE, policy, base)


def _selected(runs: Sequence[Run], way: str, policy: str) -> int | None:
    """The most clients tried at which the variant is within the bound."""
    bound = _bound(runs, policy)
    fitting = [n for n in _tried(runs, way, policy) if _p95(runs, way, policy, n) <= bound]
    return max(fitting, default=None)


def _of(runs: Sequence[Run], name: str, way: str, policy: str, clients: int) -> list[float]:
    return [run[name] for run in sorted(_load(runs, way, policy, clients), key=lambda run: run["repeat"])]


def _paired(runs: Sequence[Run], name: str, ours: tuple[str, str, int], theirs: tuple[str, str, int]) -> Interval:
    """Ratio over the repeats that both have."""
    by_repeat = [{run["repeat"]: run[name] for run in _load(runs, *point)} for point in (ours, theirs)]
    common = sorted(by_repeat[0].keys() & by_repeat[1].keys())
    return ratio([by_repeat[0][n] for n in common], [by_repeat[1][n] for n in common])


def _gain(runs: Sequence[Run], policy: str, way: str) -> Interval:
    """Output tokens/s at the selected point against naive eviction at its own."""
    ours, theirs = _selected(runs, way, policy), _selected(runs, NAIVE, policy)
    assert ours is not None
    assert theirs is not None
    return _paired(runs, "output_tokens_per_s", (way, policy, ours), (NAIVE, policy, theirs))


def _selected_table(runs: Sequence[Run]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for policy in _policies(runs):
        for way in WAYS:
            clients = _selected(runs, way, policy)
            if clients is None:
                rows.append((policy, way, "none", *[None] * 7))
                continue
            mine = _load(runs, way, policy, clients)
            naive = _selected(runs, NAIVE, policy)
            rows.append(
                (
                    policy,
                    way,
                    str(clients),
                    len(mine),
                    interval(_of(runs, "tpot_p95_ms", way, policy, clients)),
                    interval(_of(runs, "output_tokens_per_s", way, policy, clients)),
                    None if way == NAIVE or naive is None else _gain(runs, policy, way),
                    median(run["mean_running"] for run in mine),
                    median(float(run["preemptions"]) for run in mine),
                    median(_prompt_share(runs, run) for run in mine),
                )
            )
    columns = [
        Column("policy"),
        Column("variant"),
        Column("clients"),
        Column("runs"),
        Column("p95 ms per output token", 0),
        Column("output tokens/s", 1),
        Column("against none", 2),
        Column("running", 1),
        Column("preemptions", 0),
        Column("prompts' share of the time", 0, percent=True),
    ]
    return Table("Selected points", columns, rows, _note(runs))


def _note(runs: Sequence[Run]) -> str:
    about = _load(runs, NATIVE, "")[0]
    outputs = about["output_tokens"] // about["requests"]
    bounds = ", ".join(f"{_bound(runs, policy):.0f} ms ({policy})" for policy in _policies(runs))
    floor = ""
    if pair := [run for run in runs if run["part"] == "load" and run["variant"] == AGAIN]:
        point = (pair[0]["policy"], pair[0]["clients"])
        rates, p95 = (
            _paired(runs, name, (AGAIN, *point), (FILL, *point)) for name in ("output_tokens_per_s", "tpot_p95_ms")
        )
        floor = f" The A/A pair ({AGAIN} / fill, {point[1]} clients): {_shown(rates)}, p95 {_shown(p95)}."
    return (
        f"Bound: {bounds}, set with {about['base']} clients. {about['blocks']} blocks, and a request that evicts "
        f"nothing takes {about['full_blocks']}: "
        f"prompts of {about['prompt_tokens']} tokens of which half is kept, {outputs} output tokens. Each client sends "
        "its next request when its last one has ended, three requests for every two clients. One run at each point "
        f"until the bound is found, {_most_tried(runs)} clients at most, where the pool rather than latency says how "
        "many run; the selected points, and those close to the bound, are run again, in turns. Ratios are paired by "
        "repeat. "
        f"Prompts' share: what computing the prompts takes by themselves.{floor}"
    )


def _most_tried(runs: Sequence[Run]) -> int:
    return max(run["clients"] for run in runs if run["part"] == "load")


def _prompt_share(runs: Sequence[Run], run: Run) -> float:
    alone = next(one for one in runs if one["part"] == PROMPTS)
    return float(alone["seconds_each"] * run["requests"] / run["seconds"])


def _sweep_table(runs: Sequence[Run]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for policy in _policies(runs):
        bound = _bound(runs, policy)
        for way in WAYS:
            for clients in _tried(runs, way, policy):
                p95 = interval(_of(runs, "tpot_p95_ms", way, policy, clients))
                rates = interval(_of(runs, "output_tokens_per_s", way, policy, clients))
                within = "yes" if p95.median <= bound else "no"
                rows.append((policy, way, clients, p95.repeats, p95, within, rates))
    columns = [
        Column("policy"),
        Column("variant"),
        Column("clients"),
        Column("runs"),
        Column("p95 ms per output token", 0),
        Column("within the bound"),
        Column("output tokens/s", 1),
    ]
    return Table("All points", columns, rows, "Native vLLM knows no policy: the same runs stand in each part.")


def _quality_table(runs: Sequence[Run]) -> Table:
    rows = [(run["policy"], *quality_cells(run)) for run in runs if run["part"] == "quality"]
    return Table("What it costs in quality", [Column("policy, half of the prompt"), *QUALITY_COLUMNS], rows)


def _shown(found: Interval) -> str:
    return f"{found.median:.2f} x ({found.low:.2f} to {found.high:.2f})"


def _draw(latency: Any, rate: Any, runs: Sequence[Run], policy: str) -> None:
    bound = _bound(runs, policy)
    for place, way in enumerate(WAYS):
        tried, chosen = _tried(runs, way, policy), _selected(runs, way, policy)
        beside = 0.15 * (place - 1.5)  # so that equal points can be told apart
        for axes, name in ((latency, "tpot_p95_ms"), (rate, "output_tokens_per_s")):
            found = [interval(_of(runs, name, way, policy, clients)) for clients in tried]
            middle = [one.median for one in found]
            axes.plot(
                [clients + beside for clients in tried], middle, color=COLOURS[way], label=LABELS[way], linewidth=1
            )
            for clients, one in zip(tried, found, strict=True):
                error = [[max(one.median - one.low, 0.0)], [max(one.high - one.median, 0.0)]]
                axes.errorbar(
                    [clients + beside],
                    [one.median],
                    yerr=error,
                    capsize=2,
                    color=COLOURS[way],
                    marker=MARKERS[way],
                    markerfacecolor=COLOURS[way] if clients == chosen else "white",
                )
    latency.axhline(bound, color="black", linestyle="--", linewidth=1, label="bound")
    latency.set_title(policy)
    rate.set_xlabel("clients")
    for axes in (latency, rate):
        axes.set_ylim(bottom=0)
