"""Who shares blocks keeps their holes for as long as it takes, and not longer."""

from collections.abc import Callable

import numpy as np
import pytest
from reference_cache import S, blocks_for
from stub_worker import LINGERING, StubEngine

from vtoken.vllm_plugin.read_only import LOOK_AGAIN

MakeEngine = Callable[..., StubEngine]
TRUNK = np.random.default_rng(5).integers(0, 61, 200).tolist()


def read_only(engine: StubEngine, req_id: str) -> int:
    table = engine.runner.vtoken.table
    return int(table.read_only[table.rows([req_id])[0]])


def sharing(make: MakeEngine, *, first: bool = False, **options: object) -> StubEngine:
    """Requests a and b share blocks with holes, and both decode; the sinks are all that lives in their first one."""
    engine = make(60, caching=True, shared_blocks="keep", **options)
    if first:
        engine.add("first", tokens=TRUNK[150:160], outputs=60, budget=500)
    for req_id in "ab":
        engine.add(req_id, tokens=TRUNK[:90] + [ord(req_id) % 61] * 17, outputs=60, budget=40)
    engine.step()
    assert [read_only(engine, req_id) for req_id in "ab"] == [2, 2]
    engine.step()
    return engine


class TestTheLastHolder:
    @pytest.mark.parametrize("in_the_step", [False, True])
    def test_leaves(self, make: MakeEngine, in_the_step: bool) -> None:
        engine = sharing(make)
        if in_the_step:
            engine.step(before_update=lambda: engine.abort("b"))
        else:
            engine.abort("b")
        for _ in range(LOOK_AGAIN):
            engine.step()
        assert read_only(engine, "a") == 0 and len(engine.block_ids("a")) == blocks_for(40)
        assert engine.pool.get_num_free_blocks() == 59 - blocks_for(40)
        engine.run()

    def test_leaves_also_if_it_missed_the_step(self, make: MakeEngine) -> None:
        """When b is gone, a is left out for a while."""
        engine = sharing(make, first=True)
        engine.abort("b")
        engine.scheduler.max_num_scheduled_tokens = 1
        for _ in range(3):
            assert list(engine.step().output.num_scheduled_tokens) == ["first"]
        engine.scheduler.max_num_scheduled_tokens = 10**5
        for _ in range(LINGERING):
            engine.step()
        assert read_only(engine, "a") == 0 and len(engine.block_ids("a")) == blocks_for(40)
        engine.run()


class TestWithoutRoom:
    def test_hashes_are_dropped_and_holes_filled_in_place(self, make: MakeEngine) -> None:
        """Request a holds all blocks, cached: nothing is granted, and its next owner finds nothing."""
        engine = make(1 + blocks_for(107), caching=True)
        engine.add("a", tokens=TRUNK[:107], outputs=3, budget=100)
        engine.step()
        assert read_only(engine, "a") == 0 and len(engine.block_ids("a")) == blocks_for(107)
        assert not any(block.block_hash for block in engine.pool.blocks[: 1 + 107 // S])
        engine.run()
        engine.add("b", tokens=TRUNK[:107], outputs=3, budget=100)
        engine.run()
        assert engine.runner.hits == [("a", 0), ("b", 0)]
