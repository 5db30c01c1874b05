"""The invariants must fail when they are broken: every check has a control that breaks exactly it."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from vtoken.core import audit
from vtoken.core.audit import InvariantViolation
from vtoken.core.planner import Packing, Plan, Snapshot, plan_fill
from vtoken.core.token_table import HOLE, Moves, TokenTable

S = 4


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.fixture
def table() -> TokenTable:
    """Row 0, request a: ten tokens in blocks 7, 2, 5, of which 1 and 4 are dead. Row 1, request b: four tokens."""
    table = TokenTable(S)
    for req_id, blocks, count in (("a", [7, 2, 5], 10), ("b", [3, 0, 0], 4)):
        row = table.add_request(req_id)
        held = ints(-(-count // S))
        table.sync_new_tokens(ints(row), np.array([blocks], dtype=np.int32), held, ints(count))
    table.evict_tokens(ints(0, 0), ints(1, 4))
    return table


def plan_of(table: TokenTable, moves: list[tuple[int, int, int]], keep: list[int]) -> Plan:
    rows, sources, destinations = (ints(*column) for column in zip(*moves, strict=True)) if moves else [ints()] * 3
    return Plan(ints(*range(len(keep))), Moves(rows, sources, destinations), ints(*keep))


class TestMapping:
    def test_a_sound_table_passes(self, table: TokenTable) -> None:
        audit.check_mapping(table)
        audit.check_mapping(TokenTable(S))

    def break_token_beyond_the_end(t: TokenTable) -> None:
        t.physical_of[0, 10] = 11

    def break_token_outside_the_blocks(t: TokenTable) -> None:
        t.logical_at[1, 4] = 3

    def break_live_count(t: TokenTable) -> None:
        t.num_live[0] += 1

    def break_two_tokens_in_one_slot(t: TokenTable) -> None:
        t.physical_of[0, 9] = t.physical_of[0, 8]

    def break_slot_without_its_token(t: TokenTable) -> None:
        t.logical_at[0, 9] = HOLE
        t.live_in_block[0, 2] -= 1

    def break_slot_of_a_dead_token(t: TokenTable) -> None:
        t.logical_at[0, 1] = 1
        t.live_in_block[0, 0] += 1

    def break_swapped_tokens(t: TokenTable) -> None:
        t.logical_at[0, [8, 9]] = t.logical_at[0, [9, 8]]

    def break_block_count(t: TokenTable) -> None:
        t.live_in_block[0, 1] += 1

    def break_count_of_a_block_that_left(t: TokenTable) -> None:
        t.live_in_block[1, 1] = 1

    def break_block_of_two_requests(t: TokenTable) -> None:
        t.blocks[1, 0] = 2

    def break_block_held_twice(t: TokenTable) -> None:
        t.blocks[0, 2] = 7

    @pytest.mark.parametrize(
        ("damage", "sentence"),
        [
            (break_token_beyond_the_end, "request a maps a token that does not exist yet"),
            (break_token_outside_the_blocks, "request b has a token outside its blocks"),
            (break_live_count, "request a miscounts its live tokens"),
            (break_two_tokens_in_one_slot, "the two maps of request a are not each other's inverse"),
            (break_slot_without_its_token, "the two maps of request a are not each other's inverse"),
            (break_slot_of_a_dead_token, "the two maps of request a are not each other's inverse"),
            (break_swapped_tokens, "the two maps of request a are not each other's inverse"),
            (break_block_count, "request a miscounts a block"),
            (break_count_of_a_block_that_left, "request b counts tokens in a block it left"),
            (break_block_of_two_requests, "block 2 is held by a and by b, and one of them may write into it"),
            (break_block_held_twice, "request a holds a block twice"),
        ],
    )
    def test_a_damaged_table_is_caught(
        self, table: TokenTable, damage: Callable[[TokenTable], None], sentence: str
    ) -> None:
        damage(table)
        with pytest.raises(InvariantViolation, match=f"^I2: {re.escape(sentence)}$"):
            audit.check_mapping(table)


class TestConservation:
    def test_a_relocation_keeps_every_id(self, table: TokenTable) -> None:
        before = audit.live_ids(table)
        assert before == {"a": (0, 2, 3, 5, 6, 7, 8, 9), "b": (0, 1, 2, 3)}
        table.apply_moves(Moves(ints(0, 0), ints(8, 9), ints(1, 4)))
        audit.check_conservation(before, table)

    def test_a_lost_token_is_named(self, table: TokenTable) -> None:
        before = audit.live_ids(table)
        table.evict_tokens(ints(0, 1), ints(9, 0))
        with pytest.raises(InvariantViolation, match=re.escape("I1: request a lost tokens [9] and gained tokens []")):
            audit.check_conservation(before, table)

    def test_a_token_that_came_back_is_named(self, table: TokenTable) -> None:
        before = audit.live_ids(table)
        table.physical_of[0, 4] = 4
        with pytest.raises(InvariantViolation, match=re.escape("lost tokens [] and gained tokens [4]")):
            audit.check_conservation(before, table)

    def test_requests_that_came_or_went_do_not_count(self, table: TokenTable) -> None:
        before = audit.live_ids(table)
        table.drop_request("b")
        table.add_request("c")
        audit.check_conservation(before, table)


class TestDense:
    def test_full_blocks_and_a_full_tail(self, table: TokenTable) -> None:
        audit.check_dense(table, ints(1))
        table.apply_moves(Moves(ints(0, 0), ints(8, 9), ints(1, 4)))
        table.release_blocks(ints(0), ints(2))
        audit.check_dense(table, ints(0, 1))

    def test_a_hole(self, table: TokenTable) -> None:
        with pytest.raises(InvariantViolation, match="row 0 has a hole among its first 8 slots"):
            audit.check_dense(table, ints(1, 0))

    def test_a_block_too_many(self, table: TokenTable) -> None:
        table.apply_moves(Moves(ints(0, 0), ints(8, 9), ints(1, 4)))
        with pytest.raises(InvariantViolation, match="row 0 attends 8 tokens and holds 3 blocks"):
            audit.check_dense(table, ints(0))

    def test_a_block_too_few(self, table: TokenTable) -> None:
        table.num_blocks[1] = 0
        with pytest.raises(InvariantViolation, match="row 1 attends 4 tokens and holds 0 blocks"):
            audit.check_dense(table, ints(1))


class TestPlan:
    def test_the_planner_s_own_plan_passes(self, table: TokenTable) -> None:
        snapshot = Snapshot(ints(0, 1), table.logical_at[:2, :12], ints(0, 0), table.num_live[:2])
        for next_tokens in (ints(0, 0), ints(1, 1)):
            audit.check_plan(plan_fill(snapshot, next_tokens, S), table)

    @pytest.mark.parametrize(
        ("moves", "keep", "sentence"),
        [
            ([(0, 10, 1), (0, 8, 4)], [2, 1], "row 0 moves the hole at 10"),
            ([(0, 8, 2), (0, 9, 4)], [2, 1], "row 0 overwrites position 2"),
            ([(0, 8, 10), (0, 9, 1)], [2, 1], "row 0 moves into a block that it gives up"),
            ([(0, 0, 1), (0, 8, 4)], [2, 1], "row 0 moves a token away from the front"),
            ([(0, 8, 1), (0, 8, 4)], [2, 1], "row 0 names a position twice"),
            ([(0, 8, 1), (0, 9, 1)], [2, 1], "row 0 names a position twice"),
            ([(0, 8, 1)], [2, 1], "row 0 gives up a block with live tokens at [9]"),
            ([(0, 8, 1), (0, 9, 4)], [2, 0], "row 1 gives up a block with live tokens at [0, 1, 2, 3]"),
        ],
    )
    def test_a_bad_plan_is_caught(
        self, table: TokenTable, moves: list[tuple[int, int, int]], keep: list[int], sentence: str
    ) -> None:
        with pytest.raises(InvariantViolation, match=f"^I4: {re.escape(sentence)}$"):
            audit.check_plan(plan_of(table, moves, keep), table)

    def test_the_plan_that_those_differ_from_passes(self, table: TokenTable) -> None:
        audit.check_plan(plan_of(table, [(0, 8, 1), (0, 9, 4)], [2, 1]), table)

    def test_a_violation_is_an_assertion(self) -> None:
        assert issubclass(InvariantViolation, AssertionError)


class TestPacking:
    @pytest.fixture
    def holed(self) -> TokenTable:
        """18 tokens that were appended in five blocks: 1, 2, 4 and 3 of the full ones are alive, 2 of the last."""
        table = TokenTable(S, recycling=False)
        row = table.add_request("a")
        table.sync_new_tokens(ints(row), np.array([[7, 2, 5, 9, 1]], dtype=np.int32), ints(5), ints(18))
        dead = ints(0, 1, 2, 4, 5, 12)
        table.evict_tokens(np.zeros_like(dead), dead)
        return table

    @pytest.mark.parametrize(("sources", "destinations"), [([0, 1], 1), ([0, 1, 3], 2), ([0, 1, 2, 3], 3)])
    def test_a_gain_passes(self, holed: TokenTable, sources: list[int], destinations: int) -> None:
        audit.check_packing(Packing(0, ints(*sources), destinations), holed)

    @pytest.mark.parametrize(
        ("sources", "destinations", "sentence"),
        [
            ([0, 1], 2, "row 0 packs 2 blocks into 2"),
            ([0, 1, 3], 1, "row 0 packs 6 live tokens into 1 blocks"),
            ([0, 0, 1], 2, "row 0 names a source twice, or out of order"),
            ([1, 0], 1, "row 0 names a source twice, or out of order"),
            ([0, 4], 1, "row 0 packs a block that is not full: [0, 4] of 4"),
            ([], 0, "row 0 packs a block that is not full: [] of 4"),
            ([-1, 0], 1, "row 0 packs a block that is not full: [-1, 0] of 4"),
        ],
    )
    def test_a_bad_packing_is_caught(
        self, holed: TokenTable, sources: list[int], destinations: int, sentence: str
    ) -> None:
        with pytest.raises(InvariantViolation, match=f"^I4: {re.escape(sentence)}$"):
            audit.check_packing(Packing(0, ints(*sources), destinations), holed)
