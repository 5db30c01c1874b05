"""Long random runs with a prefix cache, on pools that are too small: all checks of the stub engine after every step."""

import os
import time
from collections import Counter
from collections.abc import Callable

import pytest
from soak_driver import Soak
from stub_worker import StubEngine

MakeEngine = Callable[..., StubEngine]
SECONDS = float(os.environ.get("VTOKEN_SOAK_SECONDS", "0"))
LAGS = ("sync", "early", "late")
FIRST_SEED = int(os.environ.get("VTOKEN_SOAK_SEED", "1000"))


def soak(make: MakeEngine, seed: int, steps: int, lag: str = "sync", policy: str = "fcfs") -> Soak:
    load = Soak(make, seed, lag, policy=policy)
    try:
        seen = load.run(steps)
    except BaseException as error:
        error.add_note(f"soak: VTOKEN_SOAK_SEED={seed} ({lag}, {policy}, lazy copies: {load.lazy}) {load.options}")
        raise
    assert min(seen[name] for name in ("requests", "hits", "evicted", "reclaimed")) > 0, (seed, seen)
    return load


@pytest.mark.parametrize("seed", range(16))
def test_nothing_is_lost_in_the_long_run(make: MakeEngine, seed: int) -> None:
    load = soak(make, seed, steps=200)
    assert load.seen["preemptions"] > 0 or not load.crowded


@pytest.mark.parametrize("seed", range(100, 110))
def test_nothing_is_lost_when_results_come_late(make: MakeEngine, seed: int) -> None:
    soak(make, seed, steps=150, lag=LAGS[1 + seed % 2])


@pytest.mark.skipif(not SECONDS, reason="takes as long as one likes: make soak")
def test_for_a_given_time(make: MakeEngine) -> None:
    """`make soak`: seeds from VTOKEN_SOAK_SEED on, for VTOKEN_SOAK_SECONDS; a failure names its seed."""
    end, seed, total = time.monotonic() + SECONDS, FIRST_SEED, Counter[str]()
    while time.monotonic() < end:
        total += soak(make, seed, steps=400, lag=LAGS[seed % 3], policy=("fcfs", "priority")[seed // 3 % 2]).seen
        seed += 1
    assert total["preemptions"] > 0
    print(f"\nsoak: seeds {FIRST_SEED} to {seed - 1}: {dict(total)}")
