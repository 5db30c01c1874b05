"""The map from logical tokens to slots: exact positions, slots and counts; a refusal changes nothing."""

import numpy as np
import pytest

from vtoken.core import audit
from vtoken.core.holdings import pool_use
from vtoken.core.token_table import HOLE, Moves, TokenTable

S = 4


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def append(table: TokenTable, req_id: str, blocks: list[int], count: int) -> list[int]:
    """Register ``count`` tokens of a request that holds ``blocks``; their slots."""
    width = np.array([blocks], dtype=np.int32)
    return table.sync_new_tokens(table.rows([req_id]), width, ints(len(blocks)), ints(count)).tolist()


def evict(table: TokenTable, req_id: str, *tokens: int) -> None:
    table.evict_tokens(np.repeat(table.rows([req_id]), len(tokens)), ints(*tokens))


def moves(table: TokenTable, req_id: str, *pairs: tuple[int, int]) -> Moves:
    rows = np.repeat(table.rows([req_id]), len(pairs))
    return Moves(rows, ints(*(s for s, _ in pairs)), ints(*(d for _, d in pairs)))


def layout(table: TokenTable, req_id: str) -> list[int]:
    """The token at each physical position of the held blocks."""
    row = int(table.rows([req_id])[0])
    return table.logical_at[row, : int(table.num_blocks[row]) * table.block_size].tolist()


def live_counts(table: TokenTable, req_id: str) -> list[int]:
    row = int(table.rows([req_id])[0])
    return table.live_in_block[row, : int(table.num_blocks[row])].tolist()


def state(table: TokenTable) -> dict[str, tuple[object, ...]]:
    return {
        req_id: (
            layout(table, req_id),
            live_counts(table, req_id),
            table.block_ids(req_id),
            table.live_tokens(req_id).tolist(),
            *(int(column[table.rows([req_id])[0]]) for column in (table.length, table.num_live, table.epoch)),
        )
        for req_id in table.req_ids
    }


@pytest.fixture
def table() -> TokenTable:
    """One request of ten tokens in blocks 7, 2 and 5."""
    table = TokenTable(S)
    table.add_request("a")
    append(table, "a", [7, 2, 5], 10)
    return table


class TestAppending:
    def test_tokens_lie_one_after_another_along_the_block_table(self, table: TokenTable) -> None:
        assert [table.slot("a", t) for t in range(10)] == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21]
        assert layout(table, "a") == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, HOLE, HOLE]
        assert live_counts(table, "a") == [4, 4, 2]
        assert table.block_ids("a") == [7, 2, 5]
        assert table.live_tokens("a").tolist() == list(range(10))
        assert pool_use(table).waste == pytest.approx(1 - 10 / 12, abs=0)

    def test_the_slots_of_the_new_tokens_are_returned_in_order(self, table: TokenTable) -> None:
        assert append(table, "a", [7, 2, 5, 1], 5) == [22, 23, 4, 5, 6]
        assert live_counts(table, "a") == [4, 4, 4, 3]

    def test_a_batch_is_laid_out_request_by_request(self) -> None:
        table = TokenTable(S)
        rows = ints(table.add_request("a"), table.add_request("b"), table.add_request("c"))
        blocks = np.array([[3, 0, 0], [8, 9, 6], [1, 4, 0]], dtype=np.int32)
        slots = table.sync_new_tokens(rows, blocks, ints(1, 3, 2), ints(2, 9, 8))
        assert slots.tolist() == [12, 13, 32, 33, 34, 35, 36, 37, 38, 39, 24, 4, 5, 6, 7, 16, 17, 18, 19]
        assert table.num_live[rows].tolist() == [2, 9, 8]
        assert table.num_blocks[rows].tolist() == [1, 3, 2]
        audit.check_mapping(table)
        audit.check_dense(table, rows)

    def test_rows_may_come_in_any_order(self) -> None:
        table = TokenTable(S)
        first, second = table.add_request("a"), table.add_request("b")
        slots = table.sync_new_tokens(ints(second, first), np.array([[9], [3]], dtype=np.int32), ints(1, 1), ints(1, 3))
        assert slots.tolist() == [36, 12, 13, 14]
        assert (table.slot("b", 0), table.slot("a", 2)) == (36, 14)

    def test_appending_to_a_request_that_was_made_dense_again(self, table: TokenTable) -> None:
        evict(table, "a", 1, 2)
        table.apply_moves(moves(table, "a", (8, 1), (9, 2)))
        table.release_blocks(table.rows(["a"]), ints(2))
        assert append(table, "a", [7, 2, 6], 2) == [24, 25]
        assert layout(table, "a") == [0, 8, 9, 3, 4, 5, 6, 7, 10, 11, HOLE, HOLE]


class TestRecycling:
    def test_a_single_token_takes_the_lowest_hole(self, table: TokenTable) -> None:
        evict(table, "a", 6, 2)
        assert append(table, "a", [7, 2, 5], 1) == [30]
        assert table.slot("a", 10) == 30
        assert append(table, "a", [7, 2, 5], 1) == [10]
        assert layout(table, "a") == [0, 1, 10, 3, 4, 5, 11, 7, 8, 9, HOLE, HOLE]
        assert live_counts(table, "a") == [4, 4, 2]
        assert append(table, "a", [7, 2, 5], 1) == [22]

    def test_the_lowest_hole_may_be_the_next_block(self) -> None:
        table = TokenTable(S)
        table.add_request("a")
        append(table, "a", [7], 4)
        evict(table, "a", 0)
        assert append(table, "a", [7], 1) == [28]
        assert append(table, "a", [7, 3], 1) == [12]
        assert layout(table, "a") == [4, 1, 2, 3, 5, HOLE, HOLE, HOLE]

    def test_requests_of_different_length_each_find_their_own_hole(self) -> None:
        table = TokenTable(S)
        for req_id, blocks, count in (("a", [0, 1, 2], 12), ("b", [3], 3), ("c", [4, 5], 8)):
            table.add_request(req_id)
            append(table, req_id, blocks, count)
        evict(table, "a", 11)
        evict(table, "b", 2)
        evict(table, "c", 0, 5)
        table.evict_tokens(table.rows(["a"]), ints(9))
        blocks = np.array([[0, 1, 2], [3, 0, 0], [4, 5, 0]], dtype=np.int32)
        slots = table.sync_new_tokens(table.rows("abc"), blocks, ints(3, 1, 2), ints(1, 1, 1))
        assert slots.tolist() == [9, 14, 16]

    def test_a_request_that_never_evicted_appends(self) -> None:
        table = TokenTable(S)
        table.add_request("a")
        assert append(table, "a", [3], 1) == [12]
        assert append(table, "a", [3], 1) == [13]


class TestEvicting:
    def test_the_token_is_dead_and_everything_else_as_before(self, table: TokenTable) -> None:
        table.evict_token("a", 4)
        assert not table.is_live("a", 4)
        assert table.live_tokens("a").tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert [table.slot("a", t) for t in (3, 5, 9)] == [31, 9, 21]
        assert live_counts(table, "a") == [4, 3, 2]
        with pytest.raises(KeyError, match="token 4 of request a is not live"):
            table.slot("a", 4)

    def test_the_epoch_counts_the_steps_in_which_a_request_forgot_something(self, table: TokenTable) -> None:
        row = table.rows(["a"])
        assert table.epoch[row].tolist() == [0]
        evict(table, "a", 1, 2, 3)
        assert table.epoch[row].tolist() == [1]
        evict(table, "a", 4)
        assert table.epoch[row].tolist() == [2]

    def test_a_batch_over_several_requests(self, table: TokenTable) -> None:
        table.add_request("b")
        append(table, "b", [1], 4)
        rows = table.rows(["b", "a", "a", "b"])
        table.evict_tokens(rows, ints(0, 9, 0, 3))
        assert layout(table, "a") == [HOLE, 1, 2, 3, 4, 5, 6, 7, 8, HOLE, HOLE, HOLE]
        assert layout(table, "b") == [HOLE, 1, 2, HOLE]
        assert (live_counts(table, "a"), live_counts(table, "b")) == ([3, 4, 1], [2])
        assert pool_use(table).waste == 1 - 10 / 16
        audit.check_mapping(table)

    @pytest.mark.parametrize("tokens", [(10,), (-1,), (3, 99), (2, 2), (5, 3, 5)])
    def test_a_token_that_is_not_there_or_named_twice(self, table: TokenTable, tokens: tuple[int, ...]) -> None:
        before = state(table)
        with pytest.raises(ValueError):
            evict(table, "a", *tokens)
        assert state(table) == before

    def test_a_token_dies_once(self, table: TokenTable) -> None:
        evict(table, "a", 3)
        before = state(table)
        with pytest.raises(ValueError, match="must be live"):
            evict(table, "a", 2, 3)
        assert state(table) == before

    def test_a_token_that_never_was_is_named(self, table: TokenTable) -> None:
        with pytest.raises(ValueError, match=r"^token 10 of row \d+ does not exist, so it cannot be evicted$"):
            evict(table, "a", 10)


class TestMoving:
    def test_a_move_keeps_the_token_and_changes_its_slot(self, table: TokenTable) -> None:
        evict(table, "a", 0, 5)
        table.apply_moves(moves(table, "a", (9, 0), (8, 5)))
        assert layout(table, "a") == [9, 1, 2, 3, 4, 8, 6, 7, HOLE, HOLE, HOLE, HOLE]
        assert (table.slot("a", 9), table.slot("a", 8)) == (28, 9)
        assert live_counts(table, "a") == [4, 4, 0]
        assert table.live_tokens("a").tolist() == [1, 2, 3, 4, 6, 7, 8, 9]

    @pytest.mark.parametrize(
        "pairs",
        [
            [(9, 4)],  # the destination is taken
            [(5, 0)],  # the source is a hole
            [(9, 0), (9, 5)],  # the source is named twice
            [(9, 0), (8, 0)],  # the destination is named twice
            [(9, 12)],  # beyond the blocks
            [(9, -1)],
            [(12, 0)],
            [(9, 0), (8, 9)],  # into the hole that the same batch leaves
        ],
    )
    def test_a_bad_batch_is_refused_whole(self, table: TokenTable, pairs: list[tuple[int, int]]) -> None:
        evict(table, "a", 0, 5)
        before = state(table)
        with pytest.raises(ValueError, match="move"):
            table.apply_moves(moves(table, "a", *pairs))
        assert state(table) == before

    def test_an_empty_batch_is_nothing(self, table: TokenTable) -> None:
        before = state(table)
        table.apply_moves(moves(table, "a"))
        assert state(table) == before


class TestReleasing:
    def test_empty_blocks_leave(self, table: TokenTable) -> None:
        evict(table, "a", 8, 9)
        table.release_blocks(table.rows(["a"]), ints(2))
        assert table.block_ids("a") == [7, 2]
        assert pool_use(table).waste == 0.0

    def test_a_block_with_a_live_token_stays(self, table: TokenTable) -> None:
        evict(table, "a", 8)
        before = state(table)
        with pytest.raises(ValueError, match="must not hold a live token"):
            table.release_blocks(table.rows(["a"]), ints(2))
        assert state(table) == before

    def test_keeping_more_than_is_held_is_keeping_all(self, table: TokenTable) -> None:
        table.release_blocks(table.rows(["a"]), ints(9))
        assert table.block_ids("a") == [7, 2, 5]

    def test_one_request_of_a_batch_that_must_not_spoils_the_batch(self, table: TokenTable) -> None:
        table.add_request("b")
        append(table, "b", [1, 3], 4)
        before = state(table)
        with pytest.raises(ValueError, match="live token"):
            table.release_blocks(table.rows(["b", "a"]), ints(1, 2))
        assert state(table) == before
        table.release_blocks(table.rows(["b", "a"]), ints(1, 3))
        assert (table.block_ids("b"), table.block_ids("a")) == ([1], [7, 2, 5])


class TestRequests:
    def test_a_dropped_request_leaves_nothing_to_the_next_owner_of_its_row(self, table: TokenTable) -> None:
        evict(table, "a", 0, 4)
        row = int(table.rows(["a"])[0])
        table.drop_request("a")
        assert "a" not in table and pool_use(table).waste == 0.0
        assert table.add_request("b") == row
        assert layout(table, "b") == [] and table.live_tokens("b").tolist() == []
        assert append(table, "b", [6], 3) == [24, 25, 26]
        assert layout(table, "b") == [0, 1, 2, HOLE]
        assert live_counts(table, "b") == [3]
        assert int(table.epoch[row]) == 0
        audit.check_mapping(table)

    def test_dropping_an_unknown_request_is_nothing(self, table: TokenTable) -> None:
        before = state(table)
        table.drop_request("never seen")
        assert state(table) == before

    def test_a_request_has_one_row(self, table: TokenTable) -> None:
        with pytest.raises(ValueError, match="request a is already known"):
            table.add_request("a")
        with pytest.raises(KeyError):
            table.rows(["b"])

    def test_an_empty_table_wastes_nothing(self) -> None:
        assert pool_use(TokenTable(S)).waste == 0.0

    def test_rows_and_columns_grow_without_losing_anything(self) -> None:
        table = TokenTable(S, requests=1, tokens=4)
        blocks: dict[str, list[int]] = {}
        for n in range(9):
            req_id = f"r{n}"
            table.add_request(req_id)
            blocks[req_id] = list(range(100 * n, 100 * n + 1 + n))
            append(table, req_id, blocks[req_id], S * (n + 1) - 1)
        evict(table, "r8", 0, 17)
        blocks["r8"] += [900 + i for i in range(40)]
        table.apply_moves(moves(table, "r8", (34, 0), (33, 17)))
        assert append(table, "r8", blocks["r8"], 120)[:3] == [
            3300 - 100 + 33,
            3300 - 100 + 34,
            3300 - 100 + 35,
        ]
        audit.check_mapping(table)
        for n in range(8):
            assert table.block_ids(f"r{n}") == blocks[f"r{n}"]
            assert table.slot(f"r{n}", S * n) == (101 * n) * S
        assert table.num_live[table.rows(["r8"])].tolist() == [35 - 2 + 120]


class TestRefusingTokens:
    def test_blocks_that_do_not_hold_them(self, table: TokenTable) -> None:
        with pytest.raises(ValueError, match="do not hold its new tokens"):
            append(table, "a", [7, 2, 5], 3)

    def test_a_recycled_token_needs_a_hole_within_the_blocks(self) -> None:
        table = TokenTable(S)
        table.add_request("a")
        append(table, "a", [7], 4)
        evict(table, "a", 0)
        append(table, "a", [7], 1)
        with pytest.raises(ValueError, match="do not hold its new tokens"):
            append(table, "a", [7], 1)

    def test_several_tokens_and_a_hole(self, table: TokenTable) -> None:
        evict(table, "a", 3)
        with pytest.raises(ValueError, match="without holes"):
            append(table, "a", [7, 2, 5], 2)

    def test_a_request_that_lost_blocks(self, table: TokenTable) -> None:
        with pytest.raises(ValueError, match="cannot lose blocks"):
            append(table, "a", [7, 2], 1)

    def test_a_refusal_changes_nothing(self, table: TokenTable) -> None:
        before = state(table)
        with pytest.raises(ValueError, match="do not hold its new tokens"):
            append(table, "a", [7, 2, 5, 6], 7)
        assert state(table) == before


class TestWithoutRecycling:
    """Without recycling: holes stay where they are, new tokens come last, blocks come and go in the middle."""

    @pytest.fixture
    def holed(self) -> TokenTable:
        """Ten tokens in blocks 7, 2 and 5, of which 1, 4, 5, 6 and 7 are dead: block 2 is empty."""
        table = TokenTable(S, recycling=False)
        table.add_request("a")
        append(table, "a", [7, 2, 5], 10)
        evict(table, "a", 1, 4, 5, 6, 7)
        return table

    def test_a_new_token_comes_after_the_last_one(self, holed: TokenTable) -> None:
        assert append(holed, "a", [7, 2, 5], 1) == [5 * S + 2]
        assert append(holed, "a", [7, 2, 5, 9], 3) == [5 * S + 3, 9 * S, 9 * S + 1]
        assert int(holed.end[0]) == 14 and int(holed.num_live[0]) == 9
        audit.check_mapping(holed)

    def test_a_block_leaves_from_the_middle(self, holed: TokenTable) -> None:
        ids = audit.live_ids(holed)
        holed.remove_blocks(ints(0), ints(1))
        assert layout(holed, "a") == [0, HOLE, 2, 3, 8, 9, HOLE, HOLE]
        assert holed.block_ids("a") == [7, 5] and live_counts(holed, "a") == [3, 2] and int(holed.end[0]) == 6
        assert holed.slot("a", 9) == 5 * S + 1
        assert append(holed, "a", [7, 5], 1) == [5 * S + 2]
        audit.check_mapping(holed)
        evict(holed, "a", 10)
        audit.check_conservation(ids, holed)

    def test_blocks_come_in_the_middle(self, holed: TokenTable) -> None:
        ids = audit.live_ids(holed)
        holed.insert_blocks(0, 1, [11, 12])
        assert holed.block_ids("a") == [7, 11, 12, 2, 5] and live_counts(holed, "a") == [3, 0, 0, 0, 2]
        assert layout(holed, "a") == [0, HOLE, 2, 3, *[HOLE] * 12, 8, 9, HOLE, HOLE] and int(holed.end[0]) == 18
        audit.check_mapping(holed)
        audit.check_conservation(ids, holed)
        holed.remove_blocks(ints(0, 0, 0), ints(1, 2, 3))
        assert layout(holed, "a") == [0, HOLE, 2, 3, 8, 9, HOLE, HOLE] and int(holed.end[0]) == 6

    def test_room_is_made_for_more_blocks_than_the_row_had(self) -> None:
        table = TokenTable(S, recycling=False, requests=1, tokens=S)
        table.add_request("a")
        append(table, "a", [7], S)
        table.insert_blocks(0, 0, [1, 2, 3])
        assert table.block_ids("a") == [1, 2, 3, 7] and table.slot("a", 3) == 7 * S + 3
        audit.check_mapping(table)

    @pytest.mark.parametrize(
        ("columns", "sentence"),
        [((0,), "must not hold a live token"), ((1, 0), "must not hold a live token"), ((2,), "still being filled")],
    )
    def test_blocks_that_cannot_leave(self, holed: TokenTable, columns: tuple[int, ...], sentence: str) -> None:
        evict(holed, "a", 8, 9)
        before = state(holed)
        with pytest.raises(ValueError, match=sentence):
            holed.remove_blocks(np.zeros(len(columns), dtype=np.int64), ints(*columns))
        assert state(holed) == before

    @pytest.mark.parametrize("column", [-1, 3])
    def test_blocks_cannot_come_behind_the_end(self, holed: TokenTable, column: int) -> None:
        before = state(holed)
        with pytest.raises(ValueError, match="before the end"):
            holed.insert_blocks(0, column, [11])
        assert state(holed) == before

    def test_a_dropped_request_leaves_nothing(self, holed: TokenTable) -> None:
        holed.insert_blocks(0, 1, [11])
        holed.remove_blocks(ints(0), ints(2))
        holed.drop_request("a")
        assert (holed.logical_at == HOLE).all() and not holed.live_in_block.any() and int(holed.end[0]) == 0
        holed.add_request("b")
        assert append(holed, "b", [3], 2) == [3 * S, 3 * S + 1]
        audit.check_mapping(holed)
