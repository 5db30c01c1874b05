"""The checks of the stub engine with a prefix cache must be able to fail: each is shown a fault of its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reference_cache import S
from stub_copies import LazyCopyEngine
from stub_runner import StubRunner
from stub_worker import StubEngine

from vtoken.core.observed import NO_RUNS, AttendedQueries, QueryRuns

MakeEngine = Callable[..., StubEngine]
TRUNK = np.random.default_rng(5).integers(0, 61, 200).tolist()
READY = {"theta_f": 0.0, "low_watermark": 1.0, "check_interval": 1, "headroom": 0.05}


def two(make: MakeEngine, *, outputs: int = 12, **options: object) -> StubEngine:
    """Requests a and b share five blocks, and forget 68 tokens each in the first step."""
    engine = make(60, caching=True, **options)
    for req_id in "ab":
        engine.add(req_id, tokens=TRUNK[:90] + [ord(req_id) % 61] * 17, outputs=outputs, budget=40)
    return engine


def one(make: MakeEngine, **options: object) -> StubEngine:
    """Request a holds six cached blocks alone, and leaves them in the first step."""
    engine = make(60, caching=True, **options)
    engine.add("a", tokens=TRUNK[:107], outputs=12, budget=40)
    return engine


class TestContents:
    def test_without_a_fault(self, make: MakeEngine) -> None:
        for start in (one, two):
            engine = start(make)
            engine.run()
            assert engine.scheduler.vtoken.stats.tokens_evicted > 0
        assert engine.runner.hits == [("a", 0), ("b", 80)]

    def test_a_block_that_is_registered_after_an_eviction(self, make: MakeEngine) -> None:
        """Its token ids promise K/V that was computed with everything before it."""
        engine = make(60, caching=True)
        engine.manager.ledger.is_whole = lambda req_id: True
        engine.add("a", tokens=TRUNK[:60], outputs=20, budget=60)
        with pytest.raises(AssertionError, match=r"hold what their hash does not say|writes into a cached block"):
            engine.run()

    def test_a_false_hash_is_seen_by_who_hits_it(self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also if neither the block itself is looked at nor who writes it."""
        monkeypatch.setattr(StubEngine, "_check_cached_blocks", lambda self: None)
        monkeypatch.setattr(StubRunner, "_check_new_places", lambda *args: None)
        engine = make(60, caching=True, reclaim="none")
        engine.manager.ledger.is_whole = lambda req_id: True
        engine.add("a", tokens=TRUNK[:60], outputs=20, budget=60)
        steps = engine.run()
        answer = [token for step in steps for token in step.tokens.get("a", [])]
        engine.add("b", tokens=TRUNK[:60] + answer, outputs=3, budget=500)
        with pytest.raises(AssertionError, match=r"wrong K/V of \['b'\]"):
            engine.run()

    def test_one_number_of_a_cached_block_is_wrong(self, make: MakeEngine) -> None:
        engine = one(make)
        engine.run()
        (cached,) = [block for block in engine.pool.blocks if block.block_hash is not None][:1]
        engine.runner.cache[1, cached.block_id, 0, 3, 0] += 1
        with pytest.raises(AssertionError, match=rf"cached blocks \[{cached.block_id}\] hold what their hash does not"):
            engine.check()

    def test_a_victim_that_is_dropped(self, make: MakeEngine) -> None:
        """The worker forgets another token than the policy says."""
        engine = two(make)
        choose = engine.runner.vtoken._choose_victims

        def shifted(dying: Any) -> Any:
            victims = choose(dying).copy()
            victims[-1] += 1
            return victims

        engine.runner.vtoken._choose_victims = shifted
        with pytest.raises(AssertionError):
            engine.run()

    @pytest.mark.parametrize("policy", ["tova", "snapkv"])
    @pytest.mark.parametrize("fault", ["a sink", "recent"])
    def test_a_victim_that_is_protected(self, make: MakeEngine, policy: str, fault: str) -> None:
        engine = two(make, policy=policy, observation_window=6)
        choose = engine.runner.vtoken._choose_victims

        def spoiled(dying: Any) -> Any:
            victims = choose(dying).copy()
            victims[-1] = 0 if fault == "a sink" else engine.runner.vtoken.table.length[0] - 1
            return victims

        engine.runner.vtoken._choose_victims = spoiled
        with pytest.raises(AssertionError, match="a token was forgotten that is protected"):
            engine.run()


class TestWrites:
    def test_tokens_that_move_into_a_cached_block(self, make: MakeEngine) -> None:
        """The scheduler says that nothing is read-only, so holes are filled in place."""
        engine = one(make)
        engine.scheduler.vtoken._read_only._reduce_first = lambda *args: None
        with pytest.raises(AssertionError, match=r"tokens move into block \d+, which is cached or shared"):
            engine.run()

    def test_tokens_that_move_into_a_shared_block(self, make: MakeEngine) -> None:
        engine = two(make)
        engine.scheduler.vtoken._read_only._reduce_first = lambda *args: None
        engine.pool.evict_blocks({block.block_id for block in engine.pool.blocks})
        with pytest.raises(AssertionError, match=r"tokens move into block \d+, which is cached or shared"):
            engine.run()

    def test_a_new_token_in_a_shared_block(self, make: MakeEngine) -> None:
        """The worker forgets between two steps that leading blocks are read-only, and takes the lowest hole."""
        engine = two(make)
        engine.step()
        table = engine.runner.vtoken.table
        assert table.read_only[table.rows("ab")].tolist() == [2, 2]
        table.read_only[:] = 0
        with pytest.raises((AssertionError, ValueError)):
            engine.run()


class TestReferences:
    @pytest.mark.parametrize("start", [one, two])
    def test_one_that_leaks(self, make: MakeEngine, start: Any) -> None:
        engine = start(make)
        free = engine.pool.free_blocks
        engine.pool.free_blocks = lambda blocks: free(list(blocks)[1:])
        with pytest.raises(AssertionError, match="lost or doubled"):
            engine.run()

    @pytest.mark.parametrize("start", [one, two])
    def test_one_that_is_given_back_twice(self, make: MakeEngine, start: Any) -> None:
        engine = start(make)
        free = engine.pool.free_blocks

        def twice(blocks: Any) -> None:
            blocks = list(blocks)
            free(blocks)
            free(blocks[:1])

        engine.pool.free_blocks = twice
        with pytest.raises(AssertionError, match=r"lost or doubled|freed once too often"):
            engine.run()

    def test_a_shared_block_that_is_touched_once_too_often(self, make: MakeEngine) -> None:
        engine = two(make)
        touch = engine.pool.touch
        engine.pool.touch = lambda blocks: (touch(blocks), touch(blocks[:1]))
        with pytest.raises(AssertionError, match="references to a block were lost or doubled"):
            engine.run()


class TestReads:
    @pytest.mark.parametrize("mode", ["fill", "none", "pack"])
    @pytest.mark.parametrize("place", [0, 5])
    def test_a_live_mask_that_is_wrong_by_one(self, make: MakeEngine, mode: str, place: int) -> None:
        engine = two(make, reclaim=mode, **(READY if mode == "pack" else {}))
        engine.step()
        begin = engine.runner.recorder.begin

        def flipped(queries: AttendedQueries, table: Any) -> None:
            live = queries.live.copy()
            live[0, place] ^= True
            begin(replace(queries, live=live), table)

        engine.runner.vtoken._observer.begin = flipped
        with pytest.raises(AssertionError, match="reads other tokens than it should"):
            engine.step()

    @pytest.mark.parametrize("wrong", ["none", "one less", "a whole request"])
    def test_queries_that_the_backend_is_spared(self, make: MakeEngine, wrong: str) -> None:
        """One that is whole would have other attention than without us, if only in its last bits."""
        engine = make(40, caching=True)
        engine.add("a", tokens=TRUNK[:60], outputs=12, budget=40)
        engine.add("b", tokens=TRUNK[60:120], outputs=12, budget=500 if wrong == "a whole request" else 40)
        engine.step()
        begin = engine.runner.recorder.begin

        def spoilt(queries: AttendedQueries, table: Any) -> None:
            index = np.arange(2)
            everybody = QueryRuns(index, index, np.ones(2, dtype=np.int64), np.full(2, 61))
            spared = queries.spared
            changed = {
                "none": NO_RUNS,
                "one less": replace(spared, attended=spared.attended - 1),
                "a whole request": everybody,
            }
            begin(replace(queries, spared=changed[wrong]), table)

        engine.runner.vtoken._observer.begin = spoilt
        with pytest.raises(AssertionError, match="the backend is spared other queries"):
            engine.run()

    def test_copies_that_come_too_late(self, make: MakeEngine) -> None:
        """What a left its blocks for is in its own by the next step: by then another request has taken them."""
        engine = one(make)
        engine.runner.use_copies(LazyCopyEngine)
        engine.runner.vtoken.wait_for_copies = lambda: None
        engine.step()
        with pytest.raises(AssertionError, match=r"reads other tokens than it should|wrong K/V"):
            engine.step()


class TestSources:
    @pytest.mark.parametrize("late", [False, True])
    def test_a_source_that_somebody_else_takes(self, make: MakeEngine, late: bool) -> None:
        """a leaves cached blocks, which b takes in the very next step; there are no others."""
        engine = make(1 + 7 + 3, caching=True)
        engine.add("a", tokens=TRUNK[:107], outputs=12, budget=40)
        copies = engine.runner.use_copies(LazyCopyEngine)
        engine.step()
        assert engine.scheduler.vtoken.stats.tokens_moved > 0
        engine.add("b", tokens=TRUNK[150:] + TRUNK[: 6 * S - 50], outputs=1, budget=500)
        if late:
            engine.runner.vtoken.wait_for_copies = lambda: None
            update = engine.runner._update_states
            engine.runner._update_states = lambda output: (update(output), copies.wait())
            with pytest.raises(AssertionError, match=r"reads other tokens than it should|wrong K/V"):
                engine.step()
        else:
            assert [new.req_id for new in engine.step().output.scheduled_new_reqs] == ["b"]
            engine.run()
