"""The scheduler's counts: when a request is reduced, to what, and how many blocks it holds and will hold."""

from dataclasses import dataclass

import numpy as np
import pytest

from vtoken.core.budget import eviction_counts
from vtoken.core.cadence import Cadence
from vtoken.core.ledger import LengthLedger, StepCounts

S = 16


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def blocks_for(tokens: int) -> int:
    return (tokens + S - 1) // S


@dataclass
class Forward:
    """What one step did to one request, as the ledger stated it."""

    length: int
    attended: int
    num_blocks: int
    evict: int
    keep_blocks: int
    next_tokens: int
    epoch: int


class Driver:
    """One request of a ledger, stepped as a scheduler does."""

    def __init__(
        self, prompt: int, budget: int, interval: int, outputs: int, ledger: LengthLedger | None = None
    ) -> None:
        self.ledger = ledger or LengthLedger(S, Cadence(interval=interval))
        self.prompt, self.outputs = prompt, outputs
        self.computed, self.known = 0, prompt
        self.ledger.open("r", prompt, budget, prompt + outputs)

    def step(self, tokens: int) -> Forward:
        self.computed += tokens
        complete = self.computed == self.known
        assert self.computed <= self.known
        physical = self.computed - self.ledger.returned_positions("r")
        counts = self.ledger.schedule(["r"], ints(tokens), ints(self.computed), ints(self.computed + (not complete)))
        forward = Forward(
            int(counts.length[0]),
            int(counts.length[0]) + tokens,
            int(counts.num_blocks[0]),
            int(counts.evict[0]),
            int(counts.keep_blocks[0]),
            int(counts.next_tokens[0]),
            int(counts.epoch[0]),
        )
        assert physical == forward.attended, "blocks are allocated for another length than is attended"
        self.known += complete
        return forward

    def prefill(self, chunk: int) -> list[Forward]:
        forwards, end = [], self.known
        while self.computed < end:
            forwards.append(self.step(min(chunk, end - self.computed)))
        return forwards

    def decode(self, tokens: int) -> list[Forward]:
        return [self.step(1) for _ in range(tokens)]

    def preempt(self) -> None:
        self.ledger.reset("r")
        self.computed = 0


def check_budget_kept(forwards: list[Forward], budget: int, interval: int) -> None:
    """n <= B once eviction has begun, and nothing is forgotten that could have stayed until the next look."""
    begun, length, epoch = False, 0, 0
    for forward in forwards:
        assert forward.length == length and forward.epoch == epoch
        assert forward.num_blocks == blocks_for(forward.attended)
        if begun:
            assert forward.attended <= budget
        length = forward.attended - forward.evict
        if forward.evict:
            begun = True
            epoch += 1
            assert length == budget - interval
            assert forward.next_tokens == 1
            assert forward.keep_blocks == blocks_for(length + 1)
        else:
            assert forward.next_tokens == 0 and forward.keep_blocks == forward.num_blocks


class TestInterval:
    @pytest.mark.parametrize("interval", [1, 2, 3, 5, 16, 17])
    @pytest.mark.parametrize("budget", [17, 18, 31, 32, 33, 47, 64])
    def test_a_forward_never_attends_more_than_the_budget(self, budget: int, interval: int) -> None:
        for prompt in [1, 2, 15, *range(budget - interval - 2, budget + 3), 65, 80, 95, 96, 97]:
            if prompt < 1:
                continue
            driver = Driver(prompt, budget, interval, outputs=200)
            forwards = driver.prefill(chunk=4096) + driver.decode(3 * interval + 70)
            check_budget_kept(forwards, budget, interval)
            assert any(f.evict for f in forwards)
            last = forwards[-(interval + 1) :]
            assert max(f.attended for f in last) == budget, "the budget is not used up"

    @pytest.mark.parametrize("interval", [1, 2, 3, 5])
    def test_looks_are_counted_from_the_prompt(self, interval: int) -> None:
        driver = Driver(100, 40, interval, outputs=64)
        (prompt,) = driver.prefill(100)
        assert (prompt.attended, prompt.evict, prompt.keep_blocks) == (
            100,
            60 + interval,
            blocks_for(41 - interval),
        )
        reduced = [i + 1 for i, f in enumerate(driver.decode(30)) if f.evict]
        assert reduced == list(range(interval, 31, interval))

    def test_every_third_token_by_hand(self) -> None:
        driver = Driver(prompt=38, budget=35, interval=3, outputs=64)
        (prompt,) = driver.prefill(64)
        assert prompt == Forward(0, 38, 3, evict=6, keep_blocks=3, next_tokens=1, epoch=0)
        assert driver.decode(4) == [
            Forward(32, 33, 3, evict=0, keep_blocks=3, next_tokens=0, epoch=1),
            Forward(33, 34, 3, evict=0, keep_blocks=3, next_tokens=0, epoch=1),
            Forward(34, 35, 3, evict=3, keep_blocks=3, next_tokens=1, epoch=1),
            Forward(32, 33, 3, evict=0, keep_blocks=3, next_tokens=0, epoch=2),
        ]

    def test_interval_one_holds_the_same_blocks_for_ever(self) -> None:
        for budget in range(33, 50):
            driver = Driver(prompt=80, budget=budget, interval=1, outputs=64)
            (prompt,) = driver.prefill(80)
            assert prompt.evict == 80 - (budget - 1) and prompt.keep_blocks == blocks_for(budget)
            for forward in driver.decode(40):
                assert (forward.attended, forward.evict) == (budget, 1)
                assert forward.num_blocks == forward.keep_blocks == blocks_for(budget)

    def test_a_prompt_below_the_budget_grows_into_it(self) -> None:
        driver = Driver(prompt=20, budget=33, interval=1, outputs=64)
        forwards = driver.prefill(64) + driver.decode(20)
        assert [f.attended for f in forwards] == [*range(20, 34), *[33] * 7]
        assert [f.evict for f in forwards] == [0] * 13 + [1] * 8
        assert [f.keep_blocks for f in forwards] == [2] * 13 + [3] * 8

    def test_chunks_of_a_prompt_are_left_whole(self) -> None:
        driver = Driver(prompt=100, budget=40, interval=1, outputs=64)
        chunks = driver.prefill(chunk=33)
        assert [f.attended for f in chunks] == [33, 66, 99, 100]
        assert [f.evict for f in chunks] == [0, 0, 0, 61]
        assert [f.num_blocks for f in chunks] == [3, 5, 7, 7]
        assert chunks[-1].keep_blocks == 3

    def test_a_request_that_ends_within_its_budget_is_never_reduced(self) -> None:
        for outputs, reduced in ((12, False), (13, True)):
            ledger = LengthLedger(S, Cadence(interval=1))
            ledger.open("r", 100, 113 - 1, 100 + outputs)
            assert bool(ledger.budget[0] > 0) is reduced

    def test_budget_zero_means_never(self) -> None:
        driver = Driver(prompt=100, budget=0, interval=1, outputs=64)
        assert not any(f.evict for f in driver.prefill(64) + driver.decode(40))


class TestEvictionCounts:
    def count(self, **changes: object) -> int:
        given: dict[str, object] = {
            "length": ints(50),
            "logical_length": ints(90),
            "prompt_length": ints(80),
            "budget": ints(40),
            "ends_prefill": np.array([False]),
            "decodes": np.array([True]),
            "interval": 5,
        }
        return int(eviction_counts(**{**given, **changes})[0])  # type: ignore[arg-type]

    def test_due_and_too_long(self) -> None:
        assert self.count() == 15

    def test_not_due(self) -> None:
        assert self.count(logical_length=ints(91)) == 0
        assert self.count(decodes=np.array([False])) == 0

    def test_the_end_of_the_prefill_is_due_wherever_it_falls(self) -> None:
        at_the_end = {"decodes": np.array([False]), "ends_prefill": np.array([True])}
        assert self.count(logical_length=ints(91), **at_the_end) == 15

    def test_short_enough(self) -> None:
        assert self.count(length=ints(35)) == 0
        assert self.count(length=ints(36)) == 1

    def test_no_budget(self) -> None:
        assert self.count(budget=ints(0)) == 0

    def test_a_batch_is_looked_at_one_by_one(self) -> None:
        counts = eviction_counts(
            ints(50, 50, 50, 30),
            ints(90, 91, 80, 90),
            ints(80, 80, 80, 80),
            ints(40, 40, 20, 40),
            np.array([False, False, True, False]),
            np.array([True, True, False, True]),
            5,
        )
        assert counts.tolist() == [15, 0, 35, 0]


class TestResume:
    @pytest.mark.parametrize("interval", [1, 2, 3, 5])
    @pytest.mark.parametrize("decoded", [1, 2, 3, 4, 5, 6, 7, 23])
    def test_a_recomputed_request_goes_back_to_the_same_budget(self, interval: int, decoded: int) -> None:
        for prompt in (20, 33, 34, 60):
            driver = Driver(prompt, 34, interval, outputs=120)
            driver.prefill(64)
            driver.decode(decoded)
            driver.preempt()
            assert driver.ledger.live_tokens() == 0
            assert prompt + decoded - driver.ledger.returned_positions("r") == prompt + decoded
            # The sampled token is known too, so it belongs to what is computed again.
            forwards = driver.prefill(chunk=25) + driver.decode(40)
            check_budget_kept(forwards, 34, interval)
            attended = [f.attended for f in forwards]
            assert max(attended[: -(-(prompt + decoded + 1) // 25)]) == prompt + decoded + 1

    def test_an_epoch_starts_anew(self) -> None:
        driver = Driver(60, 34, 1, outputs=99)
        driver.prefill(60)
        assert [f.epoch for f in driver.decode(3)] == [1, 2, 3]
        driver.preempt()
        assert [f.epoch for f in driver.prefill(99) + driver.decode(2)] == [0, 1, 2]


class TestBatch:
    def test_rows_do_not_influence_each_other(self) -> None:
        ledger = LengthLedger(S, Cadence(interval=1), requests=1)
        for n, (prompt, budget) in enumerate([(60, 34), (50, 20), (10, 64), (33, 0)]):
            ledger.open(f"r{n}", prompt, budget, prompt + 100)
        order = ["r2", "r0", "r3", "r1"]
        counts = ledger.schedule(order, ints(10, 60, 33, 50), ints(10, 60, 33, 50), ints(10, 60, 33, 50))
        assert counts.evict.tolist() == [0, 27, 0, 31]
        assert counts.num_blocks.tolist() == [1, 4, 3, 4]
        assert counts.keep_blocks.tolist() == [1, 3, 3, 2]
        assert counts.next_tokens.tolist() == [0, 1, 0, 1]
        assert ledger.live_tokens() == 10 + 33 + 33 + 19
        again = ledger.schedule(order[::-1], ints(1, 1, 1, 1), ints(51, 34, 61, 11), ints(51, 34, 61, 11))
        assert again.length.tolist() == [19, 33, 33, 10]
        assert again.epoch.tolist() == [1, 0, 1, 0]
        assert again.evict.tolist() == [1, 0, 1, 0]

    def test_the_counts_that_were_handed_out_do_not_change_later(self) -> None:
        ledger = LengthLedger(S, Cadence(interval=1))
        ledger.open("r", 60, 34, 200)
        first = ledger.schedule(["r"], ints(60), ints(60), ints(60))
        kept = StepCounts(*(np.array(getattr(first, name)) for name in StepCounts.__dataclass_fields__))
        ledger.schedule(["r"], ints(1), ints(61), ints(61))
        for name in StepCounts.__dataclass_fields__:
            assert np.array_equal(getattr(first, name), getattr(kept, name))

    def test_an_empty_step(self) -> None:
        counts = LengthLedger(S, Cadence(interval=3)).schedule([], ints(), ints(), ints())
        assert all(len(getattr(counts, name)) == 0 for name in StepCounts.__dataclass_fields__)

    def test_more_requests_than_rows(self) -> None:
        ledger = LengthLedger(S, Cadence(interval=1), requests=2)
        for n in range(9):
            ledger.open(f"r{n}", 20 + n, 10 + n, 500)
            ledger.schedule([f"r{n}"], ints(20 + n), ints(20 + n), ints(20 + n))
        assert ledger.live_tokens() == sum(9 + n for n in range(9))
        assert [20 + n - ledger.returned_positions(f"r{n}") for n in range(9)] == [9 + n for n in range(9)]

    def test_ids_are_used_once_at_a_time(self) -> None:
        ledger = LengthLedger(S, Cadence(interval=1))
        ledger.open("r", 60, 34, 200)
        with pytest.raises(ValueError, match="request r is already known"):
            ledger.open("r", 60, 34, 200)
        ledger.schedule(["r"], ints(60), ints(60), ints(60))
        ledger.close("r")
        assert "r" not in ledger and ledger.live_tokens() == 0
        ledger.close("r")
        ledger.open("r", 10, 20, 15)
        assert 10 - ledger.returned_positions("r") == 10
        counts = ledger.schedule(["r"], ints(10), ints(10), ints(10))
        assert (counts.length[0], counts.epoch[0], counts.evict[0]) == (0, 0, 0)


class TestCommittedGrowth:
    """What admitted requests will still take, so that admitting another preempts none of them."""

    def admitted(self, ledger: LengthLedger, req_id: str, prompt: int, budget: int, outputs: int) -> None:
        ledger.open(req_id, prompt, budget, prompt + outputs)
        ledger.expect_prefill(req_id, prompt)

    def test_a_prompt_in_chunks_is_promised_whole(self) -> None:
        ledger = LengthLedger(S, Cadence(interval=1))
        self.admitted(ledger, "r", prompt=100, budget=40, outputs=64)
        assert ledger.committed_growth() == 0, "it holds nothing yet, and asks for itself"
        ledger.hold_blocks("r", 2)
        ledger.schedule(["r"], ints(32), ints(32), ints(100))
        assert ledger.committed_growth() == 7 - 2
        ledger.hold_blocks("r", 4)
        ledger.schedule(["r"], ints(32), ints(64), ints(100))
        assert ledger.committed_growth() == 7 - 4
        ledger.hold_blocks("r", 7)
        ledger.schedule(["r"], ints(36), ints(100), ints(100))
        assert ledger.committed_growth() == 0, "reduced to the budget, and never above it again"

    def test_a_short_prompt_is_promised_its_budget(self) -> None:
        ledger = LengthLedger(S, Cadence(interval=1))
        self.admitted(ledger, "r", prompt=20, budget=70, outputs=500)
        ledger.hold_blocks("r", 2)
        ledger.schedule(["r"], ints(20), ints(20), ints(20))
        assert ledger.committed_growth() == 5 - 2
        for n in range(13):
            ledger.hold_blocks("r", blocks_for(21 + n))
            ledger.schedule(["r"], ints(1), ints(21 + n), ints(21 + n))
        assert ledger.committed_growth() == 5 - 3

    def test_an_interval_that_crosses_a_block_is_promised_the_block(self) -> None:
        ledger = LengthLedger(S, Cadence(interval=5))
        self.admitted(ledger, "r", prompt=100, budget=34, outputs=64)
        ledger.hold_blocks("r", 7)
        counts = ledger.schedule(["r"], ints(100), ints(100), ints(100))
        assert counts.keep_blocks.tolist() == [blocks_for(34 - 5 + 1)] == [2]
        assert ledger.committed_growth() == 3 - 2

    def test_several_requests_add_up_and_leave(self) -> None:
        ledger = LengthLedger(S, Cadence(interval=1))
        for n, prompt in enumerate((100, 200)):
            self.admitted(ledger, f"r{n}", prompt, 40, 64)
            ledger.hold_blocks(f"r{n}", 1)
        assert ledger.committed_growth() == (7 - 1) + (13 - 1)
        ledger.reset("r1")
        assert ledger.committed_growth() == 6
        ledger.close("r0")
        assert ledger.committed_growth() == 0

    def test_a_recomputed_request_is_promised_its_longer_prefill(self) -> None:
        ledger = LengthLedger(S, Cadence(interval=1))
        self.admitted(ledger, "r", prompt=100, budget=40, outputs=64)
        ledger.reset("r")
        ledger.expect_prefill("r", 130)
        ledger.hold_blocks("r", 1)
        assert ledger.committed_growth() == 9 - 1

    def test_a_request_without_an_effective_budget_is_not_counted(self) -> None:
        ledger = LengthLedger(S, Cadence(interval=1))
        self.admitted(ledger, "r", prompt=100, budget=400, outputs=64)
        ledger.hold_blocks("r", 1)
        assert ledger.committed_growth() == 0


class TestAppending:
    """``none`` and ``pack``: tokens die when the budget says, and blocks go when the worker says."""

    @pytest.fixture
    def ledger(self) -> LengthLedger:
        """100 tokens were computed, and 61 of them have just died."""
        ledger = LengthLedger(S, Cadence(), dense=False)
        ledger.open("r", 100, 40, 200)
        assert ledger.expect_prefill("r", 100) == 0, "nobody can know how many blocks it will hold"
        ledger.hold_blocks("r", 7)
        self.counts = ledger.schedule(["r"], ints(100), ints(100), ints(100))
        return ledger

    def test_an_eviction_gives_nothing_back_by_itself(self, ledger: LengthLedger) -> None:
        assert (self.counts.evict.tolist(), self.counts.num_blocks.tolist(), self.counts.keep_blocks.tolist()) == (
            [61],
            [7],
            [7],
        )
        assert (ledger.live_tokens(), ledger.held_blocks(), 101 - ledger.returned_positions("r")) == (39, 7, 101)

    def test_blocks_that_were_emptied_count_as_whole_ones(self, ledger: LengthLedger) -> None:
        ledger.hold_blocks("r", 4)
        ledger.follow({"r": 3 * S})
        assert (ledger.held_blocks(), 101 - ledger.returned_positions("r")) == (4, 101 - 3 * S)
        counts = ledger.schedule(["r"], ints(1), ints(101), ints(101))
        assert (counts.length.tolist(), counts.evict.tolist(), counts.epoch.tolist()) == ([39], [1], [1])
        assert counts.num_blocks.tolist() == counts.keep_blocks.tolist() == [4]
        for length in range(102, 7 * S + 1):
            counts = ledger.schedule(["r"], ints(1), ints(length), ints(length))
        assert counts.num_blocks.tolist() == [4]
        assert ledger.schedule(["r"], ints(1), ints(7 * S + 1), ints(7 * S + 1)).num_blocks.tolist() == [5]
        assert ledger.live_tokens() == 39

    def test_a_preempted_request_starts_anew(self, ledger: LengthLedger) -> None:
        ledger.hold_blocks("r", 4)
        ledger.follow({"r": 3 * S})
        ledger.reset("r")
        assert (ledger.held_blocks(), ledger.live_tokens(), 101 - ledger.returned_positions("r")) == (0, 0, 101)

    def test_a_budget_bounds_no_blocks(self, ledger: LengthLedger) -> None:
        assert ledger.most_blocks("r", 200) == blocks_for(200)
        assert ledger.committed_growth() == 0


class TestOwnSettings:
    ENGINES = Cadence(interval=1, head=2, recent=6, grace=9, prompt_queries=8, decode_queries=True, own_queries=8)
    OWN = Cadence(interval=1, head=5, recent=20, grace=9, protect_prompt=True, own_queries=30)

    def ledger(self) -> LengthLedger:
        ledger = LengthLedger(S, self.ENGINES, requests=1)
        ledger.open("engine", 40, 30, 100)
        ledger.open("own", 40, 70, 100, self.OWN, policy=3)
        ledger.open("off", 40, 0, 100)
        return ledger

    def test_each_column_is_the_requests(self) -> None:
        """A prefill of 40, then a decode step; of ``own`` nothing is observed, and its prompt stays."""
        ledger, names = self.ledger(), ["own", "off", "engine"]
        prefill = ledger.schedule(names, ints(40, 40, 40), ints(40, 40, 40), ints(40, 40, 40))
        assert prefill.head.tolist() == [40, 2, 2]
        assert prefill.protect.tolist() == [20, 6, 6]
        assert prefill.observe_from.tolist() == [40, 40, 32]
        assert prefill.evict.tolist() == [0, 0, 40 - 29]
        decode = ledger.schedule(names, ints(1, 1, 1), ints(41, 41, 41), ints(41, 41, 41))
        assert decode.observe_from.tolist() == [1, 1, 0]
        assert decode.evict.tolist() == [0, 0, 1]
        assert decode.head.tolist() == [40, 2, 2] and decode.protect.tolist() == [20, 6, 6]

    def test_as_in_an_engine_of_its_own(self) -> None:
        """The settings of a request are those of an engine that has them."""
        ledger, alone = self.ledger(), LengthLedger(S, self.OWN)
        alone.open("own", 40, 70, 100)
        known = 40
        for n in range(50):
            new, length = (40, 40) if n == 0 else (1, 40 + n)
            mixed = ledger.schedule(["off", "own"], ints(new, new), ints(length, length), ints(known, known))
            single = alone.schedule(["own"], ints(new), ints(length), ints(known))
            for name, column in vars(single).items():
                assert getattr(mixed, name)[1] == column[0], (n, name)
            known = length + 1
        assert ledger.outcome("own") == alone.outcome("own") and ledger.outcome("own").evicted == 89 - 69

    def test_hits_end_before_its_own_queries(self) -> None:
        ledger = self.ledger()
        assert [ledger.longest_hit(name, 40) for name in ("engine", "own", "off")] == [32, 10, 40]

    def test_who_has_another_policy(self) -> None:
        ledger, names = self.ledger(), ["own", "engine"]
        assert ledger.other_policies(names) == {"own": 3}
        assert ledger.other_policies(["engine"]) == {}
        ledger.reset("own")
        assert ledger.other_policies(names) == {"own": 3}
        ledger.close("own")
        ledger.open("own", 40, 70, 100)
        assert ledger.other_policies(names) == {}

    def test_a_row_that_is_used_again_has_the_engines_settings(self) -> None:
        ledger = self.ledger()
        ledger.close("own")
        ledger.open("next", 40, 30, 100)
        counts = ledger.schedule(["next"], ints(40), ints(40), ints(40))
        assert (counts.head.tolist(), counts.protect.tolist(), counts.evict.tolist()) == ([2], [6], [11])

    def test_what_became_of_it(self) -> None:
        ledger = self.ledger()
        ledger.schedule(["engine"], ints(40), ints(40), ints(40))
        assert (ledger.outcome("engine").evicted, ledger.outcome("engine").most_held) == (11, 3)
        ledger.reset("engine")
        assert (ledger.outcome("engine").evicted, ledger.outcome("engine").most_held) == (0, 3)
        ledger.schedule(["engine"], ints(20), ints(20), ints(41))
        assert (ledger.outcome("engine").evicted, ledger.outcome("engine").most_held) == (0, 3)
        ledger.close("engine")
        ledger.open("engine", 40, 30, 100)
        assert (ledger.outcome("engine").evicted, ledger.outcome("engine").most_held) == (0, 0)
        assert ledger.outcome("nobody") == ledger.outcome("engine")
