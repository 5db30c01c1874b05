"""Who gives way when blocks run out, and how it comes back: docs/vllm-behaviour.md, "Preemption"."""

from behaviour import NEVER, STOCK, Driver, Kind, Start, every_kind, whole_kinds
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.request import RequestStatus


def crowded(start: Start, kind: Kind, **options: object) -> Driver:
    """Nine blocks: a grows by a block every 16 tokens and is never reduced, b was first 4 blocks, c waits for 4."""
    driver = start(kind, 10, **options)
    driver.add("a", 60, 60, budget=NEVER)
    driver.add("b", 60, 40)
    driver.step()
    driver.add("c", 60, 20)
    return driver


def until_preempted(driver: Driver) -> int:
    """Steps up to the one in which somebody gives way."""
    while not driver.steps[-1].preempted:
        driver.step()
        assert len(driver.steps) < 100
    return len(driver.steps)


@every_kind
class TestTheVictim:
    def test_is_the_last_that_runs(self, start: Start, kind: Kind) -> None:
        """When b needs a fifth block; or, where b makes do with three, when a needs a seventh."""
        driver = crowded(start, kind)
        b = driver.scheduler.requests["b"]
        assert until_preempted(driver) == (38 if kind.evicts else 6)
        assert driver.steps[-1].preempted == ["b"] and driver.steps[-1].scheduled == {"a": 1}
        assert driver.steps[-2].scheduled == {"a": 1, "b": 1}
        assert b.status == RequestStatus.PREEMPTED and b.num_computed_tokens == 0 and b.num_preemptions == 1

    def test_goes_to_the_head_of_the_queue(self, start: Start, kind: Kind) -> None:
        driver = crowded(start, kind)
        until_preempted(driver)
        assert driver.running == ["a"] and driver.waiting == ["b", "c"]

    def test_gives_all_its_blocks_back(self, start: Start, kind: Kind) -> None:
        driver = crowded(start, kind)
        until_preempted(driver)
        assert driver.blocks("b") == [] and driver.pool.get_num_free_blocks() == 9 - len(driver.blocks("a"))

    def test_comes_back_with_all_its_tokens(self, start: Start, kind: Kind) -> None:
        """Before c, although c would fit earlier; prompt and outputs are computed anew, and come out once."""
        driver = crowded(start, kind)
        until_preempted(driver)
        known = 60 + len(driver.delivered("b"))
        assert known == (97 if kind.evicts else 65)
        driver.run()
        back = next(did for did in driver.steps if did.resumed)
        assert back is driver.steps[60] and "a" in driver.steps[59].ended
        assert back.resumed == ["b"] and back.scheduled["b"] == known and back.hits["b"] == 0
        assert "c" in (driver.steps[61] if kind.evicts else back).new
        for req_id, outputs in {"a": 60, "b": 40, "c": 20}.items():
            assert driver.delivered(req_id) == driver.expected(req_id, 60, outputs)

    def test_is_named_to_the_worker_once(self, start: Start, kind: Kind) -> None:
        """Later b grows, and c has to go; where both make do with three blocks, nobody does."""
        driver = crowded(start, kind)
        driver.run()
        preempted = [req_id for did in driver.steps for req_id in did.preempted]
        assert preempted == (["b"] if kind.evicts else ["b", "c"])
        assert [req_id for did in driver.steps for req_id in did.resumed] == preempted

    def test_its_life_is_told(self, start: Start, kind: Kind) -> None:
        driver = crowded(start, kind)
        driver.run()
        events = [event.type for did in driver.steps if "b" in did.replies for event in did.replies["b"].events or ()]
        assert events == [
            EngineCoreEventType.QUEUED,
            EngineCoreEventType.SCHEDULED,
            EngineCoreEventType.PREEMPTED,
            EngineCoreEventType.SCHEDULED,
        ]

    def test_can_be_aborted_while_it_waits(self, start: Start, kind: Kind) -> None:
        driver = crowded(start, kind)
        until_preempted(driver)
        assert driver.abort("b") == ["b"] and driver.waiting == ["c"]
        steps = driver.run()
        assert "b" in steps[0].reported and not any("b" in did.scheduled for did in steps)
        assert driver.delivered("c") == driver.expected("c", 60, 20)


def three(start: Start, kind: Kind) -> Driver:
    """Twelve blocks, all taken by three prompts; the next token of each needs one more."""
    driver = start(kind, 13)
    for req_id in "abc":
        driver.add(req_id, 64, 40)
    return driver


@whole_kinds
def test_the_queue_keeps_the_order_of_arrival(start: Start, kind: Kind) -> None:
    driver = three(start, kind)
    driver.step()
    assert driver.step().scheduled == {"a": 1, "b": 1} and driver.waiting == ["c"]
    while driver.steps[-1].preempted != ["b"]:
        driver.step()
    assert len(driver.steps) == 34 and driver.waiting == ["b", "c"]
    driver.run()
    assert [did.resumed for did in driver.steps if did.resumed] == [["b", "c"]]


@every_kind
def test_with_a_budget_nobody_gives_way_in_the_same_pool(start: Start, kind: Kind) -> None:
    """On purpose: what each request will still take is known when it is admitted."""
    driver = three(start, kind)
    driver.run()
    preempted = [req_id for did in driver.steps for req_id in did.preempted]
    assert preempted == ([] if kind.evicts else ["c", "b"])
    for req_id in "abc":
        assert driver.delivered(req_id) == driver.expected(req_id, 64, 40)


@every_kind
def test_all_running_requests_can_be_reset(start: Start, kind: Kind) -> None:
    """They wait in the order of their arrival, before who waited already, and lose nothing but their blocks."""
    driver = start(kind, 20, seqs=2, caching=True)
    for req_id in "abc":
        driver.add(req_id, 60, 10)
    for _ in range(4):
        driver.step()
    assert not driver.scheduler.reset_prefix_cache() and driver.running == ["a", "b"]
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert driver.running == [] and driver.waiting == ["a", "b", "c"]
    assert driver.pool.get_num_free_blocks() == 19 and driver.hashed == []
    did = driver.step()
    assert did.resumed == ["a", "b"] and did.preempted == ["a", "b"]
    assert did.scheduled == {"a": 64, "b": 64} and did.hits == {"a": 0, "b": 0}
    driver.run()
    for req_id in "abc":
        assert driver.delivered(req_id) == driver.expected(req_id, 60, 10)


def test_the_scene_is_crowded_enough(start: Start) -> None:
    """With a block more b would not have given way then."""
    driver = start(STOCK, 11)
    driver.add("a", 60, 60)
    driver.add("b", 60, 40)
    for _ in range(6):
        driver.step()
    assert driver.steps[-1].preempted == []
