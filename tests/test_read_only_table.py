"""Requests with read-only blocks: the table leaves them as they are, and `fill` is dense behind them."""

import numpy as np
import pytest

from vtoken.core import audit
from vtoken.core.history import Holding
from vtoken.core.holdings import PoolUse, holdings, pool_use
from vtoken.core.reclamation import BlockChange, CopyOut, Due, FillReclamation
from vtoken.core.token_table import HOLE, TokenTable

S = 4


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def table_with(length: int, prefix: int = 0, req_id: str = "a", first_block: int = 10) -> TokenTable:
    """A request of so many tokens in blocks 10, 11, ..., the first ``prefix`` of them found in the cache."""
    table = TokenTable(S)
    table.add_request(req_id, prefix)
    sync(table, req_id, length - prefix, list(range(first_block, first_block - (-length // S))))
    return table


def sync(table: TokenTable, req_id: str, count: int, blocks: list[int]) -> list[int]:
    rows = table.rows([req_id])
    return table.sync_new_tokens(rows, np.array([blocks], dtype=np.int32), ints(len(blocks)), ints(count)).tolist()


def cells(table: TokenTable, req_id: str = "a") -> list[int]:
    row = table.rows([req_id])[0]
    return table.logical_at[row, : table.num_blocks[row] * S].tolist()


def kill(table: TokenTable, *tokens: int, req_id: str = "a") -> None:
    table.evict_tokens(np.repeat(table.rows([req_id]), len(tokens)), ints(*tokens))


class TestPrefix:
    def test_tokens_from_the_cache_are_there_before_the_first_forward(self) -> None:
        table = TokenTable(S)
        table.add_request("a", prefix=8)
        assert sync(table, "a", 3, [5, 6, 7]) == [28, 29, 30]
        assert cells(table) == [*range(11), HOLE]
        row = table.rows(["a"])[0]
        assert (table.length[row], table.num_live[row], table.end[row], table.num_blocks[row]) == (11, 11, 11, 3)
        assert [table.slot("a", t) for t in (0, 7, 8)] == [20, 27, 28]
        audit.check_mapping(table)

    def test_a_request_that_ends_before_its_first_forward_leaves_a_clean_row(self) -> None:
        table = TokenTable(S, requests=1)
        table.add_request("a", prefix=40)
        table.drop_request("a")
        table.add_request("b")
        assert sync(table, "b", 2, [3]) == [12, 13]
        audit.check_mapping(table)

    def test_a_prefix_longer_than_the_table_was_wide(self) -> None:
        table = TokenTable(S, tokens=8)
        table.add_request("a", prefix=40)
        sync(table, "a", 1, list(range(1, 12)))
        assert cells(table) == [*range(41), HOLE, HOLE, HOLE]


class TestReadOnly:
    def test_the_next_token_goes_behind_the_read_only_blocks(self) -> None:
        table = table_with(11)
        table.keep_read_only(table.rows(["a"])[0], 2)
        kill(table, 1, 5)
        assert table.dense_end(table.rows(["a"])).tolist() == [11]
        assert sync(table, "a", 1, [10, 11, 12]) == [12 * S + 3]
        assert cells(table) == [0, HOLE, 2, 3, 4, HOLE, 6, 7, 8, 9, 10, 11]
        audit.check_dense(table, table.rows(["a"]))

    def test_a_hole_behind_them_is_recycled(self) -> None:
        table = table_with(11)
        table.keep_read_only(table.rows(["a"])[0], 2)
        kill(table, 1, 9)
        assert table.dense_end(table.rows(["a"])).tolist() == [10]
        assert sync(table, "a", 1, [10, 11, 12]) == [12 * S + 1]
        assert cells(table) == [0, HOLE, 2, 3, 4, 5, 6, 7, 8, 11, 10, HOLE]

    def test_a_chunk_is_appended_behind_them(self) -> None:
        table = table_with(9)
        table.keep_read_only(table.rows(["a"])[0], 2)
        kill(table, 1, 2)
        assert sync(table, "a", 3, [10, 11, 12]) == [12 * S + 1, 12 * S + 2, 12 * S + 3]

    def test_nothing_is_moved_into_them(self) -> None:
        table = table_with(11)
        table.keep_read_only(table.rows(["a"])[0], 1)
        kill(table, 1)
        from vtoken.core.token_table import Moves

        with pytest.raises(ValueError, match="must not lie in a read-only block"):
            table.apply_moves(Moves(table.rows(["a"]), ints(10), ints(1)))

    @pytest.mark.parametrize("blocks", [-1, 4])
    def test_only_held_blocks_can_be_read_only(self, blocks: int) -> None:
        table = table_with(11)
        with pytest.raises(ValueError, match="only blocks that a request holds"):
            table.keep_read_only(table.rows(["a"])[0], blocks)


class TestLeaving:
    def reclaim(self, table: TokenTable, evicted: int, copy: CopyOut | None = None) -> object:
        rows = table.rows(["a"])
        copies = {} if copy is None else {int(rows[0]): copy}
        reported = rows if copy is None or copy.keep else ints()
        due = Due(rows, ints(evicted), ints(1), copy_outs=copies, reported=reported)
        result = FillReclamation(table).reclaim(due)
        audit.check_mapping(table)
        return result

    def test_all_survivors_are_copied_out(self) -> None:
        table = table_with(14)  # blocks 10 ... 13
        table.keep_read_only(table.rows(["a"])[0], 3)
        kill(table, 2, 3, 4, 5, 6, 7, 8, 9)
        done = self.reclaim(table, 8, CopyOut(0, [20]))
        assert table.block_ids("a") == [20, 13]
        assert cells(table) == [0, 1, 10, 11, 12, 13, HOLE, HOLE]
        assert done.sources.tolist() == [40, 41, 50, 51] and done.destinations.tolist() == [80, 81, 82, 83]
        assert (done.moved, done.changes, done.reported.tolist()) == (4, {}, [])
        assert table.read_only[table.rows(["a"])].tolist() == [0]

    def test_shared_blocks_stay_and_what_is_behind_them_is_copied_out(self) -> None:
        table = table_with(14)
        row = int(table.rows(["a"])[0])
        table.keep_read_only(row, 3)
        kill(table, 2, 5, 6, 7, 9)
        done = self.reclaim(table, 5, CopyOut(2, [20, 21]))
        assert table.block_ids("a") == [10, 11, 20, 13]
        assert cells(table) == [0, 1, HOLE, 3, 4, HOLE, HOLE, HOLE, 8, 10, 11, HOLE, 12, 13, HOLE, HOLE]
        assert done.changes == {row: BlockChange([12], [20])}
        assert (done.reported.tolist(), done.returned.tolist()) == ([row], [14 - 13])

    def test_a_shared_block_without_a_live_token_leaves(self) -> None:
        table = table_with(14)
        row = int(table.rows(["a"])[0])
        table.keep_read_only(row, 3)
        kill(table, 4, 5, 6, 7)
        done = self.reclaim(table, 4)
        assert table.block_ids("a") == [10, 12, 13] and table.read_only[row] == 2
        assert done.changes == {row: BlockChange([11], [])}
        assert (done.reported.tolist(), done.returned.tolist()) == ([row], [14 - 10])

    def test_a_copy_for_which_the_blocks_do_not_suffice_is_left_alone(self) -> None:
        table = table_with(14)
        row = int(table.rows(["a"])[0])
        table.keep_read_only(row, 3)
        kill(table, 2)
        done = self.reclaim(table, 1, CopyOut(1, [20]))
        assert table.block_ids("a") == [10, 11, 12, 13] and table.read_only[row] == 3
        assert (done.changes, done.moved, done.returned.tolist()) == ({}, 0, [0])

    def test_blocks_that_are_writable_again_are_filled_in_place(self) -> None:
        table = table_with(14)
        row = int(table.rows(["a"])[0])
        table.keep_read_only(row, 3)
        kill(table, 1, 2, 5)
        table.keep_read_only(row, 0)
        done = self.reclaim(table, 0, CopyOut(0, []))
        assert table.block_ids("a") == [10, 11, 12]
        assert cells(table) == [0, 12, 13, 3, 4, HOLE, 6, 7, 8, 9, 10, 11]
        assert (done.moved, done.changes, done.rows.tolist()) == (2, {}, [row])


class TestSharedBlocks:
    def two(self) -> TokenTable:
        table = table_with(10)
        table.add_request("b", prefix=8)
        sync(table, "b", 1, [10, 11, 15])
        return table

    def test_the_same_tokens_in_blocks_that_nobody_writes(self) -> None:
        table = self.two()
        audit.check_mapping(table)
        kill(table, 1, 5)
        table.keep_read_only(table.rows(["a"])[0], 2)
        audit.check_mapping(table)

    def test_a_block_that_one_of_them_may_write(self) -> None:
        table = self.two()
        kill(table, 1, 5)
        with pytest.raises(audit.InvariantViolation, match="block 10 is held by a and by b, and one of them may write"):
            audit.check_mapping(table)

    def test_a_slot_counts_once_and_as_long_as_its_token_lives_for_one_of_them(self) -> None:
        table = self.two()
        assert pool_use(table) == PoolUse(4, 16, live=8 + 2 + 1, dead=0)
        assert pool_use(table, "b") == PoolUse(3, 12, live=9, dead=0)
        assert pool_use(table, "") == PoolUse(0, 0, 0, 0) and pool_use(table, "").waste == 0.0
        assert pool_use(table).waste == 1 - 11 / 16
        kill(table, 1, 5)
        assert pool_use(table) == PoolUse(4, 16, live=11, dead=0)
        assert pool_use(table, "a") == PoolUse(3, 12, live=8, dead=2)
        kill(table, 1, req_id="b")
        assert pool_use(table) == PoolUse(4, 16, live=10, dead=1)
        assert holdings(table).listed() == [
            Holding("a", [10, 11, 12], [3, 3, 2]),
            Holding("b", [10, 11, 15], [3, 4, 1]),
        ]

    def test_different_tokens(self) -> None:
        table = table_with(10)
        table.add_request("b", prefix=8)
        sync(table, "b", 1, [11, 10, 15])
        with pytest.raises(audit.InvariantViolation, match="held by a and by b for different tokens"):
            audit.check_mapping(table)

    def test_a_block_that_is_still_being_filled(self) -> None:
        table = table_with(10)
        table.add_request("b", prefix=8)
        sync(table, "b", 2, [10, 11, 12])
        with pytest.raises(audit.InvariantViolation, match="block 12 is held by a and by b, and one of them may write"):
            audit.check_mapping(table)
