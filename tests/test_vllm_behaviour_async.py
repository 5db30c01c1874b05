"""A step is scheduled before the last one's result is known: docs/vllm-behaviour.md, "Async scheduling"."""

import functools
from typing import Any

import pytest
from behaviour import ASYNC, NEVER, Kind, Lagged, Start, prompt_of
from reference_cache import S

pytestmark = pytest.mark.parametrize("kind", ASYNC, ids=lambda kind: kind.name)

ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.fixture
def start(stub_model_config: Any) -> Start:
    return functools.partial(Lagged, stub_model_config)


@pytest.mark.parametrize("outputs", [1, 2, 3, 5])
def test_no_step_too_many_for_max_tokens(start: Start, kind: Kind, outputs: int) -> None:
    driver = start(kind)
    driver.add("a", 50, outputs)
    driver.run()
    assert sum(did.scheduled.get("a", 0) for did in driver.steps) == 50 + outputs - 1
    assert driver.delivered("a") == driver.expected("a", 50, outputs)


def test_one_step_too_many_where_a_token_ends_a_request(start: Start, kind: Kind) -> None:
    """What comes of it is nobody's, and its blocks are free as soon as the end is known."""
    driver = start(kind, 30)
    driver.answers["a"] = ANSWER
    driver.add("a", 50, 8, sampling={"stop_token_ids": [13]})
    driver.add("b", 50, 8)
    steps = [driver.step() for _ in range(4)]
    assert [list(did.scheduled) for did in steps] == [["a", "b"]] * 4
    assert steps[3].ended == {"a": "stop"} and driver.blocks("a") == []
    assert driver.pool.get_num_free_blocks() == 29 - len(driver.blocks("b"))
    driver.run()
    assert driver.delivered("a") == ANSWER[:3] and driver.delivered("b") == driver.expected("b", 50, 8)
    assert [did.reported for did in driver.steps[:6]] == [[], [], [], [], ["a"], []]


def test_an_abort_while_two_steps_are_under_way(start: Start, kind: Kind) -> None:
    driver = start(kind, 30)
    for req_id in "ab":
        driver.add(req_id, 50, 6)
    driver.step()
    did = driver.step(before_update=lambda: driver.abort("a"))
    assert list(did.scheduled) == ["a", "b"] and list(did.tokens) == ["b"]
    assert driver.blocks("a") == [] and driver.step().reported == ["a"]
    driver.run()
    assert driver.delivered("a") == [] and driver.delivered("b") == driver.expected("b", 50, 6)


def test_who_gives_way_keeps_the_token_that_is_under_way(start: Start, kind: Kind) -> None:
    driver = start(kind, 10)
    driver.add("a", 60, 60, budget=NEVER)
    driver.add("b", 60, 40)
    while not driver.steps or not driver.steps[-1].preempted:
        driver.step()
    assert driver.steps[-1].preempted == ["b"] and list(driver.steps[-1].tokens) == ["a", "b"]
    known = 60 + len(driver.delivered("b"))
    driver.run()
    back = next(did for did in driver.steps if did.resumed)
    assert back.scheduled["b"] == known
    for req_id, outputs in {"a": 60, "b": 40}.items():
        assert driver.delivered(req_id) == driver.expected(req_id, 60, outputs)


def test_a_reset_drops_what_is_under_way(start: Start, kind: Kind) -> None:
    """It is computed anew, in the order of arrival, and nothing comes out twice."""
    driver = start(kind, 30, caching=True)
    for req_id in "ab":
        driver.add(req_id, 60, 8)
    for _ in range(3):
        driver.step()
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    did = driver.step()
    assert did.resumed == ["a", "b"] and did.scheduled == {"a": 62, "b": 62} and did.tokens == {}
    driver.run()
    for req_id in "ab":
        assert driver.delivered(req_id) == driver.expected(req_id, 60, 8)


def test_prompts_share_blocks_in_the_same_step_and_in_the_next_turn(start: Start, kind: Kind) -> None:
    driver, trunk = start(kind, 60, caching=True), prompt_of("trunk", 81)
    driver.add("a", trunk, 40)
    driver.add("b", trunk, 40)
    assert driver.step().hits == {"a": 0, "b": 5 * S}
    driver.run()
    turn = [*trunk, *driver.delivered("a"), 1]
    driver.add("c", turn, 2, budget=NEVER)
    assert driver.step().hits == {"c": (5 if kind.evicts else 7) * S}
    driver.run()
