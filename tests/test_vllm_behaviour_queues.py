"""Who waits for what, and what is told of it: docs/vllm-behaviour.md, "Queues"."""

from typing import Any

import pytest
from behaviour import NEVER, Driver, Kind, Start, every_kind
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

pytestmark = every_kind

REGEX = {"structured_outputs": StructuredOutputsParams(regex="a+")}


class Grammar:
    """Takes every token but those that it does not."""

    def __init__(self, *refused: int) -> None:
        self.refused = set(refused)

    def accept_tokens(self, req_id: str, tokens: list[int]) -> bool:
        return not self.refused & set(tokens)

    def is_terminated(self) -> bool:
        return False


class TestCounts:
    def test_of_who_runs_and_who_waits(self, start: Start, kind: Kind) -> None:
        driver = start(kind, seqs=2)
        for n in range(3):
            driver.add(f"r{n}", 50, n + 1)
        assert driver.scheduler.get_request_counts() == (0, 3)
        driver.run()
        stats = [(did.stats.num_running_reqs, did.stats.num_waiting_reqs) for did in driver.steps]
        assert stats == [(1, 1), (1, 0), (1, 0), (0, 0), (0, 0)]

    def test_of_who_is_not_finished(self, start: Start, kind: Kind) -> None:
        driver = start(kind, seqs=2)
        for n in range(4):
            driver.add(f"r{n}", 50, 3)
        left = [driver.scheduler.get_num_unfinished_requests()]
        driver.step()
        for n in range(4):
            driver.abort(f"r{n}")
            left.append(driver.scheduler.get_num_unfinished_requests())
        assert left == [4, 3, 2, 1, 0] and not driver.scheduler.has_unfinished_requests()


class TestPause:
    def test_of_new_requests(self, start: Start, kind: Kind) -> None:
        """Who runs goes on; nobody is admitted, and who waits does not count as work."""
        driver = start(kind)
        driver.add("a", 50, 3)
        driver.step()
        driver.add("b", 50, 2)
        driver.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        assert driver.scheduler.get_num_unfinished_requests() == 1
        assert [did.scheduled for did in driver.run()] == [{"a": 1}, {"a": 1}, {}]
        assert driver.waiting == ["b"] and not driver.scheduler.has_requests()
        driver.scheduler.set_pause_state(PauseState.UNPAUSED)
        assert [did.scheduled for did in driver.run()] == [{"b": 50}, {"b": 1}, {}]

    def test_of_everybody(self, start: Start, kind: Kind) -> None:
        driver = start(kind)
        driver.add("a", 50, 3)
        driver.step()
        held = driver.blocks("a")
        driver.add("b", 50, 2)
        driver.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert driver.scheduler.get_num_unfinished_requests() == 0
        assert driver.step().scheduled == {} and driver.blocks("a") == held
        driver.scheduler.set_pause_state(PauseState.UNPAUSED)
        assert [did.scheduled for did in driver.run()] == [{"a": 1, "b": 50}, {"a": 1, "b": 1}, {}]
        assert driver.delivered("a") == driver.expected("a", 50, 3)


class TestGrammars:
    def waiting_for_one(self, start: Start, kind: Kind) -> tuple[Driver, Request]:
        driver = start(kind, seqs=2)
        request = driver.add("a", 50, 3, sampling=REGEX)
        for req_id in "bc":
            driver.add(req_id, 50, 4)
        return driver, request

    def test_a_request_waits_for_its_grammar(self, start: Start, kind: Kind) -> None:
        """Others overtake it meanwhile, and it keeps its place."""
        driver, request = self.waiting_for_one(start, kind)
        assert request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        did = driver.step()
        assert did.scheduled == {"b": 50, "c": 50} and not did.output.has_structured_output_requests
        assert (did.stats.num_waiting_reqs, did.stats.num_skipped_waiting_reqs) == (0, 1)
        driver.add("d", 50, 2)
        request.structured_output_request.grammar = Grammar()
        driver.run()
        assert [did.new for did in driver.steps if did.new] == [["b", "c"], ["a", "d"]]
        assert driver.steps[4].output.has_structured_output_requests
        assert driver.delivered("a") == driver.expected("a", 50, 3)

    def test_a_grammar_that_does_not_compile_ends_its_request(self, start: Start, kind: Kind) -> None:
        driver, request = self.waiting_for_one(start, kind)
        request.structured_output_request.grammar = ValueError("no grammar")
        did = driver.step()
        assert did.ended == {"a": "error"} and did.scheduled == {"b": 50, "c": 50}
        assert next(did.reported for did in driver.run()) == ["a"]

    def test_a_token_that_its_grammar_refuses_ends_a_request(self, start: Start, kind: Kind) -> None:
        driver, request = self.waiting_for_one(start, kind)
        driver.answers["a"] = [7, 8, 9]
        request.structured_output_request.grammar = Grammar(8)
        driver.step()
        did = driver.step()
        assert did.ended == {"a": "error"} and driver.blocks("a") == []
        driver.run()
        assert driver.delivered("b") == driver.expected("b", 50, 4)

    def test_it_can_be_aborted_while_it_waits(self, start: Start, kind: Kind) -> None:
        driver, _ = self.waiting_for_one(start, kind)
        driver.step()
        assert driver.abort("a") == ["a"]
        assert next(did.reported for did in driver.run()) == ["a"]
        assert driver.steps[-1].stats.num_skipped_waiting_reqs == 0


def test_a_prompt_that_arrives_in_parts(start: Start, kind: Kind) -> None:
    """On purpose: vLLM keeps the session for what is still to come, with vtoken it is refused."""
    driver = start(kind)
    driver.add("a", 20, 1, resumable=True)
    assert driver.step().ended == {"a": "length" if kind.budget is None else "error"}
    assert ("a" in driver.scheduler.requests) == (kind.budget is None)


class TestPriority:
    """The smaller number first, then who came first."""

    def add(self, driver: Driver, req_id: str, priority: int, arrival: float, **request: Any) -> None:
        driver.add(req_id, 60, 60, priority=priority, arrival_time=arrival, **request)

    def test_orders_the_queue(self, start: Start, kind: Kind) -> None:
        driver = start(kind, policy="priority", seqs=3)
        for req_id, priority, arrival in (("a", 1, 3.0), ("b", 2, 1.0), ("c", 1, 2.0), ("d", 0, 4.0)):
            self.add(driver, req_id, priority, arrival)
        assert driver.waiting == ["d", "c", "a", "b"]
        assert list(driver.step().scheduled) == ["d", "c", "a"]

    @pytest.mark.parametrize("same", [False, True], ids=["the largest number", "the last to come"])
    def test_says_who_gives_way(self, start: Start, kind: Kind, same: bool) -> None:
        """Also if it has its token in this step already."""
        driver = start(kind, 10, policy="priority")
        self.add(driver, "b", 0 if same else 5, 1.0)
        driver.step()
        self.add(driver, "a", 0, 0.5, budget=NEVER)
        while not driver.steps[-1].preempted:
            driver.step()
            assert len(driver.steps) < 60
        assert driver.steps[-1].preempted == ["b"] and driver.steps[-1].scheduled == {"a": 1}
        assert driver.steps[-2].scheduled == {"b": 1, "a": 1}
        driver.run()
        for req_id in "ab":
            assert driver.delivered(req_id) == driver.expected(req_id, 60, 60)
