"""Turning the holes that evictions leave into free blocks, on the worker: what to move, and what to give back."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vtoken.core.planner import Packing, Plan, Snapshot, choose_packings, plan_fill, plan_packing
from vtoken.core.ragged import Ints
from vtoken.core.token_table import TokenTable

NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class BlockChange:
    """How a request's list of blocks changed: ``adopted`` came in before ``freed[0]``, then all of ``freed`` went."""

    freed: list[int]
    adopted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Reclaimed:
    """What has been written into the table, and what must be copied before a forward reads the cache again.

    Attributes:
        rows: requests whose blocks changed, [C].
        sources, destinations: slots, [M]. No destination is a source, and none is named twice.
        moved: live tokens among the M; the others pad a block that they do not fill.
        packed: blocks that packing has emptied, less those that it took.
        changes: by row, where the scheduler cannot know them.
    """

    rows: Ints = field(default_factory=lambda: NOTHING)
    sources: Ints = field(default_factory=lambda: NOTHING)
    destinations: Ints = field(default_factory=lambda: NOTHING)
    moved: int = 0
    packed: int = 0
    changes: dict[int, BlockChange] = field(default_factory=dict)


class Reclamation(ABC):
    """One way of getting blocks back from a table whose tokens die.

    Args:
        table: of the worker.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    @abstractmethod
    def reclaim(
        self, rows: Ints, evicted: Ints, next_tokens: Ints, granted: Sequence[int] = (), spare: Ints = NOTHING
    ) -> Reclaimed:
        """Between two forwards: plan, and write the plan into the table.

        Args:
            rows: requests that have just forgotten tokens, [R].
            evicted: how many each, [R].
            next_tokens: 1 if the next forward of the request computes a single token and may recycle a hole, [R].
            granted: empty blocks that may be taken.
            spare: requests of which nothing may be moved, since they are about to end with an error.
        """


class FillReclamation(Reclamation):
    """``reclaim="fill"``: keep every request dense by moving its last tokens into its own holes.

    What each request keeps, its first blocks, follows from the counts alone, so the scheduler knows it.
    """

    def reclaim(
        self, rows: Ints, evicted: Ints, next_tokens: Ints, granted: Sequence[int] = (), spare: Ints = NOTHING
    ) -> Reclaimed:
        if not (evicted > next_tokens).any():  # recycling alone keeps everyone dense
            return Reclaimed()
        table, plan = self._table, self.plan(rows, evicted, next_tokens)
        moves = plan.moves
        sources, destinations = table.slots(moves.rows, moves.sources), table.slots(moves.rows, moves.destinations)
        held = table.num_blocks[plan.rows]
        self.commit(plan)
        return Reclaimed(plan.rows[plan.keep_blocks < held], sources, destinations, len(moves))

    def plan(self, rows: Ints, evicted: Ints, next_tokens: Ints) -> Plan:
        """Plan for requests that have just forgotten ``evicted`` tokens each; shapes [R].

        A request that forgot one token and computes one next needs no move and is not looked at.
        """
        table = self._table
        rows, next_tokens = rows[evicted > next_tokens], next_tokens[evicted > next_tokens]
        width = int(table.num_blocks[rows].max(initial=0)) * table.block_size
        snapshot = Snapshot(rows, table.logical_at[rows, :width], table.num_live[rows])
        return plan_fill(snapshot, next_tokens, table.block_size)

    def commit(self, plan: Plan) -> None:
        """Write the plan into the table."""
        self._table.apply_moves(plan.moves)
        self._table.release_blocks(plan.rows, np.minimum(plan.keep_blocks, self._table.num_blocks[plan.rows]))


class NaiveReclamation(Reclamation):
    """``reclaim="none"``: a block goes when its last live token is dead; nothing is ever moved."""

    def reclaim(
        self, rows: Ints, evicted: Ints, next_tokens: Ints, granted: Sequence[int] = (), spare: Ints = NOTHING
    ) -> Reclaimed:
        changes = self._free_empty(rows)
        return Reclaimed(np.array(list(changes), dtype=np.int64), changes=changes)

    def _free_empty(self, rows: Ints) -> dict[int, BlockChange]:
        table = self._table
        full = table.end[rows] // table.block_size
        width = int(full.max(initial=0))
        empty = (table.live_in_block[rows, :width] == 0) & (np.arange(width) < full[:, None])
        request, column = np.nonzero(empty)
        owner = rows[request]
        freed = table.blocks[owner, column].tolist()
        table.remove_blocks(owner, column)
        changes: dict[int, BlockChange] = {}
        for row, block in zip(owner.tolist(), freed, strict=True):
            changes.setdefault(row, BlockChange([])).freed.append(block)
        return changes


class PackReclamation(NaiveReclamation):
    """``reclaim="pack"``: copy the live tokens of sparse blocks into granted ones, out of place (arXiv 2608.13263).

    Args:
        table: of the worker.
        most_sources: blocks of one request that are packed at a time.
    """

    def __init__(self, table: TokenTable, most_sources: int) -> None:
        super().__init__(table)
        self._most_sources = most_sources

    def reclaim(
        self, rows: Ints, evicted: Ints, next_tokens: Ints, granted: Sequence[int] = (), spare: Ints = NOTHING
    ) -> Reclaimed:
        changes = self._free_empty(rows)
        sources, destinations, moved, packed = [NOTHING], [NOTHING], 0, 0
        unused = list(granted)
        for packing in self._packings(len(granted), spare):
            taken, unused = unused[: packing.destinations], unused[packing.destinations :]
            source, destination, change = self._pack(packing, taken)
            moved += len(source)
            packed += len(packing.sources) - packing.destinations
            pad = -len(source) % self._table.block_size
            sources += [source, np.repeat(source[-1:], pad)]
            destinations += [destination, destination[-1:] + np.arange(1, pad + 1)]
            already = changes.get(packing.row, BlockChange([])).freed
            changes[packing.row] = BlockChange(change.freed + already, change.adopted)
        changed = np.array(list(changes), dtype=np.int64)
        return Reclaimed(changed, np.concatenate(sources), np.concatenate(destinations), moved, packed, changes)

    def _packings(self, most_destinations: int, spare: Ints) -> list[Packing]:
        table = self._table
        rows = np.setdiff1d(table.rows(table.req_ids), spare) if most_destinations else NOTHING
        full = table.end[rows] // table.block_size
        width = int(full.max(initial=0))
        return choose_packings(
            rows, table.live_in_block[rows, :width], full, self._most_sources, most_destinations, table.block_size
        )

    def _pack(self, packing: Packing, blocks: list[int]) -> tuple[Ints, Ints, BlockChange]:
        """Write one packing into the table; (source slots, destination slots, what became of the blocks)."""
        table, row = self._table, packing.row
        columns = packing.sources + packing.destinations
        freed = table.blocks[row, packing.sources].tolist()
        first = int(packing.sources[0])
        table.insert_blocks(row, first, blocks)
        moves = plan_packing(packing, table.logical_at[row], table.block_size)
        sources, destinations = table.slots(moves.rows, moves.sources), table.slots(moves.rows, moves.destinations)
        table.apply_moves(moves)
        table.remove_blocks(np.full_like(columns, row), columns)
        return sources, destinations, BlockChange(freed, blocks)
