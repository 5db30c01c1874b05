"""Where blocks come from and where they go: docs/vllm-behaviour.md, "Blocks"."""

from behaviour import NEVER, SMALL, Driver, Kind, Start, every_kind, prompt_of, whole_kinds
from reference_cache import S, blocks_for
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens, make_block_hash_with_group_id

TRUNK = prompt_of("trunk", 80)


@every_kind
class TestHowMany:
    def test_as_many_as_a_request_s_tokens_need(self, start: Start, kind: Kind) -> None:
        """Those that it still has: after the prompt, no more than its budget."""
        driver = start(kind, batched=48)
        driver.add("a", 100, 30)
        held = []
        while driver.scheduler.has_unfinished_requests():
            driver.step()
            held.append(len(driver.blocks("a")))
        computed = [48, 96, *range(100, 129)]
        kept = [min(tokens, SMALL) if kind.evicts and tokens >= 100 else tokens for tokens in computed]
        assert held == [*map(blocks_for, kept), 0]

    def test_usage_is_the_share_that_is_held(self, start: Start, kind: Kind) -> None:
        """Of the blocks that can be: vLLM's own one does not count."""
        driver = start(kind, 21)
        assert driver.scheduler.get_kv_cache_usage() == 0.0
        driver.add("a", 100, 2)
        did = driver.step()
        assert did.stats.kv_cache_usage == driver.scheduler.get_kv_cache_usage() == 1 - (17 if kind.evicts else 13) / 20
        driver.run()
        assert driver.scheduler.get_kv_cache_usage() == 0.0

    def test_the_null_block_is_nobody_s(self, start: Start, kind: Kind) -> None:
        """Not even where the pool is exhausted and somebody is preempted."""
        driver = start(kind, 10, caching=True)
        driver.add("a", 60, 80, budget=NEVER)
        driver.add("b", 60, 40)
        preempted = False
        while driver.scheduler.has_requests():
            did = driver.step()
            preempted |= bool(did.preempted)
            given = [new.block_ids[0] for new in did.output.scheduled_new_reqs]
            given += [blocks[0] for blocks in did.output.scheduled_cached_reqs.new_block_ids if blocks]
            assert 0 not in {block for blocks in given for block in blocks}
            assert 0 not in {*driver.blocks("a"), *driver.blocks("b"), *driver.free, *driver.hashed}
        assert preempted and driver.pool.null_block.block_id == 0

    def test_one_holder_each_without_caching(self, start: Start, kind: Kind) -> None:
        driver = start(kind)
        for req_id in "abc":
            driver.add(req_id, TRUNK, 5)
        driver.step()
        held = [block for req_id in "abc" for block in driver.blocks(req_id)]
        assert len(held) == len(set(held)) == (9 if kind.evicts else 15)
        assert driver.references(held) == [1] * len(held)


@whole_kinds
class TestHashes:
    def test_full_blocks_are_registered_in_the_step_that_fills_them(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True, batched=40)
        driver.add("a", TRUNK[:60], 9)
        registered = []
        for _ in range(8):
            driver.step()
            registered.append(len(driver.hashed))
        assert registered == [2, 3, 3, 3, 3, 4, 4, 4]  # 40, 60, 61, 62, 63, 64 tokens
        assert driver.hashed == driver.blocks("a")[:4]

    def test_a_hash_is_of_the_parent_s_the_tokens_and_what_else_counts(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        driver.add("a", TRUNK[:40], 3, cache_salt="salt")
        driver.step()
        first = hash_block_tokens(sha256, None, TRUNK[:S], (("cache_salt", "salt"),))
        second = hash_block_tokens(sha256, first, TRUNK[S : 2 * S], None)
        wanted = [make_block_hash_with_group_id(one, 0) for one in (first, second)]
        assert [driver.pool.blocks[block].block_hash for block in driver.blocks("a")] == [*wanted, None]


def finished(start: Start, kind: Kind) -> Driver:
    """Ten blocks: a had 1 to 4, and b, which found three of them, took 5 beside them; both are over."""
    driver = start(kind, 11, caching=True)
    driver.add("a", TRUNK[:55], 1)
    driver.add("b", TRUNK[:48] + [1] * 5, 1)
    did = driver.step()
    given = [new.block_ids[0] for new in did.output.scheduled_new_reqs]
    assert given == [[1, 2, 3, 4], [1, 2, 3, 5]]
    return driver


@whole_kinds
class TestTheQueueOfFreeBlocks:
    def test_hits_are_held_by_both(self, start: Start, kind: Kind) -> None:
        driver = start(kind, 11, caching=True)
        driver.add("a", TRUNK[:55], 3)
        driver.add("b", TRUNK[:48] + [1] * 5, 2)
        driver.step()
        assert driver.references([1, 2, 3, 4, 5]) == [2, 2, 2, 1, 1] and driver.free == [6, 7, 8, 9, 10]
        assert driver.step().ended == {"b": "length"}
        assert driver.references([1, 2, 3, 4, 5]) == [1, 1, 1, 1, 0] and driver.free == [5, 6, 7, 8, 9, 10]

    def test_what_can_be_found_again_goes_last_a_request_s_tail_first(self, start: Start, kind: Kind) -> None:
        driver = finished(start, kind)
        assert driver.free == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1] and driver.hashed == [1, 2, 3]

    def test_a_hit_takes_its_blocks_out_of_it(self, start: Start, kind: Kind) -> None:
        """So that what it allocates beside them is never one of them."""
        driver = finished(start, kind)
        driver.add("c", TRUNK[:32] + [2] * 100, 2)
        driver.step()
        assert driver.blocks("c") == [1, 2, 5, 4, 6, 7, 8, 9, 10] and driver.free == [3]

    def test_the_longest_unused_goes_first(self, start: Start, kind: Kind) -> None:
        """A third request takes all ten in their order; what lay in them cannot be found any more."""
        driver = finished(start, kind)
        driver.add("c", prompt_of("c", 159), 2)
        driver.step()
        assert driver.blocks("c") == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1] and driver.free == []
        assert sorted(driver.hashed) == sorted(driver.blocks("c")[:9])
        driver.run()
        driver.add("d", TRUNK[:55], 1)
        assert driver.step().hits == {"d": 0}

    def test_a_request_loses_its_tail_first(self, start: Start, kind: Kind) -> None:
        driver = finished(start, kind)
        driver.add("c", prompt_of("c", 120), 1)
        assert driver.step().scheduled == {"c": 120} and driver.hashed[:2] == [1, 2]
        driver.add("d", TRUNK[:55], 1)
        assert driver.step().hits == {"d": 2 * S}

    def test_use_makes_young(self, start: Start, kind: Kind) -> None:
        """Of two finished requests, the one that was found again outlives the other."""
        driver = start(kind, 11, caching=True)
        for req_id in "abc":
            driver.add(req_id, prompt_of("ab"[req_id == "b"], 33), 1)
            driver.run()
        driver.add("d", prompt_of("d", 128), 1)  # eight blocks: six that nobody can find, and two of b's
        driver.run()
        for req_id, hit in (("a", 2 * S), ("b", 0)):
            driver.add(f"{req_id} again", prompt_of(req_id, 33), 1)
            assert driver.step().hits == {f"{req_id} again": hit}

    def test_who_does_not_fit_touches_nothing(self, start: Start, kind: Kind) -> None:
        driver = finished(start, kind)
        driver.add("c", prompt_of("c", 80), 5)
        driver.step()
        free = driver.free
        driver.add("d", TRUNK[:48] + [3] * 60, 2)  # three blocks are there, of the four others only two
        assert driver.step().scheduled == {"c": 1}
        assert driver.references([1, 2, 3]) == [0, 0, 0] and set(driver.free) < set(free)
        assert driver.hashed[:3] == [1, 2, 3]

    def test_the_same_content_in_two_blocks(self, start: Start, kind: Kind) -> None:
        """The second to fill a block keeps its own: block lists only grow. Either is found while it is there."""
        driver = start(kind, 11, caching=True)
        driver.add("a", TRUNK[:24], 10)
        driver.add("b", TRUNK[:24], 12)
        lists = []
        while not driver.steps or "a" not in driver.steps[-1].ended:
            driver.step()
            lists.append(driver.blocks("b"))
        assert lists == [[1, 3]] * 9 + [[1, 3, 5]]
        assert driver.hashed == [1, 2, 3]
        assert driver.pool.blocks[2].block_hash == driver.pool.blocks[3].block_hash
        everything = TRUNK[:24] + driver.delivered("a")[:9]
        driver.pool.evict_blocks({2})
        driver.add("c", [*everything, 1], 1)
        assert driver.step().hits == {"c": 2 * S}
