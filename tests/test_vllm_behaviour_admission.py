"""Who is scheduled, in which order, and with how many tokens: docs/vllm-behaviour.md, "Order and budgets"."""

import pytest
from behaviour import Kind, Start, every_kind

pytestmark = every_kind


def test_first_come_first_served(start: Start, kind: Kind) -> None:
    driver = start(kind)
    for req_id in "bca":
        driver.add(req_id, 20, 5)
    assert driver.waiting == ["b", "c", "a"]
    assert list(driver.step().scheduled.items()) == [("b", 20), ("c", 20), ("a", 20)]
    assert driver.running == ["b", "c", "a"] and driver.waiting == []
    driver.add("d", 20, 5)
    assert list(driver.step().scheduled.items()) == [("b", 1), ("c", 1), ("a", 1), ("d", 20)]


def test_no_more_requests_run_than_max_num_seqs(start: Start, kind: Kind) -> None:
    driver = start(kind, seqs=2)
    for n, outputs in enumerate((2, 4, 3, 1)):
        driver.add(f"r{n}", 50, outputs)
    driver.run()
    assert [list(scheduled) for scheduled in driver.said("scheduled")] == [
        ["r0", "r1"],
        ["r0", "r1"],
        ["r1", "r2"],
        ["r1", "r2"],
        ["r2", "r3"],
        [],
    ]


def test_max_num_active_seqs_lowers_that(start: Start, kind: Kind) -> None:
    driver = start(kind, seqs=8, max_num_active_seqs=2)
    for n in range(3):
        driver.add(f"r{n}", 50, 2)
    assert [list(did.scheduled) for did in driver.run()] == [["r0", "r1"], ["r0", "r1"], ["r2"], ["r2"], []]


def test_the_token_budget_of_a_step(start: Start, kind: Kind) -> None:
    driver = start(kind, batched=80)
    for req_id in "abc":
        driver.add(req_id, 60, 3)
    driver.run()
    assert driver.said("scheduled") == [
        {"a": 60, "b": 20},
        {"a": 1, "b": 40, "c": 39},
        {"a": 1, "b": 1, "c": 21},
        {"b": 1, "c": 1},
        {"c": 1},
        {},
    ]


def test_max_num_scheduled_tokens_lowers_that(start: Start, kind: Kind) -> None:
    driver = start(kind, batched=80, max_num_scheduled_tokens=50)
    driver.add("a", 60, 2)
    driver.add("b", 60, 1)
    assert [did.scheduled for did in driver.run()] == [{"a": 50}, {"a": 10, "b": 40}, {"a": 1, "b": 20}, {}]


def test_running_requests_come_before_prompts(start: Start, kind: Kind) -> None:
    driver = start(kind, batched=20)
    driver.add("a", 10, 9)
    driver.step()
    driver.add("b", 50, 2)
    driver.add("c", 10, 1)
    driver.run()
    assert [list(scheduled.items()) for scheduled in driver.said("scheduled")[1:6]] == [
        [("a", 1), ("b", 19)],
        [("a", 1), ("b", 19)],
        [("a", 1), ("b", 12), ("c", 7)],
        [("a", 1), ("b", 1), ("c", 3)],
        [("a", 1)],
    ]


def test_a_prompt_in_chunks_answers_when_it_is_whole(start: Start, kind: Kind) -> None:
    driver = start(kind, batched=32)
    driver.add("a", 100, 2)
    driver.run()
    assert driver.said("scheduled") == [{"a": 32}, {"a": 32}, {"a": 32}, {"a": 4}, {"a": 1}, {}]
    assert [list(tokens) for tokens in driver.said("tokens")] == [[], [], [], ["a"], ["a"], []]
    assert driver.delivered("a") == driver.expected("a", 100, 2)


def test_without_chunks_a_prompt_waits_and_is_not_overtaken(start: Start, kind: Kind) -> None:
    driver = start(kind, batched=100, enable_chunked_prefill=False)
    driver.add("a", 60, 2)
    driver.add("b", 60, 2)
    driver.add("c", 10, 2)
    assert [did.scheduled for did in driver.run()] == [{"a": 60}, {"a": 1, "b": 60, "c": 10}, {"b": 1, "c": 1}, {}]


class TestLongPrompts:
    def test_none_takes_more_than_the_threshold(self, start: Start, kind: Kind) -> None:
        driver = start(kind, batched=102, long_prefill_token_threshold=40)
        for req_id in "abc":
            driver.add(req_id, 80, 3)
        driver.run()
        assert driver.said("scheduled")[:4] == [
            {"a": 40, "b": 40, "c": 22},
            {"a": 40, "b": 40, "c": 22},
            {"a": 1, "b": 1, "c": 36},
            {"a": 1, "b": 1, "c": 1},
        ]

    def test_but_alone_there_is_nobody_to_starve(self, start: Start, kind: Kind) -> None:
        driver = start(kind, batched=102, long_prefill_token_threshold=40)
        driver.add("a", 200, 1)
        assert driver.step().scheduled == {"a": 102}
        driver.add("b", 10, 1)
        assert driver.step().scheduled == {"a": 40, "b": 10}

    def test_the_adaptive_threshold_is_a_fair_share_at_least(self, start: Start, kind: Kind) -> None:
        driver = start(kind, batched=200, long_prefill_token_threshold=40, long_prefill_token_threshold_adaptive=True)
        driver.add("a", 180, 1)
        driver.add("b", 180, 1)
        assert driver.step().scheduled == {"a": 100, "b": 100}


class TestBlocks:
    def test_who_does_not_fit_waits_and_is_not_overtaken(self, start: Start, kind: Kind) -> None:
        """Ten blocks, of which a's prompt takes seven; b wants six. Evicting gives four of a's back after one step."""
        driver = start(kind, 11)
        driver.add("a", 100, 10)
        driver.add("b", 90, 3)
        driver.add("c", 10, 3)
        assert driver.step().scheduled == {"a": 100} and driver.waiting == ["b", "c"]
        evicted = {"a": 1, "b": 90, "c": 10}
        assert driver.step().scheduled == (evicted if kind.evicts else {"a": 1})
        driver.run()
        assert list(driver.delivered("b")) == driver.expected("b", 90, 3)
        starts = [req_id for did in driver.steps for req_id in did.new]
        assert starts == ["a", "b", "c"]

    @pytest.mark.parametrize("whole", [True, False])
    def test_a_prompt_is_admitted_if_all_of_it_fits(self, start: Start, kind: Kind, whole: bool) -> None:
        """Or, without ``scheduler_reserve_full_isl``, if the first chunk does: two blocks, where three are free."""
        driver = start(kind, 11, batched=100, scheduler_reserve_full_isl=whole)
        driver.add("a", 100, 2)
        driver.step()
        assert len(driver.free) == (7 if kind.evicts else 3)
        driver.add("b", 120, 2)
        driver.scheduler.max_num_scheduled_tokens = 33
        assert driver.step().scheduled == ({"a": 1} if whole else {"a": 1, "b": 32})

    def test_the_watermark_stays_free(self, start: Start, kind: Kind) -> None:
        """A fifth of 20 blocks, whenever somebody is running: of 19, a takes 6 and b 10."""
        driver = start(kind, 20, watermark=0.2)
        driver.add("a", 90, 4)
        assert driver.step().scheduled == {"a": 90}
        driver.add("b", 160, 4)
        assert len(driver.free) == (16 if kind.evicts else 13)
        assert driver.step().scheduled == ({"a": 1, "b": 160} if kind.evicts else {"a": 1})
        driver.run()
        assert driver.delivered("b") == driver.expected("b", 160, 4)

    def test_the_watermark_is_not_for_who_runs_alone(self, start: Start, kind: Kind) -> None:
        driver = start(kind, 11, watermark=0.5)
        driver.add("a", 150, 1)
        assert driver.step().scheduled == {"a": 150}
        assert driver.delivered("a") == driver.expected("a", 150, 1)

    @pytest.mark.parametrize("prompt", [160, 145])
    def test_a_request_may_fill_the_pool(self, start: Start, kind: Kind, prompt: int) -> None:
        """Ten blocks: with its last token, which is never computed, a request has one token more than they hold."""
        driver = start(kind, 11)
        outputs = 161 - prompt
        driver.add("a", prompt, outputs)
        steps = driver.run()
        assert driver.delivered("a") == driver.expected("a", prompt, outputs)
        assert steps[outputs - 1].ended == {"a": "length"}

    def test_who_could_never_fit(self, start: Start, kind: Kind) -> None:
        """On purpose: where vLLM lets it wait for ever, and everybody behind it, it is refused."""
        driver = start(kind, 11)
        driver.add("a", 161, 1)
        driver.add("b", 20, 1)
        driver.step()
        driver.step()
        assert driver.said("scheduled") == ([{}, {}] if kind.budget is None else [{}, {"b": 20}])
        assert driver.said("ended") == ([{}, {}] if kind.budget is None else [{"a": "error"}, {"b": "length"}])


def test_prompts_can_be_held_back_while_others_decode(start: Start, kind: Kind) -> None:
    """As data-parallel ranks do to each other; it is not done for nothing, nor when prompts have piled up."""
    driver = start(kind, batched=50)
    driver.throttled = True
    driver.add("a", 4, 8)
    assert driver.step().scheduled == {"a": 4}
    driver.throttled = False
    driver.add("b", 80, 2)
    assert driver.step().scheduled == {"a": 1, "b": 49}
    driver.throttled = True
    assert driver.step().scheduled == {"a": 1}
    driver.throttled = False
    assert driver.step().scheduled == {"a": 1, "b": 31}
