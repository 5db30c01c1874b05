"""What a request finds that others have computed: docs/vllm-behaviour.md, "Prefix cache"."""

from typing import Any

import pytest
from behaviour import NEVER, Driver, Kind, Start, every_kind, prompt_of
from reference_cache import S
from vllm.lora.request import LoRARequest

pytestmark = every_kind

TRUNK = prompt_of("trunk", 80)


def found(driver: Driver, req_id: str, tokens: list[int], **request: Any) -> int:
    """Tokens that this request, alone, takes from the cache."""
    driver.add(req_id, tokens, 2, **request)
    steps = driver.run()
    assert steps[0].scheduled[req_id] == len(tokens) - steps[0].hits[req_id]
    return steps[0].hits[req_id]


class TestHits:
    def test_whole_blocks_only(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        assert found(driver, "a", TRUNK + [1] * 10) == 0
        assert found(driver, "b", TRUNK[:70] + [2] * 20) == 4 * S
        assert found(driver, "c", TRUNK[:15] + [2] * 20) == 0
        assert found(driver, "d", [*TRUNK, 7]) == 5 * S

    def test_the_last_token_is_computed_in_any_case(self, start: Start, kind: Kind) -> None:
        """And with it all of its block."""
        driver = start(kind, caching=True)
        assert found(driver, "a", TRUNK) == 0
        assert found(driver, "b", TRUNK) == 4 * S

    def test_a_block_is_what_stands_before_it_as_well(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        found(driver, "a", TRUNK)
        assert found(driver, "b", [*TRUNK[:3], (TRUNK[3] + 1) % 61, *TRUNK[4:]]) == 0
        assert found(driver, "c", [*TRUNK[:20], (TRUNK[20] + 1) % 61, *TRUNK[21:]]) == S
        assert found(driver, "d", TRUNK[S:]) == 0

    def test_only_with_the_same_salt(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        assert found(driver, "a", TRUNK, cache_salt="one") == 0
        assert found(driver, "b", TRUNK, cache_salt="two") == 0
        assert found(driver, "c", TRUNK) == 0
        assert [found(driver, f"d{salt}", TRUNK, cache_salt=salt) for salt in ("one", "two", None)] == [4 * S] * 3

    def test_only_with_the_same_adapter(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        adapters = [LoRARequest("x", 1, "/x"), LoRARequest("y", 2, "/y"), LoRARequest("x", 1, "/moved"), None]
        for n, adapter in enumerate(adapters):
            assert found(driver, f"first {n}", TRUNK, lora_request=adapter) == 0
        for n, adapter in enumerate(adapters):
            assert found(driver, f"second {n}", TRUNK, lora_request=adapter) == 4 * S

    def test_of_a_prompt_in_the_same_step(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        driver.add("a", [*TRUNK, 1], 3)
        driver.add("b", [*TRUNK, 2], 3)
        did = driver.step()
        assert did.hits == {"a": 0, "b": 5 * S} and did.scheduled == {"a": 81, "b": 1}
        given = {new.req_id: new.block_ids[0] for new in did.output.scheduled_new_reqs}
        assert given["a"][:5] == given["b"][:5] and given["a"][5] != given["b"][5]
        driver.run()

    def test_of_what_was_generated(self, start: Start, kind: Kind) -> None:
        """Up to the first eviction: what is computed after it did not attend all that its hash would say."""
        driver = start(kind, caching=True)
        driver.add("a", TRUNK[:60], 40)
        driver.run()
        everything = TRUNK[:60] + driver.delivered("a")
        assert found(driver, "b", [*everything, 1], budget=NEVER) == (3 * S if kind.evicts else 6 * S)

    def test_of_what_was_generated_while_nothing_was_evicted(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        driver.add("a", TRUNK[:60], 40, budget=95 if kind.evicts else None)
        driver.run()
        everything = TRUNK[:60] + driver.delivered("a")
        assert found(driver, "b", [*everything, 1], budget=NEVER) == (5 * S if kind.evicts else 6 * S)

    @pytest.mark.parametrize("sampling", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 2}], ids=str)
    def test_not_for_who_asks_for_none(self, start: Start, kind: Kind, sampling: dict[str, Any]) -> None:
        """Or has to see the logits of its prompt; others find what it computes."""
        driver = start(kind, caching=True)
        found(driver, "a", TRUNK)
        assert found(driver, "b", TRUNK, sampling=sampling) == 0
        assert driver.steps[-3].stats.prefix_cache_stats.queries == 0
        driver.pool.evict_blocks(set(driver.hashed))
        assert found(driver, "c", TRUNK, sampling=sampling) == 0
        assert found(driver, "d", TRUNK) == 4 * S

    def test_not_with_caching_off(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=False)
        assert [found(driver, req_id, TRUNK) for req_id in "aba"] == [0, 0, 0]
        assert driver.hashed == []
        stats = [did.stats.prefix_cache_stats for did in driver.steps]
        assert {(one.requests, one.queries, one.hits) for one in stats} == {(0, 0, 0)}


class TestStats:
    def test_queries_and_hits_in_tokens(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        found(driver, "a", TRUNK)
        found(driver, "b", TRUNK[:70] + [1] * 20)
        stats = [did.stats.prefix_cache_stats for did in driver.steps]
        counted = [(one.requests, one.queries, one.hits) for one in stats]
        assert counted == [(1, 80, 0), (0, 0, 0), (0, 0, 0), (1, 90, 64), (0, 0, 0), (0, 0, 0)]
        cached = [did.replies[req_id].prefill_stats for did, req_id in ((driver.steps[0], "a"), (driver.steps[3], "b"))]
        assert [(one.num_prompt_tokens, one.num_cached_tokens) for one in cached] == [(80, 0), (90, 64)]

    def test_who_had_to_wait_is_counted_once(self, start: Start, kind: Kind) -> None:
        driver = start(kind, 10, caching=True)
        driver.add("a", TRUNK, 8, budget=NEVER)
        driver.step()
        driver.add("b", TRUNK + [1] * 60, 2, budget=NEVER)
        driver.run()
        stats = [did.stats.prefix_cache_stats for did in driver.steps]
        assert [(one.requests, one.queries, one.hits) for one in stats] == [
            (1, 80, 0),
            *[(0, 0, 0)] * 7,
            (1, 140, 80),
            *[(0, 0, 0)] * 2,
        ]

    def test_who_comes_back_is_counted_apart(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        driver.add("a", TRUNK, 9)
        for _ in range(3):
            driver.step()
        driver.scheduler._preempt_request(driver.scheduler.running.pop(), 0.0)
        stats = driver.step().stats.prefix_cache_stats
        assert (stats.requests, stats.queries, stats.hits) == (0, 0, 0)
        assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 83, 80)
        driver.run()
        assert driver.delivered("a") == driver.expected("a", 80, 9)


class TestReset:
    def test_is_refused_while_somebody_holds_a_block(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        driver.add("a", TRUNK, 3)
        driver.step()
        before = driver.hashed
        assert not driver.scheduler.reset_prefix_cache() and driver.hashed == before != []
        driver.run()
        assert found(driver, "b", TRUNK) == 4 * S

    def test_leaves_nothing_to_find(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        found(driver, "a", TRUNK)
        assert driver.hashed and driver.scheduler.reset_prefix_cache()
        assert driver.hashed == [] and found(driver, "b", TRUNK) == 0

    def test_without_a_connector_asks_none(self, start: Start, kind: Kind) -> None:
        driver = start(kind, caching=True)
        assert driver.scheduler.reset_prefix_cache(reset_connector=True)
