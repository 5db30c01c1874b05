"""What vtoken's bookkeeping costs the host, over the number of requests that decode."""

import gc
import statistics
from collections.abc import Sequence
from time import thread_time
from typing import TYPE_CHECKING, Any

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.figures import COLOURS, FURTHER, LABELS, MARKERS, new_figure
from vtoken.evaluation.bench.intervals import Interval, interval
from vtoken.evaluation.bench.simulations import simulate
from vtoken.evaluation.bench.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vtoken.evaluation.bench.bench import Bench

REQUESTS = (16, 64, 256, 1024, 4096)
QUICK_REQUESTS = (16, 64, 256)
PROMPT, BUDGET = 256, 200
WARM_UP_STEPS = 4
LINEAR_FROM, GROWTH = 256, 1.25
"""Below it most of a step's time does not depend on the requests; from there on a request may cost so much more among
many than it does there, and no more."""


class Hostscale(Experiment):
    """Decode steps of many requests at once, each of which evicts a token, without a model."""

    name = "hostscale"
    question = "What does vtoken's bookkeeping cost per decode step as requests become many?"

    def measure(self, bench: "Bench") -> list[Run]:
        sizes, modes = (QUICK_REQUESTS, ("fill",)) if bench.quick else (REQUESTS, ("fill", "none"))
        steps = 5 if bench.quick else 10
        arguments = [
            {"requests": requests, "reclaim": mode, "steps": steps, "repeat": repeat}
            for repeat in range(bench.repeats)
            for requests in sizes
            for mode in modes
        ]
        with bench.progress("hostscale", len(arguments)) as tick:
            return simulate(time_hooks, arguments, tick)

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        rows: list[list[Any]] = [
            [
                LABELS[mode],
                requests,
                _over(runs, mode, requests, "hooks_ms"),
                _over(runs, mode, requests, "hooks_ms", 1e3 / requests),
                _over(runs, mode, requests, "vllm_ms"),
            ]
            for mode in _modes(runs)
            for requests in _sizes(runs)
        ]
        columns = [
            Column("way of reclaiming"),
            Column("decoding requests"),
            Column("vtoken's hooks, ms per step", 2),
            Column("us per request and step", 1),
            Column("vLLM's scheduler, ms per step", 2),
        ]
        note = (
            "vLLM's real scheduler and vtoken's real worker without a model; processor time of the one thread that "
            f"does everything. Prompts of {PROMPT} tokens, streaming_llm with a budget of {BUDGET}, so that each "
            "request forgets one token per step. Hooks are vtoken's outermost frames less the vLLM calls inside them."
        )
        return [Table("Bookkeeping per decode step", columns, rows, note)]

    def figure(self, runs: Sequence[Run]) -> "Figure":
        figure, axes = new_figure(width=5.4, height=3.6)
        sizes = _sizes(runs)
        for mode in _modes(runs):
            found = [_over(runs, mode, requests, "hooks_ms") for requests in sizes]
            spread = [[one.median - one.low for one in found], [one.high - one.median for one in found]]
            axes.errorbar(
                sizes,
                [one.median for one in found],
                _bars(spread),
                color=COLOURS[mode],
                marker=MARKERS[mode],
                label=f"hooks of {LABELS[mode]}",
            )
        first = _modes(runs)[0]
        theirs = [_over(runs, first, requests, "vllm_ms").median for requests in sizes]
        axes.plot(sizes, theirs, color=COLOURS["native"], marker=MARKERS["native"], label="vLLM's own scheduler")
        last = _over(runs, first, sizes[-1], "hooks_ms").median
        axes.plot(sizes, [last * n / sizes[-1] for n in sizes], ":", color=FURTHER[-1], label="in proportion")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axes.set_xlabel("requests that decode")
        axes.set_ylabel("processor time per step, ms")
        axes.set_title("Does bookkeeping grow with the requests, or faster?")
        axes.legend()
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        checks = []
        for mode in _modes(runs):
            evicted = [run["tokens_evicted"] / (run["requests"] * run["steps"]) for run in runs if run["mode"] == mode]
            checks.append(
                Check(
                    f"{mode}: every request forgets one token per step",
                    "1 token",
                    f"{min(evicted):g} to {max(evicted):g}",
                    set(evicted) == {1.0},
                )
            )
            sizes = [requests for requests in _sizes(runs) if requests >= LINEAR_FROM]
            if len(sizes) < 2:
                continue
            ours, theirs = (_growth(runs, mode, figure, sizes[0], sizes[-1]) for figure in ("hooks_ms", "vllm_ms"))
            checks.append(
                Check(
                    f"{mode}: a request costs no more among {sizes[-1]:,} than among {sizes[0]:,}",
                    f"at most {GROWTH:g} times as much",
                    f"{ours:.2f} times",
                    ours <= GROWTH,
                    "aim",
                    f"in the same steps a request costs vLLM's own scheduler {theirs:.2f} times as much",
                )
            )
        return checks


def time_hooks(requests: int, reclaim: str, steps: int, repeat: int) -> Run:
    """Decode steps of so many requests; medians over the steps, in ms of this thread's processor time.

    Raises:
        RuntimeError: not all of them decode in every step, so that the figures would be of something else.
    """
    from vtoken.vllm_plugin import make_simulated_engine
    from vtoken.vllm_plugin.hook_timer import timed_hooks

    outputs = steps + WARM_UP_STEPS + 2
    settings: dict[str, Any] = {"policy": "streaming_llm", "budget": BUDGET, "reclaim": reclaim}
    with timed_hooks(thread_time) as timer:
        engine = make_simulated_engine(
            VTokenConfig(**settings),
            num_blocks=requests * -(-(PROMPT + outputs) // 16),
            max_model_len=PROMPT + outputs,
            max_num_seqs=requests,
            max_num_batched_tokens=requests * PROMPT,
        )
        for n in range(requests):
            engine.add_request(f"r{n}", [n % 1000] * PROMPT, outputs)
        for _ in range(WARM_UP_STEPS):
            engine.step()
        before = engine.snapshot()
        gc.collect()
        gc.freeze()  # as vLLM does when it has started: the collector's walks are no bookkeeping of ours
        spent: list[dict[str, float]] = []
        for _ in range(steps):
            timer.take()
            step = engine.step()
            spent.append(timer.take())
            if len(step.produced) != requests or sum(step.scheduled.values()) != requests:
                computed = sum(step.scheduled.values())
                raise RuntimeError(f"a step of {requests} requests computed {computed} tokens, not one for each")
        gc.unfreeze()
    after = engine.snapshot()
    figures: dict[str, Any] = {
        f"{name}_ms": 1e3 * statistics.median(one.get(payer, 0.0) for one in spent)
        for name, payer in {"hooks": "vtoken", "vllm": "vllm"}.items()
    }
    return {
        "mode": reclaim,
        "requests": requests,
        "repeat": repeat,
        "steps": steps,
        "tokens_evicted": after.tokens_evicted - before.tokens_evicted,
        **figures,
    }


def _over(runs: Sequence[Run], mode: str, requests: int, figure: str, times: float = 1.0) -> Interval:
    return interval([run[figure] * times for run in runs if (run["mode"], run["requests"]) == (mode, requests)])


def _growth(runs: Sequence[Run], mode: str, figure: str, few: int, many: int) -> float:
    """What a request costs among so many over what it costs among few."""
    return _over(runs, mode, many, figure, 1 / many).median / _over(runs, mode, few, figure, 1 / few).median


def _modes(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run["mode"] for run in runs))


def _sizes(runs: Sequence[Run]) -> list[int]:
    return sorted({run["requests"] for run in runs})


def _bars(spread: list[list[float]]) -> list[list[float]]:
    """The interval is the mean's, and may lie beside the median."""
    return [[max(length, 0.0) for length in side] for side in spread]
