"""Figures of a run, against values worked out by hand on a fake engine."""

from dataclasses import fields, replace

import pytest
from fake_engine import FakeEngine

from vtoken.evaluation.load import LoadProgress, RunError
from vtoken.evaluation.measure import RunResult, measure, median_of
from vtoken.evaluation.workloads import Workload

KEYS = """
peak_blocks mean_blocks waste_ratio tokens_evicted tokens_moved blocks_reclaimed peak_running mean_running
preemptions output_tokens output_tokens_per_s tpot_p50_ms tpot_p95_ms ttft_p50_ms ttft_p95_ms needle_hits
"""


def load(count: int, prompt: int = 8, max_tokens: int = 3) -> list[Workload]:
    return [Workload(f"r{index}", [1] * prompt, max_tokens) for index in range(count)]


def test_keys() -> None:
    assert [field.name for field in fields(RunResult)] == KEYS.split()


def test_three_requests_on_a_pool_for_two() -> None:
    # Full length 8 + 3 - 1 = 10 tokens = 3 blocks of 4. After each step, (held, live, running, waiting):
    # (4, 16, 2, 1), (6, 18, 2, 1), (0, 0, 0, 1), (2, 8, 1, 0), (3, 9, 1, 0), (0, 0, 0, 0).
    engine = FakeEngine(block_size=4, num_blocks=6)
    assert measure(engine, load(3), clock=engine.clock) == RunResult(
        peak_blocks=6,
        mean_blocks=pytest.approx(10 / 3),
        waste_ratio=pytest.approx((0 + 6 / 24 + 0 + 3 / 12) / 4),
        tokens_evicted=0,
        tokens_moved=0,
        blocks_reclaimed=0,
        peak_running=2,
        mean_running=pytest.approx(4 / 3),
        preemptions=0,
        output_tokens=9,
        output_tokens_per_s=pytest.approx(9 / 6),
        tpot_p50_ms=pytest.approx(1000),
        tpot_p95_ms=pytest.approx(1000),
        ttft_p50_ms=pytest.approx(1000),
        ttft_p95_ms=pytest.approx(3700),
        needle_hits=0,
    )


def test_evictions_count_from_the_start_of_the_run() -> None:
    engine = FakeEngine(block_size=4, num_blocks=6, keep=4)
    engine.evicted, engine.moved, engine.reclaimed = 100, 50, 10
    result = measure(engine, load(2), clock=engine.clock)
    # Each request: 8 tokens to 4 after the prompt, 5 to 4 after the second step; the third step ends it.
    assert (result.tokens_evicted, result.tokens_moved, result.blocks_reclaimed) == (10, 10, 4)
    assert (result.peak_blocks, result.waste_ratio) == (2, 0.0)


def test_a_load_that_never_waits_is_averaged_over_all_steps() -> None:
    engine = FakeEngine(block_size=4, num_blocks=100)
    result = measure(engine, load(2), clock=engine.clock)
    assert result.mean_running == pytest.approx((2 + 2 + 0) / 3)
    assert result.mean_blocks == pytest.approx((4 + 6 + 0) / 3)


def test_single_token_requests_have_no_time_per_token() -> None:
    engine = FakeEngine(block_size=4, num_blocks=100)
    result = measure(engine, load(2, max_tokens=1), clock=engine.clock)
    assert (result.tpot_p50_ms, result.ttft_p50_ms, result.output_tokens) == (0.0, 1000.0, 2)


def test_needles_count_in_no_other_figure() -> None:
    def answer(prompt: list[int]) -> list[int]:
        return [ord(digit) for digit in ("777" if prompt[0] == 7 else "000")]

    needles = [Workload("n7", [7] * 8, 6, ["777"]), Workload("n8", [8] * 8, 6, ["888", "889"])]
    plain, asked = (FakeEngine(4, 6, keep=4, answer=answer) for _ in range(2))
    without = measure(plain, load(3), clock=plain.clock)
    result = measure(asked, load(3), needles, decode=lambda ids: "".join(map(chr, ids)), clock=asked.clock)
    assert result == replace(without, needle_hits=1)


def test_progress_is_reported_after_every_step() -> None:
    engine = FakeEngine(block_size=4, num_blocks=6)
    seen: list[LoadProgress] = []
    measure(engine, load(2), report=seen.append, clock=engine.clock)
    assert seen == [LoadProgress(0, 2, 2, 4), LoadProgress(0, 4, 2, 6), LoadProgress(2, 6, 0, 0)]


def test_a_failed_request_ends_the_run() -> None:
    engine = FakeEngine(block_size=4, num_blocks=6, finish_reason="error")
    with pytest.raises(RunError, match=r"^request r0 ended early: error$"):
        measure(engine, load(1), clock=engine.clock)


def test_a_request_that_never_fits_ends_the_run() -> None:
    engine = FakeEngine(block_size=4, num_blocks=2)
    with pytest.raises(RunError, match="none of the 1 waiting requests can be scheduled"):
        measure(engine, load(1), clock=engine.clock)


def test_a_request_that_vanishes_ends_the_run() -> None:
    class Losing(FakeEngine):
        def step(self) -> list:
            return [entry for entry in super().step() if not entry.finished]

    engine = Losing(block_size=4, num_blocks=6)
    with pytest.raises(RunError, match=r"request r0 ended without a result \(2 in all\)"):
        measure(engine, load(2), clock=engine.clock)


def test_median_is_taken_per_figure() -> None:
    engine = FakeEngine(block_size=4, num_blocks=6)
    result = measure(engine, load(3), clock=engine.clock)
    runs = [
        replace(result, peak_blocks=blocks, output_tokens_per_s=speed)
        for blocks, speed in ((1, 3.0), (5, 1.0), (2, 2.0))
    ]
    assert median_of(runs) == replace(result, peak_blocks=2, output_tokens_per_s=2.0)
    assert isinstance(median_of(runs).peak_blocks, int)
    assert median_of(runs[:2]).peak_blocks == 3
    assert median_of([runs[0], runs[2]]).peak_blocks == 1.5
