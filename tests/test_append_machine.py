"""Long random lives of requests whose tokens are appended: blocks that leave when they are dead, and packing.

As in ``test_table_machine``, every slot of a pool carries the token that it should hold, and a freed block is
overwritten at once, so that a token which is copied too late or read from the wrong place is not there.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vtoken.core import audit
from vtoken.core.planner import Packing
from vtoken.core.reclamation import Due, PackReclamation, Reclaimed
from vtoken.core.token_table import HOLE, Moves, TokenTable

S = 4
BLOCKS = 30
MOST_SOURCES = 3
FREE = (-1, -1)
NOTHING = np.empty(0, dtype=np.int64)


def ints(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


class AuditedPacking(PackReclamation):
    """Each packing is checked before it is written into the table."""

    mutate: Callable[[Packing], Packing] = staticmethod(lambda packing: packing)

    def _pack(self, packing, blocks):  # type: ignore[no-untyped-def]
        packing = self.mutate(packing)
        audit.check_packing(packing, self._table)
        return super()._pack(packing, blocks)


class World:
    """A table that appends, a pool of marked slots, a free list, and per request its cells as a Python list."""

    def __init__(self, table: TokenTable | None = None) -> None:
        self.table = table or TokenTable(S, recycling=False, requests=2, tokens=2 * S)
        self.reclamation = AuditedPacking(self.table, MOST_SOURCES)
        self.pool = np.full((BLOCKS * S, 2), FREE, dtype=np.int64)
        self.free = list(range(BLOCKS))
        self.blocks: dict[str, list[int]] = {}
        self.cells: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}
        self.mark: dict[str, int] = {}
        self.seen = self.packed = 0

    def start(self, req_id: str) -> None:
        self.table.add_request(req_id)
        self.seen += 1
        self.mark[req_id], self.length[req_id] = self.seen, 0
        self.blocks[req_id], self.cells[req_id] = [], []

    def missing_blocks(self, req_id: str, count: int) -> int:
        return -(-(len(self.cells[req_id]) + count) // S) - len(self.blocks[req_id])

    def write(self, req_id: str, count: int) -> None:
        blocks, cells = self.blocks[req_id], self.cells[req_id]
        blocks += [self.free.pop(0) for _ in range(self.missing_blocks(req_id, count))]
        rows, row = self.table.rows([req_id]), np.array([[*blocks, 10**6]], dtype=np.int32)
        slots = self.table.sync_new_tokens(rows, row, ints([len(blocks)]), ints([count]))
        places = range(len(cells), len(cells) + count)
        assert slots.tolist() == [blocks[p // S] * S + p % S for p in places], "a token was not appended"
        tokens = range(self.length[req_id], self.length[req_id] + count)
        cells += tokens
        self.length[req_id] += count
        self.pool[slots, 0], self.pool[slots, 1] = self.mark[req_id], tokens

    def live(self, req_id: str) -> list[int]:
        return sorted(token for token in self.cells[req_id] if token != HOLE)

    def forget(self, victims: dict[str, list[int]], granted: int) -> None:
        """Tokens die; dead blocks leave, and sparse ones are packed as far as ``granted`` blocks allow."""
        pairs = [(r, t) for r, tokens in victims.items() for t in tokens]
        if pairs:
            self.table.evict_tokens(self.table.rows(r for r, _ in pairs), ints([t for _, t in pairs]))
        for req_id, tokens in victims.items():
            self.cells[req_id] = [HOLE if t in tokens else t for t in self.cells[req_id]]
        before, rows = audit.live_ids(self.table), self.table.rows(victims)
        held = {r: len(blocks) for r, blocks in self.blocks.items()}
        grant = [self.free.pop(0) for _ in range(min(granted, len(self.free)))]
        evicted = ints([len(tokens) for tokens in victims.values()])
        reclaimed = self.reclamation.reclaim(Due(rows, evicted, np.ones_like(rows), list(grant)))
        audit.check_conservation(before, self.table)
        self.copy(reclaimed)
        names = dict(zip(reclaimed.rows.tolist(), self.table.req_ids_of(reclaimed.rows), strict=True))
        adopted = [block for change in reclaimed.changes.values() for block in change.adopted]
        assert sorted(reclaimed.destinations.tolist()) == sorted(b * S + n for b in adopted for n in range(S))
        assert not set(reclaimed.sources.tolist()) & set(reclaimed.destinations.tolist())
        assert sorted(adopted) == sorted(grant[: len(adopted)])
        moved = sum(self.follow(names[row], change.freed, change.adopted) for row, change in reclaimed.changes.items())
        assert moved == reclaimed.moved
        self.packed += moved
        for row, change in reclaimed.changes.items():
            assert held[names[row]] - len(self.blocks[names[row]]) == len(change.freed) - len(change.adopted) > 0
        self.free += [block for block in grant if block not in adopted]

    def follow(self, req_id: str, freed: list[int], adopted: list[int]) -> int:
        """Free blocks, and fill the adopted ones with what lived in them, in logical order; tokens moved."""
        blocks, cells = self.blocks[req_id], self.cells[req_id]
        cells_of = {block: cells[n * S : (n + 1) * S] for n, block in enumerate(blocks)}
        assert len(set(freed)) == len(freed) and all(len(cells_of[block]) == S for block in freed)
        moving = sorted(t for block in freed for t in cells_of[block] if t != HOLE)
        assert len(adopted) == -(-len(moving) // S)
        moving += [HOLE] * (-len(moving) % S)
        cells_of |= {block: moving[n * S : (n + 1) * S] for n, block in enumerate(adopted)}
        place = min((blocks.index(b) for b in freed if cells_of[b] != [HOLE] * S), default=0)
        blocks[place:place] = adopted
        self.blocks[req_id] = [block for block in blocks if block not in freed]
        self.cells[req_id] = [token for block in self.blocks[req_id] for token in cells_of[block]]
        for block in freed:
            self.pool[block * S : (block + 1) * S] = FREE
        self.free += freed
        return sum(token != HOLE for token in moving)

    def copy(self, reclaimed: Reclaimed) -> None:
        self.pool[reclaimed.destinations] = self.pool[reclaimed.sources]

    def drop(self, req_id: str) -> None:
        self.table.drop_request(req_id)
        self.free += self.blocks.pop(req_id)
        del self.cells[req_id], self.length[req_id], self.mark[req_id]

    def check(self) -> None:
        table = self.table
        audit.check_mapping(table)
        for req_id, cells in self.cells.items():
            row = int(table.rows([req_id])[0])
            assert table.logical_at[row, : len(cells)].tolist() == cells, f"{req_id} lies elsewhere"
            assert table.block_ids(req_id) == self.blocks[req_id]
            assert (int(table.end[row]), int(table.length[row])) == (len(cells), self.length[req_id])
            assert len(self.blocks[req_id]) == -(-len(cells) // S)
            live = self.live(req_id)
            assert table.live_tokens(req_id).tolist() == live and table.num_live[row] == len(live)
            marks = self.pool[[table.slot(req_id, t) for t in live]].reshape(-1, 2).tolist()
            assert marks == [[self.mark[req_id], t] for t in live], f"{req_id} lost K/V"
            full = len(cells) // S
            assert [HOLE] * S not in [cells[n * S : (n + 1) * S] for n in range(full)], "a dead block stayed"
        held = [block for blocks in self.blocks.values() for block in blocks]
        assert sorted(held + self.free) == list(range(BLOCKS)), "a block was lost or doubled"


class AppendMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.names = 0

    @precondition(lambda self: len(self.world.cells) < 5)
    @rule(reuse=st.booleans(), count=st.integers(2 * S, 6 * S))
    def arrive(self, reuse: bool, count: int) -> None:
        self.names += not reuse
        req_id = f"r{self.names}"
        if req_id not in self.world.cells:
            self.world.start(req_id)
            if self.world.missing_blocks(req_id, count) <= len(self.world.free):
                self.world.write(req_id, count)

    @precondition(lambda self: self.world.cells)
    @rule(data=st.data(), count=st.sampled_from([1, 1, 3, 2 * S, 4 * S]))
    def compute(self, data: st.DataObject, count: int) -> None:
        req_id = data.draw(st.sampled_from(sorted(self.world.cells)))
        if self.world.missing_blocks(req_id, count) <= len(self.world.free):
            self.world.write(req_id, count)

    @precondition(lambda self: any(self.world.live(r) for r in self.world.cells))
    @rule(data=st.data(), granted=st.integers(0, 3), share=st.sampled_from([0.6, 0.4, 0.1]), seed=st.integers(0, 99))
    def forget(self, data: st.DataObject, granted: int, share: float, seed: int) -> None:
        """Scattered victims: drawn one by one they tend to be neighbours, which leaves nothing to pack."""
        world, rng = self.world, np.random.default_rng(seed)
        able = [r for r in sorted(world.cells) if world.live(r)]
        victims = {}
        for req_id in data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=3, unique=True)):
            live = world.live(req_id)
            victims[req_id] = rng.permutation(live)[: max(1, int(share * len(live)))].tolist()
        world.forget(victims, granted)

    @precondition(lambda self: self.world.cells)
    @rule(granted=st.integers(1, 4))
    def pack(self, granted: int) -> None:
        """Also what nobody has just forgotten anything of is packed."""
        self.world.forget({}, granted)

    @precondition(lambda self: self.world.cells)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.drop(data.draw(st.sampled_from(sorted(self.world.cells))))

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        for req_id in list(self.world.cells):
            self.world.drop(req_id)
        assert sorted(self.world.free) == list(range(BLOCKS))


AppendMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAppendMachine = AppendMachine.TestCase


# -- controls: the same world with one fault in it ----------------------------------------------------------------


def play(world: World) -> None:
    """Two requests with sparse blocks beside full, dead and unfinished ones; checked after every act."""
    for req_id, count in (("a", 5 * S + 2), ("b", 4 * S + 1)):
        world.start(req_id)
        world.write(req_id, count)
        world.check()
    world.forget({"a": [0, 1, 2, 4, 5, 6, 7, 8, 9, 16, 17], "b": [1, 2, 3, 12, 13]}, granted=2)
    world.check()
    assert world.packed == (1 + 2) + (1 + 2)
    world.write("a", 3)
    world.check()
    world.forget({"a": world.live("a")[:2]}, granted=0)
    world.check()
    world.drop("a")
    world.write("b", 2 * S)
    world.check()


def test_without_a_fault_the_play_runs_through() -> None:
    play(World())


@pytest.mark.parametrize(
    ("mutate", "sentence"),
    [
        (lambda p: replace(p, destinations=len(p.sources)), "I4: row 0 packs 2 blocks into 2"),
        (lambda p: replace(p, destinations=p.destinations - 1), "I4: row 0 packs 3 live tokens into 0 blocks"),
        (lambda p: replace(p, sources=np.append(p.sources, 5)), "I4: row 0 packs a block that is not full"),
        (lambda p: replace(p, sources=np.append(p.sources, p.sources[-1:])), "I4: row 0 names a source twice"),
    ],
)
def test_a_faulty_choice_is_caught(mutate: Callable[[Packing], Packing], sentence: str) -> None:
    world = World()
    world.reclamation.mutate = mutate
    with pytest.raises(audit.InvariantViolation, match=sentence):
        play(world)


class CopyDropsTheLast(World):
    def copy(self, reclaimed: Reclaimed) -> None:
        last = reclaimed.moved and int(np.flatnonzero(np.diff(reclaimed.sources, append=-1))[-1])
        rest = np.flatnonzero(reclaimed.sources != reclaimed.sources[last]) if reclaimed.moved else NOTHING
        self.pool[reclaimed.destinations[rest]] = self.pool[reclaimed.sources[rest]]


class CopyIsReversed(World):
    def copy(self, reclaimed: Reclaimed) -> None:
        self.pool[reclaimed.destinations] = self.pool[reclaimed.sources[::-1]]


class CopyComesAfterTheBlocksWereFreed(World):
    def follow(self, req_id: str, freed: list[int], adopted: list[int]) -> int:
        moved = super().follow(req_id, freed, adopted)
        super().copy(self.late)
        return moved

    def copy(self, reclaimed: Reclaimed) -> None:
        self.late = reclaimed


class RemovingKeepsTheEnd(TokenTable):
    def remove_blocks(self, rows: np.ndarray, columns: np.ndarray) -> None:
        end = self.end.copy()
        super().remove_blocks(rows, columns)
        self.end[:] = end


class InsertingAtTheEnd(TokenTable):
    def insert_blocks(self, row: int, column: int, blocks: list[int]) -> None:
        super().insert_blocks(row, column + 1, blocks)


class RemovingTheNextBlock(TokenTable):
    def remove_blocks(self, rows: np.ndarray, columns: np.ndarray) -> None:
        last = self.blocks.copy()
        super().remove_blocks(rows, columns)
        if len(rows):
            self.blocks[rows[0], columns[0]] = last[rows[0], columns[0]]


class MovingOutOfOrder(TokenTable):
    def apply_moves(self, moves: Moves) -> None:
        super().apply_moves(Moves(moves.rows, moves.sources, moves.destinations[::-1].copy()))


@pytest.mark.parametrize("mutant", [CopyDropsTheLast, CopyIsReversed, CopyComesAfterTheBlocksWereFreed])
def test_a_faulty_copy_is_caught(mutant: type[World]) -> None:
    with pytest.raises(AssertionError, match="lost K/V"):
        play(mutant())


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (RemovingKeepsTheEnd, "has written more blocks than it holds"),
        (InsertingAtTheEnd, "must be a hole|must hold a live token|not hold a live token"),
        (RemovingTheNextBlock, "holds a block twice|is held by|assert"),
        (MovingOutOfOrder, "lies elsewhere"),
    ],
)
def test_a_faulty_table_is_caught(table: type[TokenTable], sentence: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=sentence):
        play(World(table(S, recycling=False)))
