"""Who is admitted, when: nobody waits for ever, and nobody is taken in who would push others out.

With prefix caching, on vLLM's real scheduler; the stub engine checks everything else after each step.
"""

from collections.abc import Callable

import numpy as np
import pytest
from stub_worker import S, StubEngine

MakeEngine = Callable[..., StubEngine]
REDUCTION = [("end", 512), ("chunked", 1), ("chunked", 7), ("chunked", 16), ("chunked", 33), ("chunked", 512)]
reduction = pytest.mark.parametrize(("prefill_evict", "prefill_chunk"), REDUCTION)


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, 61, length).tolist()


@reduction
@pytest.mark.parametrize("batched", [48, 4096])
def test_prompts_of_their_own_are_never_preempted(
    make: MakeEngine, prefill_evict: str, prefill_chunk: int, batched: int
) -> None:
    """Of blocks that nobody shares it is known how many each request will still take."""
    rng = np.random.default_rng(1)
    engine = make(20, seqs=8, batched=batched, caching=True, prefill_evict=prefill_evict, prefill_chunk=prefill_chunk)
    for n in range(12):
        tokens = prompt(rng, int(rng.integers(5, 150)))
        engine.add(f"r{n}", tokens=tokens, outputs=30, budget=int(rng.integers(20, min(90, len(tokens) + 30))))
    steps = engine.run(limit=3000)
    assert engine.preemptions == 0 and sum(step.report.evicted for step in steps) > 0
    assert max(len(step.output.num_scheduled_tokens) for step in steps) > 1


@reduction
def test_prompts_that_are_shared_come_to_an_end(make: MakeEngine, prefill_evict: str, prefill_chunk: int) -> None:
    """A request may keep blocks that were promised to be gone; then somebody is preempted, and not again and again."""
    rng = np.random.default_rng(2)
    trunk = prompt(rng, 6 * S)
    engine = make(22, seqs=8, caching=True, prefill_evict=prefill_evict, prefill_chunk=prefill_chunk)
    for n in range(16):
        tokens = trunk[: S * int(rng.integers(0, 7))] + prompt(rng, int(rng.integers(1, 60)))
        engine.add(f"r{n}", tokens=tokens, outputs=40, budget=int(rng.integers(20, 90)))
    engine.run(limit=3000)
    assert engine.preemptions <= 16
    assert any(hit for _, hit in engine.runner.hits)


@reduction
def test_everybody_is_preempted_again_and_again(make: MakeEngine, prefill_evict: str, prefill_chunk: int) -> None:
    """Every few steps; what they have computed is found in the cache, and they all come to their end."""
    rng = np.random.default_rng(3)
    engine = make(24, seqs=8, batched=64, caching=True, prefill_evict=prefill_evict, prefill_chunk=prefill_chunk)
    for n in range(6):
        engine.add(f"r{n}", tokens=prompt(rng, int(rng.integers(20, 150))), outputs=30, budget=50)
    for turn in range(600):
        if not engine.scheduler.has_requests():
            break
        if turn % 5 == 4 and turn < 100:
            while engine.scheduler.running:
                request = engine.scheduler.running.pop()
                engine.scheduler._preempt_request(request, 0.0)
        engine.step()
    engine.run(limit=1000)
    # One token per step fills no block between two of these preemptions.
    assert prefill_chunk == 1 or sum(hit > 0 for _, hit in engine.runner.hits) > 5


@reduction
def test_a_request_that_can_never_fit_ends_alone(make: MakeEngine, prefill_evict: str, prefill_chunk: int) -> None:
    engine = make(1 + 8, seqs=8, caching=True, prefill_evict=prefill_evict, prefill_chunk=prefill_chunk)
    engine.add("fits", tokens=[1] * 60, outputs=10, budget=40)
    engine.runner.broken = {"never"}
    engine.add("never", tokens=[2] * 300, outputs=10, budget=200)
    engine.add("fits too", tokens=[3] * 60, outputs=10, budget=40)
    ends = {req_id: reason for step in engine.run(limit=200) for req_id, reason in step.finished.items()}
    assert ends == {"fits": "length", "never": "error", "fits too": "length"}


def test_a_pool_full_of_cached_blocks_is_an_empty_pool(make: MakeEngine) -> None:
    engine = make(1 + 8, caching=True)
    for n in range(6):
        engine.add(f"r{n}", tokens=[n] * 120, outputs=5, budget=60)
        engine.run(limit=50)
    assert engine.preemptions == 0


def test_blocks_that_others_hold_need_no_room(make: MakeEngine) -> None:
    """Ten blocks: a holds seven, and b shares six of them, so there is room for its own and what it may grow to."""
    trunk = [n * 7 % 61 for n in range(6 * S)]
    engine = make(1 + 10, caching=True, policy="random")
    engine.add("a", tokens=[*trunk, 1, 2], outputs=30, budget=10**6)
    engine.step()
    engine.add("b", tokens=[*trunk, 3, 4], outputs=4, budget=30)
    step = engine.step()
    assert [new.req_id for new in step.output.scheduled_new_reqs] == ["b"]
    assert step.output.scheduled_new_reqs[0].num_computed_tokens == 6 * S
    assert len({*engine.block_ids("a"), *engine.block_ids("b")}) == 8
    engine.run()
    assert engine.preemptions == 0


def test_blocks_that_nobody_holds_do_need_room(make: MakeEngine) -> None:
    """b hits six cached blocks that nobody holds: with c running, they are not there for both."""
    trunk = [n * 7 % 61 for n in range(6 * S)]
    engine = make(1 + 10, caching=True)
    engine.add("a", tokens=[*trunk, 1, 2], outputs=2, budget=10**6)
    engine.run()
    engine.add("c", tokens=[9] * 50, outputs=10, budget=10**6)
    engine.step()
    engine.add("b", tokens=[*trunk, 3, 4], outputs=4, budget=100)
    step = engine.step()
    assert list(step.output.num_scheduled_tokens) == ["c"]
    engine.run()
    assert engine.preemptions == 0


@pytest.mark.parametrize("prefill_chunk", [16, 160, 512])
def test_a_part_that_is_longer_than_the_prompt_takes_no_more_room_than_it(make: MakeEngine, prefill_chunk: int) -> None:
    """Ten requests share ten blocks and take four each besides: they all run at once."""
    trunk = [n * 7 % 61 for n in range(10 * S)]
    engine = make(60, caching=True, prefill_evict="chunked", prefill_chunk=prefill_chunk)
    for n in range(10):
        engine.add(f"r{n}", tokens=[*trunk, *[n] * 5], outputs=30, budget=64)
    most = max(len(step.output.num_scheduled_tokens) for step in engine.run(limit=300))
    assert (most, engine.preemptions) == (10, 0)
