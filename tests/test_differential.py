"""With a budget that nobody reaches, our scheduler is vLLM's: the same blocks for the same requests, step by step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference_cache import S
from stock_engine import StockEngine, watch
from stub_worker import StubEngine

MakeEngine = Callable[..., StubEngine]
STEPS = 150
BATCHED = 80


def drive(engine: StubEngine | StockEngine, seed: int, budget: int | None = None) -> list[dict[str, Any]]:
    """Arrivals, aborts at every point, and prompts that share beginnings, all from a seed."""
    rng = np.random.default_rng(seed)
    trunks = [rng.integers(0, 61, 200).tolist() for _ in range(3)]
    steps = watch(engine.scheduler)

    def abort_some() -> None:
        living = sorted(engine.scheduler.requests)
        if rng.random() < 0.06 and living:
            engine.abort(str(rng.choice(living)))

    for _ in range(STEPS):
        for n in range(12):
            gone = f"r{n}" not in engine.scheduler.requests and not engine.in_flight(f"r{n}")
            if rng.random() < 0.04 and gone:
                shared, own = int(rng.integers(0, 150)), rng.integers(0, 61, int(rng.integers(1, 40))).tolist()
                tokens = trunks[rng.integers(3)][:shared] + own
                engine.add(f"r{n}", tokens=tokens, outputs=int(rng.integers(1, 50)), budget=budget)
        if rng.random() < 0.02:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step(before_update=abort_some)
        abort_some()
    engine.run()
    return steps


def the_same(steps: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    for n, (ours, theirs) in enumerate(zip(steps, stock, strict=True)):
        for name, value in theirs.items():
            assert ours[name] == value, f"step {n}: {name} differs"


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "prefix cache"])
class TestWhereNothingIsEvicted:
    @pytest.mark.parametrize("num_blocks", [16, 31, 200])
    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("mode", ["fill", "none"])
    def test_every_step_is_vllm_s(
        self, make: MakeEngine, stub_model_config: Any, mode: str, seed: int, num_blocks: int, caching: bool
    ) -> None:
        stock = StockEngine(stub_model_config, num_blocks, 8, BATCHED, caching)
        theirs = drive(stock, seed)
        engine = make(num_blocks, seqs=8, batched=BATCHED, caching=caching, reclaim=mode)
        the_same(drive(engine, seed, budget=10_000), theirs)
        preemptions = sum(len(step["preempted"]) for step in theirs)
        hits = sum(cached or 0 for step in theirs for *_, cached in step["outputs"])
        assert (preemptions > 0 or num_blocks == 200) and (hits > 0) == caching
        assert engine.scheduler.vtoken.stats.tokens_evicted == 0

    @pytest.mark.parametrize(
        "mode, lag, num_blocks, seed", [("fill", "early", 16, 3), ("fill", "late", 31, 4), ("none", "late", 16, 4)]
    )
    def test_every_step_is_vllm_s_when_results_come_late(
        self,
        make: MakeEngine,
        stub_model_config: Any,
        mode: str,
        lag: str,
        seed: int,
        num_blocks: int,
        caching: bool,
    ) -> None:
        stock = StockEngine(stub_model_config, num_blocks, 8, BATCHED, caching, asynchronous=True)
        theirs = drive(stock, seed)
        engine = make(num_blocks, seqs=8, batched=BATCHED, caching=caching, reclaim=mode, lag=lag)
        the_same(drive(engine, seed, budget=10_000), theirs)
        assert sum(len(step["preempted"]) for step in theirs) > 0
        assert (sum(cached or 0 for step in theirs for *_, cached in step["outputs"]) > 0) == caching
        assert engine.scheduler.vtoken.stats.tokens_evicted == 0

    @pytest.mark.parametrize("seed", range(2))
    def test_pack_differs_by_its_headroom_alone(
        self, make: MakeEngine, stub_model_config: Any, seed: int, caching: bool
    ) -> None:
        """While there is enough room for everybody, nothing does."""
        theirs = drive(StockEngine(stub_model_config, 200, 8, BATCHED, caching), seed)
        engine = make(200, seqs=8, batched=BATCHED, caching=caching, reclaim="pack", headroom=0.005)
        the_same(drive(engine, seed, budget=10_000), theirs)

    def test_a_budget_that_bites_is_seen(self, make: MakeEngine, stub_model_config: Any, caching: bool) -> None:
        theirs = drive(StockEngine(stub_model_config, 31, 8, BATCHED, caching), 0)
        ours = drive(make(31, seqs=8, batched=BATCHED, caching=caching), 0, budget=4 * S)
        with pytest.raises((AssertionError, ValueError)):
            the_same(ours, theirs)
