"""Long random lives of many requests over one pool, in which every slot carries the token that it should hold.

The pool is a plain array: a token's mark is written where the table says a new token goes, copied when a move is
made, and overwritten when a freed block gets another owner. So a token that the table misplaces is not there.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vtoken.core import audit
from vtoken.core.audit import InvariantViolation
from vtoken.core.holdings import pool_use
from vtoken.core.planner import Plan
from vtoken.core.ragged import offsets_of
from vtoken.core.reclamation import FillReclamation
from vtoken.core.selection import select_victims
from vtoken.core.token_table import HOLE, Moves, TokenTable

S = 4
BLOCKS = 40
FREE = (-1, -1)


def ints(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


class World:
    """A token table, a pool of marked slots, a free list, and what ought to be true of them."""

    def __init__(self, table: TokenTable | None = None) -> None:
        self.table = table or TokenTable(S, requests=2, tokens=2 * S)
        self.reclamation = FillReclamation(self.table)
        self.pool = np.full((BLOCKS * S, 2), FREE, dtype=np.int64)
        self.free = list(range(BLOCKS))
        self.blocks: dict[str, list[int]] = {}
        self.live: dict[str, set[int]] = {}
        self.length: Counter[str] = Counter()
        self.holes: Counter[str] = Counter()
        self.mark: dict[str, int] = {}
        self.seen = 0

    # -- what happens to requests -----------------------------------------------------------------------------

    def start(self, req_id: str) -> None:
        self.table.add_request(req_id)
        self.seen += 1
        self.mark[req_id] = self.seen
        self.blocks[req_id], self.live[req_id] = [], set()
        self.length[req_id] = self.holes[req_id] = 0

    def missing_blocks(self, req_id: str, count: int) -> int:
        return max(-(-(len(self.live[req_id]) + count) // S) - len(self.blocks[req_id]), 0)

    def write(self, counts: dict[str, int]) -> None:
        """New tokens for several requests in one step."""
        for req_id, count in counts.items():
            needed = self.missing_blocks(req_id, count)
            self.blocks[req_id] += [self.free.pop(0) for _ in range(needed)]
        ids = list(counts)
        rows, num_blocks = self.table.rows(ids), ints([len(self.blocks[r]) for r in ids])
        block_table = np.full((len(ids), int(num_blocks.max()) + 1), 10**6, dtype=np.int32)
        for n, req_id in enumerate(ids):
            block_table[n, : num_blocks[n]] = self.blocks[req_id]
        tokens = [t for r in ids for t in range(self.length[r], self.length[r] + counts[r])]
        owners = [r for r in ids for _ in range(counts[r])]
        slots = self.table.sync_new_tokens(rows, block_table, num_blocks, ints([counts[r] for r in ids]))
        assert len(slots) == len(tokens)
        for req_id, token, slot in zip(owners, tokens, slots.tolist(), strict=True):
            self.pool[slot] = self.mark[req_id], token
            self.live[req_id].add(token)
        for req_id, count in counts.items():
            self.length[req_id] += count
            self.holes[req_id] = max(self.holes[req_id] - count, 0)
        audit.check_dense(self.table, self.table.rows(r for r in ids if not self.holes[r]))

    def evict(self, victims: dict[str, list[int]]) -> None:
        pairs = [(r, t) for r, tokens in victims.items() for t in tokens]
        rows = self.table.rows(r for r, _ in pairs)
        self.table.evict_tokens(rows, ints([t for _, t in pairs]))
        for req_id, tokens in victims.items():
            self.live[req_id] -= set(tokens)
            self.holes[req_id] += len(tokens)

    def choose(self, counts: dict[str, int], priority: np.ndarray, sinks: int, recent: int) -> dict[str, list[int]]:
        """Let the selection pick the victims, from tokens in the order of their slots."""
        ids = list(counts)
        rows = self.table.rows(ids)
        tokens = [at[at != HOLE] for at in (self.table.logical_at[row] for row in rows)]
        live = ints([len(t) for t in tokens])
        flat = np.concatenate(tokens).astype(np.int64)
        chosen = select_victims(
            np.resize(priority, len(flat)),
            flat,
            live,
            self.table.length[rows],
            ints(list(counts.values())),
            sinks,
            recent,
        )
        bounds = offsets_of(ints(list(counts.values())))
        return {r: chosen[bounds[n] : bounds[n + 1]].tolist() for n, r in enumerate(ids)}

    def fill(self, next_tokens: dict[str, int]) -> int:
        """Make requests dense for their next forward. Returns the number of tokens moved."""
        ids = list(next_tokens)
        before, rows = audit.live_ids(self.table), self.table.rows(ids)
        plan = self.plan(rows, ints([self.holes[r] for r in ids]), ints(list(next_tokens.values())))
        audit.check_plan(plan, self.table)
        self.copy(plan.moves)
        self.reclamation.commit(self.committed(plan))
        audit.check_conservation(before, self.table)
        for req_id, coming in next_tokens.items():
            kept = len(self.table.block_ids(req_id))
            if self.holes[req_id] > coming:
                assert kept == min(-(-(len(self.live[req_id]) + coming) // S), len(self.blocks[req_id]))
                self.holes[req_id] = coming
            self.free += self.blocks[req_id][kept:]
            del self.blocks[req_id][kept:]
        if not any(next_tokens.values()):
            audit.check_dense(self.table, rows)
        return len(plan.moves)

    def drop(self, req_id: str) -> None:
        self.table.drop_request(req_id)
        self.free += self.blocks.pop(req_id)
        del self.live[req_id], self.length[req_id], self.holes[req_id], self.mark[req_id]

    # -- what a mutant changes --------------------------------------------------------------------------------

    def plan(self, rows: np.ndarray, evicted: np.ndarray, next_tokens: np.ndarray) -> Plan:
        moving = evicted > next_tokens
        return self.reclamation.plan(rows[moving], next_tokens[moving])

    def copy(self, moves: Moves) -> None:
        sources = self.table.slots(moves.rows, moves.sources)
        self.pool[self.table.slots(moves.rows, moves.destinations)] = self.pool[sources]

    def committed(self, plan: Plan) -> Plan:
        return plan

    # -- what must be true ------------------------------------------------------------------------------------

    def check(self) -> None:
        audit.check_mapping(self.table)
        assert set(self.table.req_ids) == set(self.live)
        for req_id, live in self.live.items():
            assert self.table.live_tokens(req_id).tolist() == sorted(live)
            assert self.table.block_ids(req_id) == self.blocks[req_id]
            marks = self.pool[[self.table.slot(req_id, t) for t in sorted(live)]].tolist()
            assert marks == [[self.mark[req_id], t] for t in sorted(live)], f"{req_id} lost K/V"
            row = int(self.table.rows([req_id])[0])
            slots = [self.table.slot(req_id, t) for t in live]
            per_block = Counter(slot // S for slot in slots)
            counted = self.table.live_in_block[row, : len(self.blocks[req_id])].tolist()
            assert counted == [per_block[block] for block in self.blocks[req_id]]
            assert (int(self.table.length[row]), int(self.table.num_live[row])) == (self.length[req_id], len(live))
        held = [block for blocks in self.blocks.values() for block in blocks]
        assert sorted(held + self.free) == list(range(BLOCKS)), "a block was lost or doubled"
        tokens = sum(map(len, self.live.values()))
        assert pool_use(self.table).waste == (1 - tokens / (len(held) * S) if held else 0.0)


class TableMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.names = 0

    def pick(self, data: st.DataObject, candidates: list[str]) -> list[str]:
        return data.draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=4, unique=True), "requests")

    def with_tokens(self, least: int = 1) -> list[str]:
        return [r for r, live in self.world.live.items() if len(live) >= least]

    @precondition(lambda self: len(self.world.live) < 8)
    @rule(reuse=st.booleans(), count=st.integers(1, 3 * S))
    def arrive(self, reuse: bool, count: int) -> None:
        self.names += not reuse
        req_id = f"r{self.names}"
        if req_id in self.world.live:
            return
        self.world.start(req_id)
        if self.world.missing_blocks(req_id, count) <= len(self.world.free):
            self.world.write({req_id: count})

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), count=st.integers(1, 3 * S))
    def prefill(self, data: st.DataObject, count: int) -> None:
        world = self.world
        (req_id, *_) = self.pick(data, list(world.live))
        if count > 1:
            world.fill({req_id: 0})
        if world.missing_blocks(req_id, count) <= len(world.free):
            world.write({req_id: count})

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        world = self.world
        chosen = self.pick(data, list(world.live))
        if sum(world.missing_blocks(r, 1) for r in chosen) <= len(world.free):
            world.write(dict.fromkeys(chosen, 1))

    @precondition(lambda self: self.with_tokens())
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        victims = {
            req_id: data.draw(st.lists(st.sampled_from(sorted(self.world.live[req_id])), min_size=1, unique=True))
            for req_id in self.pick(data, self.with_tokens())
        }
        self.world.evict(victims)

    @precondition(lambda self: self.with_tokens(4))
    @rule(
        data=st.data(),
        one=st.booleans(),
        sinks=st.integers(0, 1),
        recent=st.integers(0, 1),
        priority=st.lists(st.integers(-3, 3), min_size=1, max_size=9),
    )
    def forget_by_priority(self, data: st.DataObject, one: bool, sinks: int, recent: int, priority: list[int]) -> None:
        world = self.world
        chosen = self.pick(data, self.with_tokens(4))
        most = 1 if one else 2
        counts = {req_id: data.draw(st.integers(1, most), "count") for req_id in chosen}
        victims = world.choose(counts, np.array(priority, dtype=np.float64), sinks, recent)
        for req_id, tokens in victims.items():
            assert len(tokens) == counts[req_id] and set(tokens) <= world.live[req_id]
            assert all(sinks <= t < world.length[req_id] - recent for t in tokens)
        world.evict(victims)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        coming = {r: data.draw(st.integers(0, 1), "next") for r in self.pick(data, list(self.world.live))}
        holes = sum(self.world.holes[r] for r in coming)
        assert self.world.fill(coming) <= holes, "more tokens moved than were forgotten"

    @precondition(lambda self: self.with_tokens(2))
    @rule(data=st.data(), steps=st.integers(1, 12))
    def steady_state(self, data: st.DataObject, steps: int) -> None:
        """One out, one in: no block, no move."""
        world = self.world
        (req_id, *_) = self.pick(data, self.with_tokens(2))
        world.fill({req_id: 0})
        held = list(world.blocks[req_id])
        for _ in range(steps):
            world.evict({req_id: [data.draw(st.sampled_from(sorted(world.live[req_id])), "victim")]})
            assert world.fill({req_id: 1}) == 0
            world.write({req_id: 1})
            assert world.blocks[req_id] == held
        audit.check_dense(world.table, world.table.rows([req_id]))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        for req_id in self.pick(data, list(self.world.live))[:2]:
            self.world.drop(req_id)

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        for req_id in list(self.world.live):
            self.world.drop(req_id)
        self.world.check()
        assert len(self.world.free) == BLOCKS


TableMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTableMachine = TableMachine.TestCase


# -- controls: the same world with one fault in it ----------------------------------------------------------------


def play(world: World) -> None:
    """Two requests, a burst of evictions each, holes filled; checked after every act."""
    for req_id, count in (("a", 4 * S), ("b", 3 * S - 1)):
        world.start(req_id)
        world.write({req_id: count})
        world.check()
    world.evict({"a": [1, 2, 5, 6, 9], "b": [0, 4, 5]})
    world.check()
    assert world.fill({"a": 0, "b": 1}) >= 4
    world.check()
    world.write({"a": 3, "b": 1})
    world.check()
    world.drop("a")
    world.check()


def without_last(moves: Moves) -> Moves:
    return Moves(moves.rows[:-1], moves.sources[:-1], moves.destinations[:-1])


def with_swapped_destinations(moves: Moves) -> Moves:
    destinations = moves.destinations.copy()
    destinations[[0, 1]] = destinations[[1, 0]]
    return Moves(moves.rows, moves.sources, destinations)


class CopySwapsDestinations(World):
    def copy(self, moves: Moves) -> None:
        super().copy(with_swapped_destinations(moves))


class TableSwapsDestinations(World):
    def committed(self, plan: Plan) -> Plan:
        return Plan(plan.rows, with_swapped_destinations(plan.moves), plan.keep_blocks)


class CopyDropsAMove(World):
    def copy(self, moves: Moves) -> None:
        super().copy(without_last(moves))


class PlanDropsAMove(World):
    def plan(self, rows: np.ndarray, evicted: np.ndarray, next_tokens: np.ndarray) -> Plan:
        plan = super().plan(rows, evicted, next_tokens)
        return Plan(plan.rows, without_last(plan.moves), plan.keep_blocks)


class PlanKeepsABlockTooFew(World):
    def plan(self, rows: np.ndarray, evicted: np.ndarray, next_tokens: np.ndarray) -> Plan:
        plan = super().plan(rows, evicted, next_tokens)
        return Plan(plan.rows, plan.moves, plan.keep_blocks - 1)


class PlanKeepsABlockTooMany(World):
    def plan(self, rows: np.ndarray, evicted: np.ndarray, next_tokens: np.ndarray) -> Plan:
        plan = super().plan(rows, evicted, next_tokens)
        return Plan(plan.rows, plan.moves, plan.keep_blocks + 1)


class MovingForgetsTheCount(TokenTable):
    def apply_moves(self, moves: Moves) -> None:
        super().apply_moves(moves)
        np.add.at(self.live_in_block, (moves.rows[:1], moves.sources[:1] // self.block_size), 1)


class EvictingForgetsTheCount(TokenTable):
    def evict_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        block = self.physical_of[rows[:1], tokens[:1]] // self.block_size
        super().evict_tokens(rows, tokens)
        self.live_in_block[rows[:1], block] += 1


class EvictingHitsTheNeighbour(TokenTable):
    def evict_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        super().evict_tokens(rows, np.where(tokens == 9, tokens + 1, tokens))


class RecyclingTakesALaterSlot(TokenTable):
    def sync_new_tokens(self, rows, block_table, num_blocks, counts):  # type: ignore[no-untyped-def]
        slots = super().sync_new_tokens(rows, block_table, num_blocks, counts)
        return np.where(counts.repeat(counts) == 1, slots + 1, slots)


class DroppingLeavesCounts(TokenTable):
    def drop_request(self, req_id: str) -> None:
        row = int(self.rows([req_id])[0])
        counts = self.live_in_block[row].copy()
        super().drop_request(req_id)
        self.live_in_block[row] = counts


def test_without_a_fault_the_play_runs_through() -> None:
    play(World())


@pytest.mark.parametrize(
    ("mutant", "sentence"),
    [
        (CopySwapsDestinations, "lost K/V"),
        (TableSwapsDestinations, "lost K/V"),
        (CopyDropsAMove, "lost K/V"),
        (PlanDropsAMove, "row 1 has a hole among its first 9 slots"),
        (PlanKeepsABlockTooFew, "I4: row"),
        (PlanKeepsABlockTooMany, "assert 4 == "),
    ],
)
def test_a_faulty_reclamation_is_caught(mutant: type[World], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        play(mutant())


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (EvictingForgetsTheCount, "miscounts a block"),
        (EvictingHitsTheNeighbour, "At index"),
        (RecyclingTakesALaterSlot, "lost K/V"),
    ],
)
def test_a_faulty_table_is_caught(table: type[TokenTable], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        play(World(table(S)))


def test_a_move_that_forgets_a_count_is_caught() -> None:
    """The audit finds it, unless the block is released at once: that the table itself refuses."""
    with pytest.raises(InvariantViolation, match="a miscounts a block"):
        play(World(MovingForgetsTheCount(S)))
    world = World(MovingForgetsTheCount(S))
    world.start("a")
    world.write({"a": 2 * S})
    world.evict({"a": [0, 1, 2, 3]})
    with pytest.raises(ValueError, match="must not hold a live token"):
        world.fill({"a": 0})


def test_counts_that_outlive_their_request_are_caught() -> None:
    world = World(DroppingLeavesCounts(S))
    play(world)
    world.start("c")
    with pytest.raises(InvariantViolation, match="block it left"):
        world.check()
