"""What a request finds in the prefix cache, with eviction on: what stock vLLM finds, less what its policy looks at."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference_cache import S
from stock_engine import StockEngine
from stub_copies import LazyCopyEngine
from stub_worker import StubEngine

MakeEngine = Callable[..., StubEngine]
READY = {"theta_f": 0.0, "low_watermark": 1.0, "check_interval": 1, "headroom": 0.05}
OUTPUTS, BUDGET = 7, 40

TRUNK = np.random.default_rng(5).integers(0, 61, 200).tolist()
PROMPTS = {
    "A": TRUNK[:75] + [1, 2, 3] * 10,  # 105 tokens, the first 75 of them the trunk's
    "B": TRUNK[:130] + [4, 5] * 8,  # 146
}
ORDERS = sorted(set(itertools.permutations("AAAB")))
UNSEEN = ["streaming_llm", "random", "key_norm", "tova"]
"""Policies that look at the last query at most, which every request computes itself anyway."""


def hits(engine: StubEngine | StockEngine, order: tuple[str, ...], together: bool) -> list[int]:
    """Tokens that each of these arrivals found, one after the other or each a few steps after the last."""
    for n, kind in enumerate(order):
        engine.add(f"{n}", tokens=PROMPTS[kind], outputs=OUTPUTS, budget=BUDGET)
        if together:
            for _ in range(3):
                engine.step()
        else:
            engine.run()
    engine.run()
    found = engine.hits if isinstance(engine, StockEngine) else engine.runner.hits
    assert [req_id for req_id, _ in found] == [f"{n}" for n in range(len(order))], "somebody was preempted"
    return [hit for _, hit in found]


@pytest.fixture(scope="module")
def stock(stub_model_config: Any) -> Callable[..., list[int]]:
    """What stock vLLM finds."""

    @functools.cache
    def find(order: tuple[str, ...], together: bool) -> list[int]:
        return hits(StockEngine(stub_model_config, 200, caching=True), order, together)

    return find


def engine_for(make: MakeEngine, policy: str, mode: str, **options: object) -> StubEngine:
    return make(200, caching=True, policy=policy, reclaim=mode, **(READY if mode == "pack" else {}), **options)


def evicts(engine: StubEngine) -> bool:
    return engine.scheduler.vtoken.stats.tokens_evicted >= 4 * (105 - BUDGET)


@pytest.mark.parametrize("order", ORDERS, ids="".join)
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
class TestInEveryOrder:
    @pytest.mark.parametrize("mode", ["fill", "pack", "none"])
    @pytest.mark.parametrize("policy", UNSEEN)
    def test_as_much_as_stock_vllm(
        self, make: MakeEngine, stock: Any, policy: str, mode: str, together: bool, order: tuple[str, ...]
    ) -> None:
        engine = engine_for(make, policy, mode)
        found = hits(engine, order, together)
        assert found == stock(order, together) and sum(found) > 0
        assert evicts(engine)

    @pytest.mark.parametrize("mode", ["fill", "pack", "none"])
    @pytest.mark.parametrize("policy", ["snapkv", "scissorhands", "h2o"])
    @pytest.mark.parametrize("window", [6, 27])
    def test_less_the_queries_that_are_looked_at(
        self,
        make: MakeEngine,
        stock: Any,
        window: int,
        policy: str,
        mode: str,
        together: bool,
        order: tuple[str, ...],
    ) -> None:
        engine = engine_for(make, policy, mode, observation_window=window, recent=max(window, 6))
        found = hits(engine, order, together)
        longest = [(len(PROMPTS[kind]) - window) // S * S for kind in order]
        assert found == [min(pair) for pair in zip(stock(order, together), longest, strict=True)]
        assert sum(found) > 0 and evicts(engine)


class TestHowMuchIsHit:
    """Placed by hand: the numbers that the comparison above must come out at."""

    @pytest.mark.parametrize("caching", [True, False])
    def test_the_same_prompt_twice(self, make: MakeEngine, caching: bool) -> None:
        """105 tokens are six whole blocks and nine tokens; the policy sees the last query."""
        engine = make(200, caching=caching)
        for req_id in "ab":
            engine.add(req_id, tokens=PROMPTS["A"], outputs=OUTPUTS, budget=BUDGET)
            engine.run()
        assert engine.runner.hits == [("a", 0), ("b", 96 if caching else 0)]

    @pytest.mark.parametrize(("window", "hit"), [(6, 80), (16, 80), (17, 64), (27, 64), (33, 48), (96, 0)])
    def test_a_window_that_reaches_into_the_hit(self, make: MakeEngine, window: int, hit: int) -> None:
        """96 tokens; recomputing the window costs whole blocks."""
        engine = engine_for(make, "snapkv", "fill", observation_window=window, recent=window)
        for req_id in "ab":
            engine.add(req_id, tokens=TRUNK[:96], outputs=8, budget=max(BUDGET, window + 3))
            engine.run()
        assert engine.runner.hits == [("a", 0), ("b", hit)]

    def test_h2o_that_wants_to_see_all_gets_nothing(self, make: MakeEngine) -> None:
        engine = engine_for(make, "h2o", "fill", policy_options={"whole_prompt": True})
        assert hits(engine, ("A", "A"), together=False) == [0, 0]

    @pytest.mark.parametrize(("budget", "hit"), [(40, 48), (64, 48), (65, 80), (96, 80), (97, 96), (200, 96)])
    def test_a_prompt_that_is_reduced_in_chunks(self, make: MakeEngine, budget: int, hit: int) -> None:
        """Whole blocks before the first multiple of 32 that the budget does not hold; there the prompt is reduced."""
        engine = make(200, caching=True, prefill_evict="chunked", prefill_chunk=32)
        engine.add("a", tokens=PROMPTS["A"], outputs=8, budget=500)
        engine.run()
        engine.add("b", tokens=PROMPTS["A"], outputs=8, budget=budget)
        engine.run()
        assert engine.runner.hits == [("a", 0), ("b", hit)]

    def test_without_an_effective_budget_nothing_is_held_back(self, make: MakeEngine) -> None:
        engine = engine_for(make, "snapkv", "fill", observation_window=27, recent=27)
        for req_id in "ab":
            engine.add(req_id, tokens=PROMPTS["A"], outputs=8, budget=500)
            engine.run()
        assert engine.runner.hits == [("a", 0), ("b", 96)]

    def test_what_was_generated_before_the_first_eviction_is_hit(self, make: MakeEngine) -> None:
        """A conversation: the next prompt begins with the last one and its answer, evicted long since."""
        engine = make(200, caching=True)
        engine.add("a", tokens=TRUNK[:40], outputs=60, budget=70)
        steps = engine.run()
        answer = [token for step in steps for token in step.tokens.get("a", [])]
        engine.add("b", tokens=TRUNK[:40] + answer, outputs=4, budget=70)
        engine.run()
        # The forward of the token at position 69 is the last one that attends all before it: 70 tokens, four blocks.
        assert engine.runner.hits == [("a", 0), ("b", 64)]


class TestSameVictims:
    """What a request forgets does not depend on what it found in the cache, nor on who shares its blocks."""

    @pytest.mark.parametrize("mode", ["fill", "pack", "none"])
    @pytest.mark.parametrize("policy", ["streaming_llm", "random", "key_norm", "tova", "snapkv", "scissorhands"])
    def test_with_hits_and_without(self, make: MakeEngine, policy: str, mode: str) -> None:
        options = {"observation_window": 6, "record_trace": True}

        def victims(together: bool, salted: bool) -> list[list[list[int]]]:
            engine = engine_for(make, policy, mode, **options)
            if salted:
                engine.manager.find_longest_cache_hit = lambda *args, **kwargs: (([],), 0)
            hits(engine, ("A", "B", "A"), together)
            assert (sum(hit for _, hit in engine.runner.hits) > 0) != salted
            traces = engine.runner.vtoken.take_traces()
            return [[taken for taken in traces[f"{n}"].incarnations[0].victims if taken] for n in range(3)]

        shared, alone, nothing = victims(True, False), victims(False, False), victims(True, True)
        assert shared == alone == nothing and all(shared)

    @pytest.mark.parametrize("policy", ["streaming_llm", "tova"])
    def test_late_copies_change_nothing(self, make: MakeEngine, policy: str) -> None:
        traces = []
        for lazy in (False, True):
            engine = engine_for(make, policy, "fill", record_trace=True)
            if lazy:
                engine.runner.use_copies(LazyCopyEngine)
            hits(engine, ("A", "A", "B"), together=True)
            traces.append(engine.runner.vtoken.take_traces())
        assert traces[0] == traces[1]
