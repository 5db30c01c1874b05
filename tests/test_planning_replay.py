"""`vtoken plan` on pools so small that everything can be computed by hand, and what holds on any pool."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.planning.replay import BY_BLOCKS, BY_NOTHING, BY_SEQUENCES, BY_TOKENS, Observed, replay
from vtoken.planning.step_time import StepTime
from vtoken.planning.summary import at_once, queue, series
from vtoken.planning.trace import Arrival, Workload
from vtoken.planning.variants import VARIANTS, Setting, make_engine

SECOND = StepTime(0, 0, 0, 0, bandwidth=1.0, flops=1.0, efficiency=1.0, overhead=1.0)
"""Each step takes a second."""
VTOKEN = {"policy": "streaming_llm", "budget": 8, "sinks": 1, "recent": 3}
# Ten blocks of four tokens. A prompt takes six of them, and with its eight outputs, the last of which is never computed
# upon, it comes to eight: there is no room for a second one, until the first is reduced to eight tokens.
TINY = Setting(
    VTOKEN,
    num_blocks=10,
    block_size=4,
    max_model_len=40,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    enable_prefix_caching=False,
    step_time=SECOND,
)
TWO = Workload([Arrival(0.0, 24, 8), Arrival(0.0, 24, 8)])


def run(variant: str, workload: Workload = TWO, setting: Setting = TINY) -> Observed:
    return replay(make_engine(setting, variant, workload), workload, setting.step_time)


class TestByHand:
    def test_native_holds_one(self) -> None:
        seen = run("native")
        assert list(seen.steps.running) == [1] * 16
        assert list(seen.steps.waiting) == [1] * 8 + [0] * 8
        assert list(seen.steps.held) == [6, 7, 7, 7, 7, 8, 8, 8] * 2
        assert list(seen.steps.end) == [float(second) for second in range(1, 17)]
        assert (seen.begun, seen.first_token, seen.ended) == ([0.0, 8.0], [1.0, 9.0], [8.0, 16.0])
        assert list(seen.steps.limited) == [BY_BLOCKS] * 8 + [BY_NOTHING] * 8

    def test_vtoken_holds_two(self) -> None:
        seen = run("fill")
        assert list(seen.steps.running) == [1, 2, 2, 2, 2, 2, 2, 2, 1]
        assert list(seen.steps.waiting) == [1] + [0] * 8
        assert list(seen.steps.held) == [6, 2 + 6, 4, 4, 4, 4, 4, 4, 2]
        assert (seen.begun, seen.first_token, seen.ended) == ([0.0, 1.0], [1.0, 2.0], [8.0, 9.0])

    def test_naive_eviction_frees_what_lies_between_the_sink_and_the_window(self) -> None:
        # Block 0 holds the sink. After the prompt three blocks are left, and each new block costs an old one later.
        seen = run("none")
        assert list(seen.steps.held) == [6, 4 + 6, 4 + 4, 3 + 4, 3 + 3, 4 + 3, 4 + 4, 3 + 4, 3]
        assert seen.ended == [8.0, 9.0]

    def test_victims_anywhere_free_next_to_nothing(self) -> None:
        scattered = replace(TINY, vtoken=VTOKEN | {"policy": "random"})
        assert run("fill", setting=scattered) == run("fill")
        assert sum(run("none", setting=scattered).steps.held) > sum(run("none").steps.held)

    def test_the_queue(self) -> None:
        figures = queue(run("native"), TWO)
        assert {name: figures[name] for name in ("requests", "finished", "failed", "output_tokens", "steps")} == {
            "requests": 2,
            "finished": 2,
            "failed": 0,
            "output_tokens": 16,
            "steps": 16,
        }
        assert (figures["seconds"], figures["output_tokens_per_s"], figures["preemptions"]) == (16.0, 1.0, 0)
        assert (figures["mean_running"], figures["mean_waiting"], figures["mean_held"]) == (1.0, 0.5, 58 / 8)
        assert (figures["peak_running"], figures["peak_waiting"], figures["peak_held"]) == (1, 1, 8)
        assert (figures["ttft_p50"], figures["queued_p50"], figures["tpot_p50"]) == (5.0, 4.0, 1.0)
        assert (figures["waits_for_blocks"], figures["waits_for_tokens"], figures["hit_rate"]) == (8.0, 0.0, 0.0)
        assert queue(run("fill"), TWO)["seconds"] == 9.0

    def test_how_many_fit(self) -> None:
        many = Workload(TWO.arrivals * 4)
        setting = TINY.limited_by_blocks_alone(8)
        assert (setting.max_num_seqs, setting.max_num_batched_tokens) == (8, 64)
        native, vtoken = (at_once(run(variant, many, setting)) for variant in ("native", "fill"))
        assert native == {"requests": 8, "mean_running": 1.0, "peak_running": 1, "preemptions": 0, "failed": 0}
        # One more in each step while six blocks are free beside two for each that runs: three of them, at most.
        assert (vtoken["peak_running"], vtoken["preemptions"]) == (3, 0)
        assert vtoken["mean_running"] > 2.4

    def test_nobody_waits_where_all_fit(self) -> None:
        assert at_once(run("native", Workload(TWO.arrivals[:1])))["mean_running"] is None

    def test_a_blocked_step_is_told_from_a_full_one(self) -> None:
        assert run("native", setting=replace(TINY, max_num_seqs=1)).steps.limited[0] == BY_SEQUENCES
        assert run("native", setting=replace(TINY, max_num_batched_tokens=20)).steps.limited[0] == BY_TOKENS
        for limit, name in (({"max_num_seqs": 1}, "sequences"), ({"max_num_batched_tokens": 20}, "tokens")):
            assert queue(run("native", setting=replace(TINY, **limit)), TWO)[f"waits_for_{name}"] > 0


class TestClock:
    def test_a_request_that_arrives_later_begins_with_the_next_step(self) -> None:
        workload = Workload([TWO.arrivals[0], replace(TWO.arrivals[1], time=2.5)])
        seen = run("fill", workload)
        assert (seen.begun, seen.first_token, seen.ended) == ([0.0, 3.0], [1.0, 4.0], [8.0, 11.0])

    def test_while_nobody_is_there_no_step_is_taken(self) -> None:
        seen = run("native", Workload([TWO.arrivals[0], replace(TWO.arrivals[1], time=1000.0)]))
        assert (seen.ended, len(seen.steps.end)) == ([8.0, 1008.0], 16)

    def test_long_steps_are_those_that_compute_or_attend_much(self) -> None:
        time = StepTime(0, 1, 0, 0, bandwidth=1.0, flops=1.0, efficiency=1.0, overhead=0.0)
        one, setting = Workload(TWO.arrivals[:1]), replace(TINY, step_time=time)
        assert list(run("native", one, setting).steps.seconds) == [float(24 + n) for n in range(8)]
        assert list(run("fill", one, setting).steps.seconds) == [24.0] + [8.0] * 7


class TestItCanTell:
    """Negative controls: what is slightly wrong gives other figures."""

    DIFFERENT = Workload([Arrival(0.0, 24, 8), Arrival(0.0, 24, 3), Arrival(4.0, 20, 5)])

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_two_arrivals_swapped(self, variant: str) -> None:
        first, second, third = self.DIFFERENT.arrivals
        seen, swapped = run(variant, self.DIFFERENT), run(variant, Workload([second, first, third]))
        assert sorted(seen.ended) != sorted(swapped.ended)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_an_arrival_or_a_clock_that_is_late(self, variant: str) -> None:
        seen = run(variant, self.DIFFERENT)
        *others, last = self.DIFFERENT.arrivals
        late = run(variant, Workload([*others, replace(last, time=15.0)]))
        assert late.ended != seen.ended
        shifted = run(variant, self.DIFFERENT, replace(TINY, step_time=replace(SECOND, overhead=1.25)))
        assert shifted.ended != seen.ended and shifted.now != seen.now

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_one_block_less(self, variant: str) -> None:
        many = Workload([Arrival(0.0, 24, 8)] * 6)
        fuller = replace(TINY, num_blocks=30, max_num_seqs=6, max_num_batched_tokens=160)
        assert run(variant, many, fuller).steps != run(variant, many, replace(fuller, num_blocks=29)).steps


class TestSeries:
    def test_few_steps_are_kept_as_they_are(self) -> None:
        steps = run("native").steps
        assert series(steps)["held"] == list(steps.held)
        assert series(steps)["seconds"] == list(steps.end)

    def test_no_peak_is_lost(self) -> None:
        steps = run("fill").steps
        found = series(steps, points=3)
        assert (len(found["seconds"]), max(found["held"]), max(found["running"])) == (3, 8, 2)
        assert found["seconds"][-1] == 9.0


class _Told:
    """Counts who has finished, and tells of everything else as the engine does."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.finished: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        step = self._engine.step()
        self.finished.update(list(step.finished))
        return step


def _arrivals(told: Sequence[tuple[float, int, int, int]]) -> Workload:
    """Requests with one of three beginnings, or none, in the order of their arrival."""
    found = [
        Arrival(time, prompt, outputs, tuple(range(head, head + -(-prompt // 512))) if head else ())
        for time, prompt, outputs, head in sorted(told)
    ]
    return Workload(found)


@settings(deadline=None, max_examples=30)
@given(
    told=st.lists(
        st.tuples(
            st.floats(0, 30, allow_nan=False), st.integers(1, 1100), st.integers(1, 40), st.sampled_from([0, 1, 2, 9])
        ),
        min_size=1,
        max_size=10,
    ),
    variant=st.sampled_from(list(VARIANTS)),
    policy=st.sampled_from(["random", "streaming_llm"]),
    caching=st.booleans(),
    num_blocks=st.sampled_from([36, 60]),
    batched=st.sampled_from([64, 1024]),
)
def test_every_request_ends_once_with_its_tokens_and_the_pool_is_empty_then(
    told: list[tuple[float, int, int, int]], variant: str, policy: str, caching: bool, num_blocks: int, batched: int
) -> None:
    workload = _arrivals(told)
    time = StepTime(100, 1, 10, 1, bandwidth=1e4, flops=1e6, efficiency=0.5, overhead=0.01)
    vtoken = {"policy": policy, "budget": 0.3}
    setting = Setting(vtoken, num_blocks, 32, 1152, 4, batched, caching, time)
    engine = _Told(make_engine(setting, variant, workload))
    seen = replay(engine, workload, time)  # type: ignore[arg-type]
    assert engine.finished == Counter(str(n) for n in range(len(told)))
    assert seen.produced == [arrival.outputs for arrival in workload.arrivals]
    assert (engine.held_blocks, engine.running, engine.waiting, seen.failed) == (0, 0, 0, 0)
    ends = [0.0, *seen.steps.end]
    assert all(before < after for before, after in pairwise(ends))
    assert all(0 <= held <= num_blocks for held in seen.steps.held)
    for arrival, *moments in zip(workload.arrivals, seen.begun, seen.first_token, seen.ended, strict=True):
        assert arrival.time <= moments[0] < moments[1] <= moments[2] <= seen.now
