"""Whatever a server does to a request, at every point around the step in which it leaves its cached blocks.

The stub engine checks every slot, reference and count after each step; here it is made sure that the points are met.
"""

from collections.abc import Callable

import pytest
from stub_copies import EagerCopyEngine, LazyCopyEngine
from stub_worker import S, StubEngine

from vtoken.vllm_plugin.compat import plan_of
from vtoken.vllm_plugin.read_only import LOOK_AGAIN

MakeEngine = Callable[..., StubEngine]
TRUNK = [n * 7 % 61 for n in range(6 * S)]
OWN = [5, 9, 2, 44, 17]
SHARERS = {"alone": 0, "shared": 1}
COPIES = {"eager": EagerCopyEngine, "lazy": LazyCopyEngine}

points = pytest.mark.parametrize("offset", [-1, 0, 1], ids=["before it", "in its step", "after it"])
shared = pytest.mark.parametrize("sharers", SHARERS.values(), ids=SHARERS)
timing = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)


def engine_with_a(make: MakeEngine, sharers: int, copies: type, outputs: int = 20, **options: object) -> StubEngine:
    """Request a computes its prompt in two steps; the second one reduces it, and it leaves its cached blocks."""
    engine = make(60, seqs=8, batched=4 * S, caching=True, policy="random", **options)
    engine.runner.use_copies(copies)
    for n in range(sharers):  # never reduced, so that a cannot leave what they share
        engine.add(f"keeper{n}", tokens=[*TRUNK[: 3 * S], 1 + n], outputs=60, budget=1000)
        engine.step()
    engine.add("a", tokens=[*TRUNK, *OWN], outputs=outputs, budget=40)
    return engine


def step_of_copy(sharers: int) -> int:
    """In which of its steps a copies out, from 0 on: a prompt whose beginning is there takes one step less."""
    return 0 if sharers else 1


def advance(engine: StubEngine, sharers: int, offset: int) -> None:
    """To just before the step so far from the one that copies out."""
    for _ in range(max(step_of_copy(sharers) + offset, 0)):
        engine.step()


def copies_out(step: object) -> bool:
    return "a" in plan_of(step.output).copy_out


@shared
@timing
def test_left_in_peace(make: MakeEngine, sharers: int, copies: type) -> None:
    engine = engine_with_a(make, sharers, copies)
    steps = [engine.step() for _ in range(step_of_copy(sharers) + 1)]
    assert [copies_out(step) for step in steps] == [False] * (len(steps) - 1) + [True]
    assert plan_of(steps[-1].output).copy_out["a"].keep == (3 if sharers else 0)
    engine.run()


@points
@shared
@timing
@pytest.mark.parametrize("reuse", [False, True], ids=["gone", "id used again"])
def test_aborted_between_result_and_update(
    make: MakeEngine, offset: int, sharers: int, copies: type, reuse: bool
) -> None:
    engine = engine_with_a(make, sharers, copies)
    advance(engine, sharers, offset)
    step = engine.step(before_update=lambda: engine.abort("a"))
    assert copies_out(step) == (max(step_of_copy(sharers) + offset, 0) == step_of_copy(sharers))
    if reuse:
        engine.add("a", tokens=[*TRUNK, *OWN[::-1]], outputs=12, budget=30)
    engine.run()


@points
@shared
@timing
@pytest.mark.parametrize("reuse", [False, True], ids=["gone", "id used again"])
def test_aborted_between_two_steps(make: MakeEngine, offset: int, sharers: int, copies: type, reuse: bool) -> None:
    engine = engine_with_a(make, sharers, copies)
    advance(engine, sharers, offset)
    engine.step()
    engine.abort("a")
    if reuse:
        engine.add("a", tokens=[*TRUNK, *OWN], outputs=12, budget=30)
    engine.run()


@shared
@timing
def test_finished_in_the_step_of_the_copy(make: MakeEngine, sharers: int, copies: type) -> None:
    engine = engine_with_a(make, sharers, copies, outputs=1)
    steps = [engine.step() for _ in range(step_of_copy(sharers) + 1)]
    assert copies_out(steps[-1]) and steps[-1].finished == {"a": "length"}
    engine.run()


@points
@shared
@timing
@pytest.mark.parametrize("times", [1, 2, 3])
def test_preempted_and_resumed_at_once_again_and_again(
    make: MakeEngine, offset: int, sharers: int, copies: type, times: int
) -> None:
    engine = engine_with_a(make, sharers, copies)
    advance(engine, sharers, offset)
    engine.step()
    for _ in range(times):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        step = engine.step()
        assert "a" in step.output.scheduled_cached_reqs.resumed_req_ids
    engine.run()


@points
@timing
def test_preempted_by_others_and_resumed_from_what_is_cached(make: MakeEngine, offset: int, copies: type) -> None:
    """The newest running request is preempted, and finds its own prompt in the cache when it comes back."""
    engine = engine_with_a(make, 0, copies)
    advance(engine, 0, offset)
    engine.step()
    scheduler = engine.scheduler
    request = scheduler.requests["a"]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    engine.step()
    life = [hit for req_id, hit in engine.runner.hits if req_id == "a"]
    assert life == [0, 4 * S if offset < 0 else 6 * S]
    engine.run()


@shared
@timing
@pytest.mark.parametrize("missed", [1, 3])
def test_left_out_of_the_steps_after_the_copy(make: MakeEngine, sharers: int, copies: type, missed: int) -> None:
    """Others come first in the queue and take all the tokens that a step may compute."""
    engine = engine_with_a(make, sharers, copies)
    for _ in range(step_of_copy(sharers) + 1):
        engine.step()
    scheduler = engine.scheduler
    scheduler.running.insert(0, scheduler.running.pop())
    engine.add("b", tokens=OWN * 4, outputs=30, budget=1000)
    scheduler.running.reverse()
    scheduler.max_num_scheduled_tokens = 1
    for _ in range(missed):
        engine.step()
    scheduler.max_num_scheduled_tokens = 10**5
    engine.run()


@timing
def test_the_last_holder_leaves_when_the_others_are_gone(make: MakeEngine, copies: type) -> None:
    engine = engine_with_a(make, 1, copies)
    engine.step()
    table, row = engine.runner.vtoken.table, int(engine.runner.vtoken.table.rows(["a"])[0])
    assert table.read_only[row] == 3 and engine.manager.ledger.read_only_blocks(["a"]).tolist() == [3]
    for _ in range(5):
        assert plan_of(engine.step().output).copy_out == {}
    engine.abort("keeper0")
    plans = [plan_of(engine.step().output) for _ in range(LOOK_AGAIN)]
    assert [plan.copy_out["a"].keep for plan in plans if plan.copy_out] == [0] and table.read_only[row] == 0
    assert len(engine.block_ids("a")) == -(-40 // S)
    engine.run()


@timing
@pytest.mark.parametrize("mode", ["smaller", "keep"])
def test_two_that_share_leave_together_where_that_takes_fewer_blocks(make: MakeEngine, copies: type, mode: str) -> None:
    """Twelve shared blocks and 40 tokens each: three blocks each are fewer."""
    trunk = TRUNK * 2
    engine = make(100, caching=True, policy="random", shared_blocks=mode)
    engine.runner.use_copies(copies)
    for n in range(2):
        engine.add(f"r{n}", tokens=[*trunk, n], outputs=30, budget=40)
    first, *later = [plan_of(engine.step().output) for _ in range(1 + LOOK_AGAIN)]
    assert first.read_only == {"r0": 12, "r1": 12}
    assert [sorted(plan.copy_out) for plan in later if plan.copy_out] == ([["r0", "r1"]] if mode == "smaller" else [])
    held = {block for n in range(2) for block in engine.block_ids(f"r{n}")}
    assert len(held) == 6 if mode == "smaller" else len(held) > 10
    engine.run()


def test_two_leave_later_once_their_copies_take_fewer_blocks(make: MakeEngine) -> None:
    """Twenty shared blocks, ten for each copy: no gain; as shared tokens die, each has more of its own already."""
    engine = make(100, caching=True, policy="random")
    for n in range(2):
        engine.add(f"r{n}", tokens=[n * n % 61 for n in range(20 * S)] + [n] * 5, outputs=120, budget=170)
    engine.step()
    assert engine.manager.ledger.read_only_blocks(["r0", "r1"]).tolist() == [20, 20]
    for _ in range(100):
        engine.step()
    assert engine.manager.ledger.read_only_blocks(["r0", "r1"]).tolist() == [0, 0]
    assert [len(engine.block_ids(f"r{n}")) for n in range(2)] == [-(-170 // S)] * 2
    engine.run()


@timing
def test_no_room_for_a_copy(make: MakeEngine, copies: type) -> None:
    """Seven blocks are all there is: their hashes go, and they are filled in place."""
    engine = make(1 + 7, caching=True, policy="random")
    engine.runner.use_copies(copies)
    engine.add("a", tokens=[*TRUNK, *OWN], outputs=8, budget=40)
    step = engine.step()
    assert plan_of(step.output).copy_out == {} and plan_of(step.output).read_only == {"a": 0}
    assert len(engine.block_ids("a")) == 3 and not any(block.block_hash for block in engine.pool.blocks)
    engine.run()
