"""When a request ends, and what becomes of it: docs/vllm-behaviour.md, "Ends"."""

from collections import defaultdict

import pytest
from behaviour import Kind, Start, every_kind
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import RequestStatus

pytestmark = every_kind

ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]
TWICE = {"repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=2, min_count=2)}


class TestStop:
    @pytest.mark.parametrize(
        ("sampling", "eos", "said", "reason", "stop_reason"),
        [
            ({}, None, 8, "length", None),
            ({}, 13, 3, "stop", None),
            ({"ignore_eos": True}, 13, 8, "length", None),
            ({"stop_token_ids": [14, 15]}, None, 4, "stop", 14),
            ({"stop_token_ids": [14, 15], "ignore_eos": True}, 13, 4, "stop", 14),
            ({"stop_token_ids": [18]}, None, 8, "stop", 18),
        ],
        ids=["max_tokens", "eos", "eos ignored", "stop token", "stop token, eos ignored", "both at once"],
    )
    def test_at_the_token_that_says_so(
        self, start: Start, kind: Kind, sampling: dict, eos: int | None, said: int, reason: str, stop_reason: int | None
    ) -> None:
        driver = start(kind)
        driver.answers["a"] = ANSWER
        driver.add("a", 50, 8, sampling=sampling, eos=eos)
        driver.run()
        assert driver.delivered("a") == ANSWER[:said]
        last = driver.steps[said - 1]
        assert last.ended == {"a": reason} and last.replies["a"].stop_reason == stop_reason
        assert driver.steps[said].scheduled == {}

    def test_at_the_end_of_the_model(self, start: Start, kind: Kind) -> None:
        driver = start(kind)
        driver.add("a", 1020, 100)
        driver.run()
        assert driver.delivered("a") == driver.expected("a", 1020, 4)
        assert driver.steps[3].ended == {"a": "length"}

    @pytest.mark.parametrize(("at_least", "said"), [(0, 4), (6, 6)])
    def test_at_a_repetition_once_there_are_min_tokens(
        self, start: Start, kind: Kind, at_least: int, said: int
    ) -> None:
        driver = start(kind)
        driver.answers["a"] = [5, 6] * 10
        driver.add("a", 50, 20, sampling={"min_tokens": at_least, **TWICE})
        driver.run()
        assert driver.delivered("a") == ([5, 6] * 10)[:said]
        assert driver.steps[said - 1].ended == {"a": "repetition"}


class TestAfterwards:
    def test_blocks_are_free_at_once(self, start: Start, kind: Kind) -> None:
        driver = start(kind, 50)
        driver.add("a", 100, 2)
        driver.add("b", 100, 9)
        driver.step()
        held = len(driver.blocks("b"))
        assert held == (3 if kind.evicts else 7)
        assert driver.step().ended == {"a": "length"}
        assert driver.blocks("a") == [] and driver.pool.get_num_free_blocks() == 49 - held

    def test_the_worker_is_told_once_in_the_next_step(self, start: Start, kind: Kind) -> None:
        driver = start(kind)
        driver.add("a", 50, 2)
        driver.add("b", 50, 4)
        driver.run()
        assert driver.said("reported") == [[], [], ["a"], [], ["b"]]
        assert [list(ended) for ended in driver.said("ended")] == [[], ["a"], [], ["b"], []]

    def test_there_is_work_until_the_worker_has_been_told(self, start: Start, kind: Kind) -> None:
        driver = start(kind)
        driver.add("a", 50, 1)
        driver.step()
        assert not driver.scheduler.has_unfinished_requests()
        assert driver.scheduler.has_finished_requests() and driver.scheduler.has_requests()
        did = driver.step()
        assert did.scheduled == {} and did.reported == ["a"] and not driver.scheduler.has_requests()

    def test_nothing_is_left(self, start: Start, kind: Kind) -> None:
        driver = start(kind, 30, batched=70)
        for n in range(7):
            driver.add(f"r{n}", 20 * n + 1, 3 * n + 1)
        driver.run()
        assert driver.pool.get_num_free_blocks() == 29 and len(set(driver.free)) == 29
        assert driver.references(range(1, 30)) == [0] * 29
        assert not driver.scheduler.requests and not driver.running and not driver.waiting
        assert not driver.manager.req_to_blocks and not driver.manager.num_cached_block

    def test_the_id_can_be_used_again(self, start: Start, kind: Kind) -> None:
        """In the very step in which the worker is told of its end."""
        driver = start(kind)
        driver.add("a", 50, 2)
        driver.step()
        driver.step()
        driver.add("a", 30, 3)
        did = driver.step()
        assert did.reported == ["a"] and did.new == ["a"] and did.scheduled == {"a": 30}
        driver.run()
        assert driver.delivered("a") == driver.expected("a", 50, 2) + driver.expected("a", 30, 3)


class TestAbort:
    def test_frees_its_blocks_at_once(self, start: Start, kind: Kind) -> None:
        driver = start(kind, 50)
        for req_id in "ab":
            driver.add(req_id, 100, 9)
        driver.step()
        assert driver.abort("a") == ["a"]
        assert driver.running == ["b"] and "a" not in driver.scheduler.requests
        assert driver.pool.get_num_free_blocks() == 49 - len(driver.blocks("b"))
        did = driver.step()
        assert did.reported == ["a"] and did.scheduled == {"b": 1}

    def test_in_the_queue(self, start: Start, kind: Kind) -> None:
        driver = start(kind, seqs=1)
        for req_id in "abc":
            driver.add(req_id, 50, 2)
        driver.step()
        assert driver.abort("b") == ["b"] and driver.waiting == ["c"]
        assert [did.scheduled for did in driver.run()] == [{"a": 1}, {"c": 50}, {"c": 1}, {}]
        assert driver.said("reported") == [[], ["b"], ["a"], [], ["c"]]

    def test_of_a_prompt_half_computed(self, start: Start, kind: Kind) -> None:
        driver = start(kind, 50, batched=64)
        driver.add("a", 100, 9)
        driver.step()
        assert driver.abort("a") == ["a"] and driver.pool.get_num_free_blocks() == 49
        assert driver.run()[0].reported == ["a"]

    def test_while_it_is_computed(self, start: Start, kind: Kind) -> None:
        """What the worker brings for it afterwards is nobody's; the others have theirs."""
        driver = start(kind, 50)
        for req_id in "abc":
            driver.add(req_id, 100, 4)
        driver.step()
        did = driver.step(before_update=lambda: driver.abort("b"))
        assert did.scheduled == {"a": 1, "b": 1, "c": 1}
        assert list(did.tokens) == ["a", "c"] and did.ended == {}
        assert driver.pool.get_num_free_blocks() == 49 - len(driver.blocks("a")) - len(driver.blocks("c"))
        driver.run()
        assert [did.reported for did in driver.steps] == [[], [], ["b"], [], ["a", "c"]]

    def test_of_everybody(self, start: Start, kind: Kind) -> None:
        driver = start(kind, 50, seqs=2)
        for req_id in "abc":
            driver.add(req_id, 100, 9)
        driver.step()
        gone = driver.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        assert sorted(request.request_id for request in gone) == ["a", "b", "c"]
        assert driver.pool.get_num_free_blocks() == 49
        assert [did.reported for did in driver.run()] == [["a", "b", "c"]]

    def test_of_somebody_who_is_not_there(self, start: Start, kind: Kind) -> None:
        driver = start(kind)
        driver.add("a", 50, 1)
        driver.step()
        assert driver.abort("a", "x") == []
        assert [did.reported for did in driver.run()] == [["a"]]


class TestClients:
    def test_each_hears_of_its_own_requests(self, start: Start, kind: Kind) -> None:
        driver = start(kind)
        driver.add("a", 50, 2, client_index=0)
        driver.add("b", 50, 2, client_index=3)
        did = driver.step()
        heard = {client: [one.request_id for one in group.outputs] for client, group in did.clients.items()}
        assert heard == {0: ["a"], 3: ["b"]}

    def test_each_hears_of_its_own_ends(self, start: Start, kind: Kind) -> None:
        """Where several engines serve them, as ``include_finished_set`` has it."""
        driver = start(kind)
        driver.scheduler.finished_req_ids_dict = defaultdict(set)
        driver.add("a", 50, 2, client_index=0)
        driver.add("b", 50, 1, client_index=3)
        ends = [
            {client: group.finished_requests for client, group in did.clients.items() if group.finished_requests}
            for did in driver.run()
        ]
        assert ends == [{3: {"b"}}, {0: {"a"}}, {}]
