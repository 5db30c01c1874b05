"""Loads driven on a fake engine, whose steps take one second each: figures worked out by hand."""

import pytest
from fake_engine import FakeEngine

from vtoken.evaluation.bench.load import as_arguments, figures_of, run_load
from vtoken.evaluation.load import RunError, drive
from vtoken.evaluation.workloads import Workload


def load(count: int, prompt: int = 8, max_tokens: int = 3) -> list[Workload]:
    return [Workload(f"r{index}", [1] * prompt, max_tokens) for index in range(count)]


def test_a_closed_loop_sends_the_next_request_when_one_ends() -> None:
    engine = FakeEngine(block_size=4, num_blocks=100)
    found = drive(engine, load(3), concurrency=2, clock=engine.clock)
    # Two run for three steps, then the third one alone; nobody ever waits.
    assert [pool[2:] for pool in found.pool] == [(2, 0), (2, 0), (0, 0), (1, 0), (1, 0), (0, 0)]
    assert [(timing.submitted, timing.first, timing.last) for timing in found.timings] == [
        (0.0, 1.0, 3.0),
        (0.0, 1.0, 3.0),
        (3.0, 4.0, 6.0),
    ]
    assert (found.start, found.end, found.ended) == (0.0, 6.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_an_open_load_waits_for_the_pool() -> None:
    engine = FakeEngine(block_size=4, num_blocks=6)
    found = drive(engine, load(3), clock=engine.clock)
    assert [timing.submitted for timing in found.timings] == [0.0, 0.0, 0.0]
    assert [pool[3] for pool in found.pool] == [1, 1, 1, 0, 0, 0]


def test_figures() -> None:
    engine = FakeEngine(block_size=4, num_blocks=100)
    figures = figures_of(drive(engine, load(3), concurrency=2, clock=engine.clock), block_size=4)
    assert figures == {
        "requests": 3,
        "seconds": 6.0,
        "steps": 6,
        "step_ms": 1000.0,
        "output_tokens": 9,
        "output_tokens_per_s": 1.5,
        "tpot_ms": [1000.0, 1000.0, 1000.0],
        "tpot_p50_ms": 1000.0,
        "tpot_p95_ms": 1000.0,
        "ttft_ms": [1000.0, 1000.0, 1000.0],
        "ttft_p50_ms": 1000.0,
        "ttft_p95_ms": 1000.0,
        # After each step (held, live): (4, 16), (6, 18), (0, 0), (2, 8), (3, 9), (0, 0).
        "peak_blocks": 6,
        "mean_blocks": pytest.approx(15 / 6),
        "peak_running": 2,
        "mean_running": 1.0,
        "peak_waiting": 0,
        "waste_ratio": pytest.approx((0 + 6 / 24 + 0 + 3 / 12) / 4),
    }


def test_without_looking_there_is_no_pool_and_the_same_timing() -> None:
    engine = FakeEngine(block_size=4, num_blocks=100)
    found = drive(engine, load(3), concurrency=2, look=False, clock=engine.clock)
    assert found.pool == [] and found.end == 6.0
    assert "peak_blocks" not in figures_of(found, block_size=4)


def test_the_task_counts_from_its_own_start() -> None:
    engine = FakeEngine(block_size=4, num_blocks=6, keep=4)
    engine.evicted, engine.moved, engine.reclaimed = 100, 50, 10
    told = run_load(engine, as_arguments(load(2)), series=True, outputs=True)
    assert (told["tokens_evicted"], told["tokens_moved"], told["blocks_reclaimed"]) == (10, 10, 4)
    assert told["outputs"] == {"r0": [0, 0, 0], "r1": [0, 0, 0]}
    assert [step[1:] for step in told["series"]] == [[2, 8, 2, 0], [2, 8, 2, 0], [0, 0, 0, 0]]


def test_a_request_with_one_token_has_no_time_per_token() -> None:
    engine = FakeEngine(block_size=4, num_blocks=100)
    figures = figures_of(drive(engine, load(1, max_tokens=1), clock=engine.clock), block_size=4)
    assert (figures["tpot_ms"], figures["tpot_p95_ms"]) == ([], None)


@pytest.mark.parametrize("look", [True, False])
def test_a_load_that_cannot_be_scheduled_ends(look: bool) -> None:
    engine = FakeEngine(block_size=4, num_blocks=2)
    with pytest.raises(RunError, match="none of the 1 waiting requests can be scheduled"):
        drive(engine, load(1), look=look, clock=engine.clock)


def test_a_request_that_fails_ends_the_load() -> None:
    engine = FakeEngine(block_size=4, num_blocks=100, finish_reason="abort")
    with pytest.raises(RunError, match="request r0 ended early: abort"):
        drive(engine, load(1), clock=engine.clock)
