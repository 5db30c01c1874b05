"""Priority scheduling: who matters least is preempted, wherever it runs, and even in a step that had taken it in."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference_cache import S
from soak_driver import Soak
from stock_engine import StockEngine, watch
from stub_worker import StubEngine
from test_differential import the_same

MakeEngine = Callable[..., StubEngine]
PRIORITY = {"policy": "priority"}
UNREACHED = 10**6


def in_chunks(engine: StubEngine | StockEngine, tokens: int) -> None:
    engine.scheduler.scheduler_config.long_prefill_token_threshold = tokens


def preempted_in_its_own_step(make: MakeEngine, spoil: Callable[[StubEngine], None] = lambda engine: None) -> Any:
    """A's fourth part is scheduled when B, which matters more, finds no block: A gives up its place, and blocks."""
    engine = make(16, caching=True, seqs=8, batched=200, scheduling=PRIORITY)
    spoil(engine)
    in_chunks(engine, 40)
    engine.add("A", tokens=range(160), outputs=20, budget=UNREACHED, priority=1)
    engine.add("other", tokens=[3], outputs=1, budget=UNREACHED, priority=0)
    engine.step()
    engine.add("B", tokens=[40] * 80, outputs=20, budget=UNREACHED, priority=0)
    steps = [engine.step() for _ in range(3)]
    assert [sorted(step.output.num_scheduled_tokens) for step in steps] == [["A", "B"], ["A", "B"], ["B"]]
    assert steps[-1].output.preempted_req_ids == {"A"}
    return engine


class TestWhoIsPreemptedInTheStepThatHadTakenItIn:
    def test_nobody_finds_what_it_did_not_compute(self, make: MakeEngine) -> None:
        engine = preempted_in_its_own_step(make)
        engine.run()
        assert engine.runner.hits[-1] == ("A", 112)  # of 120 computed tokens; a fifth part of the rest was B's by then

    def test_without_that_it_is_found_out(self, make: MakeEngine) -> None:
        def spoil(engine: StubEngine) -> None:
            engine.manager.forget_uncomputed = lambda req_id, computed: None

        with pytest.raises(AssertionError, match="hold what their hash does not say"):
            preempted_in_its_own_step(make, spoil)


def test_the_one_that_matters_least_is_preempted(make: MakeEngine) -> None:
    """Not the last one, as it would be first come, first served."""
    for priorities, victim in (((0, 2, 1), "B"), ((2, 0, 1), "A"), ((1, 1, 1), "C")):
        engine = make(3 * 2 + 1, seqs=8, batched=200, scheduling=PRIORITY)
        for name, priority in zip("ABC", priorities, strict=True):
            engine.add(name, 2 * S - 2, outputs=20, budget=UNREACHED, priority=priority)
        victims = [req_id for _ in range(4) for req_id in engine.step().output.preempted_req_ids]
        assert victims == [victim]
        engine.run()


def test_requests_with_a_budget_preempt_nobody(make: MakeEngine) -> None:
    """Admission keeps what it promised, and takes the waiting ones by their priority."""
    engine = make(30, seqs=8, batched=200, scheduling=PRIORITY)
    rng = np.random.default_rng(0)
    for n in range(24):
        engine.add(f"r{n}", int(rng.integers(50, 150)), outputs=40, budget=48, priority=int(rng.integers(4)))
    priority = {req_id: request.priority for req_id, request in engine.scheduler.requests.items()}
    order = [priority[new.req_id] for step in engine.run() for new in step.output.scheduled_new_reqs]
    assert order == sorted(order) and len(order) == 24 and engine.preemptions == 0
    assert engine.scheduler.vtoken.stats.tokens_evicted > 24 * 40


def drive(engine: StubEngine | StockEngine, seed: int, budget: int | None = None) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 61, 120).tolist()
    steps = watch(engine.scheduler)
    in_chunks(engine, 20)
    for n in range(150):
        if n < 100 and rng.random() < 0.3:
            tokens = trunk[: rng.integers(0, 110)] + rng.integers(0, 61, int(rng.integers(1, 40))).tolist()
            outputs, priority = int(rng.integers(1, 50)), int(rng.integers(3))
            engine.add(f"r{n}", tokens=tokens, outputs=outputs, budget=budget, priority=priority)
        engine.step()
    engine.run()
    return steps


def forget_uncomputed(stock: StockEngine) -> None:
    """What vLLM leaves registered of a step that it takes back, and vtoken does not, would make all the difference."""
    scheduler, preempt = stock.scheduler, stock.scheduler._preempt_request
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers

    def preempt_request(request: Any, *args: Any, **kwargs: Any) -> None:
        uncomputed = manager.req_to_blocks[request.request_id][request.num_computed_tokens // S :]
        manager.block_pool.evict_blocks({block.block_id for block in uncomputed})
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = preempt_request


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "prefix cache"])
@pytest.mark.parametrize("num_blocks", [16, 31])
def test_where_nothing_is_evicted_every_step_is_vllm_s(
    make: MakeEngine, stub_model_config: Any, num_blocks: int, caching: bool
) -> None:
    stock = StockEngine(stub_model_config, num_blocks, 8, 80, caching, **PRIORITY)
    if caching:
        forget_uncomputed(stock)
    theirs = drive(stock, 0)
    ours = drive(make(num_blocks, seqs=8, batched=80, caching=caching, scheduling=PRIORITY), 0, budget=UNREACHED)
    the_same(ours, theirs)
    assert sum(len(step["preempted"]) for step in theirs) > 3
    first_come = drive(StockEngine(stub_model_config, num_blocks, 8, 80, caching), 0)
    with pytest.raises((AssertionError, ValueError)):
        the_same(ours, first_come)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_in_the_long_run(make: MakeEngine, seed: int) -> None:
    load = Soak(make, seed, ["sync", "early", "late"][seed % 3], **PRIORITY)
    in_chunks(load.engine, [13, 0, 33][seed % 3])
    seen = load.run(120)
    assert min(seen[name] for name in ("hits", "evicted", "reclaimed", "aborts")) > 0
    assert seen["preemptions"] > 0 or not load.crowded
