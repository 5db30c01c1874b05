"""Hole filling: which tokens move where, how many blocks stay, and that no plan does more than it must."""

from dataclasses import dataclass

import numpy as np
import pytest

from vtoken.core import audit
from vtoken.core.planner import Packing, Plan, Snapshot, choose_packings, plan_fill, plan_packing
from vtoken.core.reclamation import Due, FillReclamation
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
    return Snapshot(10 + np.arange(len(layouts), dtype=np.int64), logical_at, np.zeros_like(live), live)


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
        empty = Snapshot(ints(), np.empty((0, 0), dtype=np.int32), ints(), ints())
        plan = plan_fill(empty, ints(), S)
        assert pairs(plan) == [] and plan.keep_blocks.tolist() == []

    @pytest.mark.parametrize("seed", range(60))
    def test_dense_afterwards_with_the_fewest_moves(self, seed: int) -> None:
        table, rows, evicted = holed_table(seed)
        next_tokens = np.random.default_rng(seed).integers(0, 2, len(rows))
        ids = audit.live_ids(table)
        width = int(table.num_blocks[rows].max()) * S
        before = table.logical_at[rows, :width].copy()
        plan = plan_fill(Snapshot(rows, before, np.zeros_like(rows), table.num_live[rows]), next_tokens, S)
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
        done = FillReclamation(table).reclaim(Due(rows, ints(1, 1), ints(1, 1)))
        assert (len(done.rows), len(done.sources), done.moved, done.changes) == (0, 0, 0, {})

    def test_only_the_requests_that_forgot_more_are_planned(self) -> None:
        table = TokenTable(S)
        for req_id, blocks in (("a", [[0, 1]]), ("b", [[2, 3]])):
            row = table.add_request(req_id)
            table.sync_new_tokens(ints(row), np.array(blocks, dtype=np.int32), ints(2), ints(8))
        rows = table.rows("ab")
        table.evict_tokens(rows[[0, 1, 1, 1, 1]], ints(3, 0, 2, 4, 5))
        done = FillReclamation(table).reclaim(Due(rows, ints(1, 4), ints(1, 1)))
        assert (done.rows.tolist(), done.moved, table.num_blocks[rows].tolist()) == ([], 2, [2, 2])
        assert done.sources.tolist() == [3 * S + 2, 3 * S + 3] and done.destinations.tolist() == [2 * S, 2 * S + 2]
        assert table.logical_at[rows[1], :8].tolist() == [6, 1, 7, 3, HOLE, HOLE, HOLE, HOLE]

    def test_planning_writes_nothing(self) -> None:
        table, rows, evicted = holed_table(5)
        before = table.logical_at.copy(), table.physical_of.copy(), table.num_blocks.copy()
        FillReclamation(table).plan(rows, np.zeros_like(evicted))
        after = table.logical_at, table.physical_of, table.num_blocks
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))

    def test_a_stale_plan_is_refused_by_the_table(self) -> None:
        table, rows, evicted = holed_table(7)
        reclamation = FillReclamation(table)
        plan = reclamation.plan(rows, np.zeros_like(evicted))
        assert len(plan.moves) > 0
        reclamation.commit(plan)
        with pytest.raises(ValueError, match="move"):
            reclamation.commit(plan)


class TestChoosePackings:
    def choose(
        self, live: list[list[int]], full: list[int] | None = None, *, sources: int = 8, destinations: int = 99
    ) -> list[tuple[int, list[int], int]]:
        counts = np.array(live, dtype=np.int32)
        full_blocks = ints(*(full or [counts.shape[1]] * len(counts)))
        chosen = choose_packings(10 + np.arange(len(counts)), counts, full_blocks, sources, destinations, S)
        return [(p.row, p.sources.tolist(), p.destinations) for p in chosen]

    def test_the_sparsest_blocks_as_many_as_pay(self) -> None:
        assert self.choose([[4, 1, 2, 4, 1]]) == [(10, [1, 2, 4], 1)]

    def test_fewer_if_that_frees_as_many(self) -> None:
        assert self.choose([[2, 2, 3, 3]]) == [(10, [0, 1], 1)]

    def test_blocks_that_do_not_become_fewer_stay(self) -> None:
        assert self.choose([[3, 3, 3]]) == [] and self.choose([[1, 4, 4]]) == [] and self.choose([[3, 2, 4, 4]]) == []

    def test_more_blocks_may_pay_where_two_do_not(self) -> None:
        assert self.choose([[3, 3, 3, 3]]) == [(10, [0, 1, 2, 3], 3)]

    def test_a_block_that_is_being_filled_is_no_source(self) -> None:
        assert self.choose([[4, 1, 1]], [2]) == [] and self.choose([[1, 1, 1]], [2]) == [(10, [0, 1], 1)]
        assert self.choose([[1, 1, 1]], [0]) == []

    def test_no_more_sources_than_allowed(self) -> None:
        assert self.choose([[1, 1, 1, 1, 1, 1]], sources=3) == [(10, [0, 1, 2], 1)]
        assert self.choose([[3, 3, 3, 3]], sources=3) == []

    def test_no_more_destinations_than_granted_over_all_requests(self) -> None:
        live = [[1, 1, 4, 4], [1, 1, 1, 4], [0, 1, 1, 2]]
        assert self.choose(live) == [(12, [0, 1, 2, 3], 1), (11, [0, 1, 2], 1), (10, [0, 1], 1)]
        assert self.choose(live, destinations=2) == [(12, [0, 1, 2, 3], 1), (11, [0, 1, 2], 1)]
        assert self.choose(live, destinations=0) == []

    def test_a_smaller_packing_where_the_best_has_no_room(self) -> None:
        live = [[2, 2, 2, 2, 2, 2]]
        assert self.choose(live) == [(10, [0, 1, 2, 3, 4, 5], 3)]
        assert self.choose(live, destinations=2) == [(10, [0, 1, 2, 3], 2)]

    def test_a_request_with_less_than_a_block_of_dead_slots_is_left_alone(self) -> None:
        assert self.choose([[3, 3, 4, 3]]) == [] and self.choose([[4, 4]]) == []


class TestPlanPacking:
    def test_in_logical_order_from_the_first_source_on(self) -> None:
        """Blocks 1 and 3 go into one that stands before them; what they hold is put in logical order."""
        before = [0, 1, 2, 3, 9, HOLE, HOLE, 5, 10, 11, 12, 13, HOLE, 4, HOLE, HOLE]
        with_destination = np.array([*before[:4], *[HOLE] * 4, *before[4:]], dtype=np.int32)
        moves = plan_packing(Packing(7, ints(1, 3), 1), with_destination, S)
        assert moves.rows.tolist() == [7, 7, 7]
        assert moves.sources.tolist() == [17, 11, 8] and moves.destinations.tolist() == [4, 5, 6]


@dataclass(frozen=True)
class Burst:
    """One request of whole blocks that forgot tokens, and what packing and filling would do about it.

    Attributes:
        packed, filled, alive: tokens that packing moves, that filling moves, and that there are.
        share: of the slots of the packed blocks, how many are alive.
        returned: blocks that either gives back.
    """

    packed: int
    filled: int
    alive: int
    share: float
    returned: int


def burst(dead: np.ndarray, size: int) -> Burst:
    """``dead`` says of every token whether it is."""
    held = len(dead) // size
    logical_at = np.where(dead, HOLE, np.arange(len(dead))).astype(np.int32)
    live_in_block = (~dead).reshape(held, size).sum(axis=1).astype(np.int32)
    (packing,) = choose_packings(ints(0), live_in_block[None], ints(held), held, held, size)
    packed = int(live_in_block[packing.sources].sum())
    returned = len(packing.sources) - packing.destinations
    plan = plan_fill(Snapshot(ints(0), logical_at[None], ints(0), ints(int((~dead).sum()))), ints(0), size)
    assert held - int(plan.keep_blocks[0]) == returned, "packing all sparse blocks leaves as few as filling"
    return Burst(packed, len(plan.moves), int((~dead).sum()), packed / (len(packing.sources) * size), returned)


class TestFillAgainstPack:
    """For the same blocks of the same table: packing copies what lives in them, filling only what lives behind.

    Of m packed blocks with a share u alive, u * m * S tokens move and (1 - u) * m blocks come back. To give back as
    many, filling empties as many, and if the dead lie anywhere these hold no more than u of their slots alive.
    """

    @pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
    @pytest.mark.parametrize("blocks", [16, 64])
    def test_random_victims(self, blocks: int, share: float) -> None:
        """Over many bursts: by how much the last blocks happen to be fuller than the others is chance."""
        rng, size = np.random.default_rng(blocks), 16
        bursts = [burst(rng.random(blocks * size) < share, size) for _ in range(100)]
        bound = sum((1 - b.share) * b.packed + size for b in bursts)
        assert 0 < sum(b.filled for b in bursts) <= bound
        assert sum(b.alive for b in bursts) > bound, "a plan that moves every token should not pass"
        assert sum(b.packed for b in bursts) > bound, "nor should packing itself"

    def test_any_victims(self) -> None:
        """Whatever died, filling moves no more tokens than the slots that come back, and one block's worth."""
        rng = np.random.default_rng(3)
        for _ in range(300):
            chance = np.repeat(rng.random(12) ** rng.integers(1, 4), S)
            dead = rng.random(12 * S) < chance
            dead[:S] = True  # so that there is something to gain
            one = burst(dead | (np.arange(12 * S) % 12 == 5), S)
            assert one.filled <= one.returned * S + S - 1

    def test_where_the_dead_are_all_in_front_filling_moves_more(self) -> None:
        """The first comparison needs victims anywhere: here four blocks keep one token each, before full ones."""
        dead = np.arange(8 * S) % S > 0
        dead[4 * S :] = False
        assert burst(dead, S) == Burst(packed=4, filled=12, alive=20, share=0.25, returned=3)
