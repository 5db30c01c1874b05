"""Hole filling: which tokens move where, how many blocks stay, and that no plan does more than it must."""

import numpy as np
import pytest

from vtoken.core import audit
from vtoken.core.planner import Plan, Snapshot, plan_fill
from vtoken.core.reclamation import FillReclamation
from vtoken.core.token_table import HOLE, TokenTable

S = 4


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def snapshot(*layouts: list[int | None]) -> Snapshot:
    """One row per request: the token at each physical position, None for a hole."""
    width = max(map(len, layouts))
    logical_at = np.full((len(layouts), width), HOLE, dtype=np.int32)
    for row, layout in enumerate(layouts):
        logical_at[row, : len(layout)] = [HOLE if token is None else token for token in layout]
    live = (logical_at != HOLE).sum(axis=1).astype(np.int64)
    return Snapshot(10 + np.arange(len(layouts), dtype=np.int64), logical_at, live)


def pairs(plan: Plan) -> list[tuple[int, int, int]]:
    moves = plan.moves
    return list(zip(moves.rows.tolist(), moves.sources.tolist(), moves.destinations.tolist(), strict=True))


def holed_table(seed: int, requests: int = 6) -> tuple[TokenTable, np.ndarray, np.ndarray]:
    """Dense requests that have just forgotten random tokens: the table, rows, and how many each forgot."""
    rng = np.random.default_rng(seed)
    table = TokenTable(S, requests=2, tokens=8)
    evicted = []
    for n in range(requests):
        length = int(rng.integers(2, 40))
        row = table.add_request(f"r{n}")
        blocks = np.arange(100 * n, 100 * n + -(-length // S), dtype=np.int32)[None]
        table.sync_new_tokens(ints(row), blocks, ints(blocks.shape[1]), ints(length))
        victims = rng.permutation(length)[: int(rng.integers(1, length))]
        table.evict_tokens(np.full(len(victims), row), victims.astype(np.int64))
        evicted.append(len(victims))
    return table, table.rows(f"r{n}" for n in range(requests)), ints(*evicted)


class TestPlanFill:
    def test_the_last_tokens_move_into_the_lowest_holes(self) -> None:
        plan = plan_fill(snapshot([0, None, None, 3, None, 5, 6, 7, 8, 9, None, None]), ints(0), S)
        assert pairs(plan) == [(10, 7, 1), (10, 8, 2), (10, 9, 4)]
        assert plan.keep_blocks.tolist() == [2]

    def test_one_hole_stays_for_the_token_to_come(self) -> None:
        plan = plan_fill(snapshot([0, None, None, 3, None, 5, 6, 7, 8, 9, None, None]), ints(1), S)
        assert pairs(plan) == [(10, 8, 1), (10, 9, 2)]
        assert plan.keep_blocks.tolist() == [2]

    def test_a_block_more_stays_if_the_token_to_come_needs_it(self) -> None:
        layout = [0, None, 2, 3, 4, 5, 6, 7, 8, None, None, None]
        assert plan_fill(snapshot(layout), ints(0), S).keep_blocks.tolist() == [2]
        with_next = plan_fill(snapshot(layout), ints(1), S)
        assert with_next.keep_blocks.tolist() == [3]
        assert pairs(with_next) == []

    def test_one_eviction_and_one_token_move_nothing(self) -> None:
        for hole in range(8):
            layout: list[int | None] = list(range(8))
            layout[hole] = None
            plan = plan_fill(snapshot(layout), ints(1), S)
            assert pairs(plan) == [] and plan.keep_blocks.tolist() == [2]

    def test_holes_at_the_end_move_nothing(self) -> None:
        plan = plan_fill(snapshot([0, 1, 2, 3, 4, None, None, None]), ints(1), S)
        assert pairs(plan) == [] and plan.keep_blocks.tolist() == [2]

    def test_a_request_that_forgot_everything_keeps_nothing(self) -> None:
        plan = plan_fill(snapshot([None, None, None, None]), ints(0), S)
        assert pairs(plan) == [] and plan.keep_blocks.tolist() == [0]

    def test_requests_of_a_batch_do_not_see_each_other(self) -> None:
        layouts: list[list[int | None]] = [
            [None, 1, 2, 3, 4, 5],
            [0, 1, None, None],
            [None, None, 2, 3, None, None, 6, 7, 8],
            [0],
        ]
        batch = plan_fill(snapshot(*layouts), ints(0, 1, 0, 1), S)
        assert pairs(batch) == [(10, 5, 0), (12, 6, 0), (12, 7, 1), (12, 8, 4)]
        assert batch.keep_blocks.tolist() == [2, 1, 2, 1]

    def test_no_request_at_all(self) -> None:
        empty = Snapshot(ints(), np.empty((0, 0), dtype=np.int32), ints())
        plan = plan_fill(empty, ints(), S)
        assert pairs(plan) == [] and plan.keep_blocks.tolist() == []

    @pytest.mark.parametrize("seed", range(60))
    def test_dense_afterwards_with_the_fewest_moves(self, seed: int) -> None:
        table, rows, evicted = holed_table(seed)
        next_tokens = np.random.default_rng(seed).integers(0, 2, len(rows))
        ids = audit.live_ids(table)
        width = int(table.num_blocks[rows].max()) * S
        before = table.logical_at[rows, :width].copy()
        plan = plan_fill(Snapshot(rows, before, table.num_live[rows]), next_tokens, S)
        audit.check_plan(plan, table)

        extent = table.num_live[rows] + next_tokens
        for n, row in enumerate(rows.tolist()):
            stragglers = np.flatnonzero(before[n, extent[n] :] != HOLE) + extent[n]
            mine = plan.moves.rows == row
            assert plan.moves.sources[mine].tolist() == stragglers.tolist(), "a token moved that had to stay"
            assert mine.sum() <= max(evicted[n] - next_tokens[n], 0)
        assert plan.keep_blocks.tolist() == (-(-extent // S)).tolist()

        FillReclamation(table).commit(plan)
        audit.check_conservation(ids, table)
        audit.check_mapping(table)
        for n, row in enumerate(rows.tolist()):
            holes = (table.logical_at[row, : extent[n]] == HOLE).sum()
            assert holes == next_tokens[n], "the positions that the next forward needs full are not"
            assert table.num_blocks[row] == min(-(-extent[n] // S), -(-(extent[n] - next_tokens[n] + evicted[n]) // S))


class TestFillReclamation:
    def test_a_request_in_steady_state_is_not_looked_at(self) -> None:
        table, rows, _ = holed_table(3, requests=2)
        plan = FillReclamation(table).plan(rows, ints(1, 1), ints(1, 1))
        assert len(plan.rows) == 0 and len(plan.moves) == 0

    def test_only_the_requests_that_forgot_more_are_planned(self) -> None:
        table = TokenTable(S)
        for req_id, blocks in (("a", [[0, 1]]), ("b", [[2, 3]])):
            row = table.add_request(req_id)
            table.sync_new_tokens(ints(row), np.array(blocks, dtype=np.int32), ints(2), ints(8))
        rows = table.rows("ab")
        table.evict_tokens(rows[[0, 1, 1, 1, 1]], ints(3, 0, 2, 4, 5))
        plan = FillReclamation(table).plan(rows, ints(1, 4), ints(1, 1))
        assert plan.rows.tolist() == [int(rows[1])]
        assert pairs(plan) == [(int(rows[1]), 6, 0), (int(rows[1]), 7, 2)]
        assert plan.keep_blocks.tolist() == [2]
        FillReclamation(table).commit(plan)
        assert table.logical_at[rows[1], :8].tolist() == [6, 1, 7, 3, HOLE, HOLE, HOLE, HOLE]

    def test_planning_writes_nothing(self) -> None:
        table, rows, evicted = holed_table(5)
        before = table.logical_at.copy(), table.physical_of.copy(), table.num_blocks.copy()
        FillReclamation(table).plan(rows, evicted, np.zeros_like(evicted))
        after = table.logical_at, table.physical_of, table.num_blocks
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))

    def test_a_stale_plan_is_refused_by_the_table(self) -> None:
        table, rows, evicted = holed_table(7)
        reclamation = FillReclamation(table)
        plan = reclamation.plan(rows, evicted, np.zeros_like(evicted))
        assert len(plan.moves) > 0
        reclamation.commit(plan)
        with pytest.raises(ValueError, match="move"):
            reclamation.commit(plan)
