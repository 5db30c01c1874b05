"""Turning the holes that evictions leave into free blocks, on the worker: what to move, and what to give back."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
class CopyOut:
    """A request is to leave the last of its read-only blocks: its own copy of their live tokens will do.

    Attributes:
        keep: leading blocks that stay, read-only as they are; all of them, if there is nothing to leave.
        blocks: empty blocks that may be taken for the copy; if they do not suffice, nothing happens.
    """

    keep: int
    blocks: list[int]


@dataclass(frozen=True)
class Due:
    """What has happened between two forwards, and what may be done about it.

    Attributes:
        rows: requests that have just forgotten tokens, or leave read-only blocks, [R].
        evicted: how many tokens each has forgotten, [R].
        next_tokens: 1 if the next forward of the request computes a single token and may recycle a hole, [R].
        granted: empty blocks that may be taken by whoever can be packed.
        spare: requests of which nothing may be moved, since they are about to end with an error.
        copy_outs: by row, for the requests that are to leave read-only blocks.
        keep_blocks: blocks that each may keep, [R].
        reported: those requests of which the scheduler waits to be told what they hold, [Q].
    """

    rows: Ints
    evicted: Ints
    next_tokens: Ints
    granted: Sequence[int] = ()
    spare: Ints = field(default_factory=lambda: NOTHING)
    copy_outs: Mapping[int, CopyOut] = field(default_factory=dict)
    keep_blocks: Ints | None = None
    reported: Ints = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True)
class Reclaimed:
    """What has been written into the table, and what must be copied before a forward reads the cache again.

    Attributes:
        rows: requests whose blocks changed, [C].
        sources, destinations: slots, [M]. No destination is a source, and none is named twice.
        moved: live tokens among the M; the others pad a block that they do not fill.
        packed: blocks that packing has emptied, less those that it took.
        changes: by row, where the scheduler cannot know them.
        reported: requests whose positions the scheduler cannot know, [Q].
        returned: by how much these are fewer than the tokens of its sequence, [Q].
    """

    rows: Ints = field(default_factory=lambda: NOTHING)
    sources: Ints = field(default_factory=lambda: NOTHING)
    destinations: Ints = field(default_factory=lambda: NOTHING)
    moved: int = 0
    packed: int = 0
    changes: dict[int, BlockChange] = field(default_factory=dict)
    reported: Ints = field(default_factory=lambda: NOTHING)
    returned: Ints = field(default_factory=lambda: NOTHING)


class Reclamation(ABC):
    """One way of getting blocks back from a table whose tokens die.

    Args:
        table: of the worker.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    @abstractmethod
    def reclaim(self, due: Due) -> Reclaimed:
        """Between two forwards: plan, and write the plan into the table."""


class FillReclamation(Reclamation):
    """``reclaim="fill"``: keep every request dense by moving its last tokens into its own holes.

    What each request keeps, its first blocks, follows from the counts alone, so the scheduler knows it. Not so for
    requests that keep read-only blocks: nobody fills the holes there, and which tokens died there is for us to say.
    """

    def reclaim(self, due: Due) -> Reclaimed:
        table, rows = self._table, due.rows
        moving = due.evicted > due.next_tokens
        if due.keep_blocks is not None:  # what is too many was allocated while a report was late
            moving |= due.keep_blocks < table.num_blocks[rows]
        before: dict[int, list[int]] = {}
        for row, copy in due.copy_outs.items():
            place = int(np.flatnonzero(rows == row)[0])
            blocks = table.blocks[row, : table.num_blocks[row]].tolist()
            if self._leave(row, copy, int(due.next_tokens[place])):
                moving[place], before[row] = True, blocks[copy.keep :] + blocks[: copy.keep]
        reported = due.reported
        owner, column = _empty_blocks(table, reported, table.read_only[reported])
        if not moving.any() and not len(owner):  # recycling alone keeps everyone dense
            return Reclaimed(reported=reported, returned=table.length[reported] - table.dense_end(reported))
        plan = self.plan(rows[moving], due.next_tokens[moving])
        moves = plan.moves
        sources, destinations = table.slots(moves.rows, moves.sources), table.slots(moves.rows, moves.destinations)
        shrinking = plan.rows[plan.keep_blocks < table.num_blocks[plan.rows]]
        for row in np.union1d(np.intersect1d(shrinking, reported), owner).tolist():
            before.setdefault(row, table.blocks[row, : table.num_blocks[row]].tolist())
        self.commit(plan)
        table.remove_blocks(owner, column)
        changes = {row: self._change(row, before[row]) for row in before.keys() & set(reported.tolist())}
        changes = {row: change for row, change in changes.items() if change.freed}
        return Reclaimed(
            np.union1d(shrinking, np.array(list(before), dtype=np.int64)),
            sources,
            destinations,
            len(moves),
            changes=changes,
            reported=reported,
            returned=table.length[reported] - table.dense_end(reported),
        )

    def plan(self, rows: Ints, next_tokens: Ints) -> Plan:
        """Plan for requests that forgot more tokens than their next forward recycles holes; shapes [R]."""
        table = self._table
        width = int(table.num_blocks[rows].max(initial=0)) * table.block_size
        start = table.read_only[rows] * table.block_size
        snapshot = Snapshot(rows, table.logical_at[rows, :width], start, table.dense_end(rows))
        return plan_fill(snapshot, next_tokens, table.block_size)

    def commit(self, plan: Plan) -> None:
        """Write the plan into the table."""
        self._table.apply_moves(plan.moves)
        self._table.release_blocks(plan.rows, np.minimum(plan.keep_blocks, self._table.num_blocks[plan.rows]))

    def _leave(self, row: int, copy: CopyOut, next_token: int) -> bool:
        """Put the blocks to be left last and as many empty ones first as it takes: filling holes does the rest."""
        table, read_only = self._table, int(self._table.read_only[row])
        if copy.keep == read_only:  # what was read-only before has become writable: its holes can be filled
            return True
        table.keep_read_only(row, copy.keep)
        tokens = int(table.dense_end(np.array([row]))[0]) - copy.keep * table.block_size + next_token
        writable = int(table.num_blocks[row]) - read_only
        taken = max(-(-tokens // table.block_size) - writable, 0)
        if taken > len(copy.blocks):
            table.keep_read_only(row, read_only)
            return False
        table.move_last(row, copy.keep, read_only)
        table.insert_blocks(row, copy.keep, copy.blocks[:taken])
        return True

    def _change(self, row: int, before: list[int]) -> BlockChange:
        after = self._table.blocks[row, : self._table.num_blocks[row]].tolist()
        stayed, held = set(after), set(before)
        return BlockChange(
            [block for block in before if block not in stayed], [block for block in after if block not in held]
        )


class NaiveReclamation(Reclamation):
    """``reclaim="none"``: a block goes when its last live token is dead; nothing is ever moved."""

    def reclaim(self, due: Due) -> Reclaimed:
        return self._reclaimed(self._free_empty(due.rows))

    def _free_empty(self, rows: Ints) -> dict[int, BlockChange]:
        table = self._table
        owner, column = _empty_blocks(table, rows, table.end[rows] // table.block_size)
        freed = table.blocks[owner, column].tolist()
        table.remove_blocks(owner, column)
        changes: dict[int, BlockChange] = {}
        for row, block in zip(owner.tolist(), freed, strict=True):
            changes.setdefault(row, BlockChange([])).freed.append(block)
        return changes

    def _reclaimed(
        self,
        changes: dict[int, BlockChange],
        sources: Ints = NOTHING,
        destinations: Ints = NOTHING,
        moved: int = 0,
        packed: int = 0,
    ) -> Reclaimed:
        table, rows = self._table, np.array(list(changes), dtype=np.int64)
        returned = table.length[rows] - table.end[rows]
        return Reclaimed(rows, sources, destinations, moved, packed, changes, rows, returned)


class PackReclamation(NaiveReclamation):
    """``reclaim="pack"``: copy the live tokens of sparse blocks into granted ones, out of place (arXiv 2608.13263).

    Blocks that more than one request holds are left alone: to copy them for one of them would free nothing.

    Args:
        table: of the worker.
        most_sources: blocks of one request that are packed at a time.
    """

    def __init__(self, table: TokenTable, most_sources: int) -> None:
        super().__init__(table)
        self._most_sources = most_sources

    def reclaim(self, due: Due) -> Reclaimed:
        changes = self._free_empty(due.rows)
        sources, destinations, moved, packed = [NOTHING], [NOTHING], 0, 0
        unused = list(due.granted)
        for packing in self._packings(len(unused), due.spare):
            taken, unused = unused[: packing.destinations], unused[packing.destinations :]
            source, destination, change = self._pack(packing, taken)
            moved += len(source)
            packed += len(packing.sources) - packing.destinations
            pad = -len(source) % self._table.block_size
            sources += [source, np.repeat(source[-1:], pad)]
            destinations += [destination, destination[-1:] + np.arange(1, pad + 1)]
            already = changes.get(packing.row, BlockChange([])).freed
            changes[packing.row] = BlockChange(change.freed + already, change.adopted)
        return self._reclaimed(changes, np.concatenate(sources), np.concatenate(destinations), moved, packed)

    def _packings(self, most_destinations: int, spare: Ints) -> list[Packing]:
        table = self._table
        if not most_destinations:
            return []
        rows = table.rows(table.req_ids)
        full = table.end[rows] // table.block_size
        width = int(full.max(initial=0))
        live = table.live_in_block[rows, :width]
        held = np.arange(width) < full[:, None]
        blocks, holders = np.unique(table.blocks[rows, :width][held], return_counts=True)
        shared = held & np.isin(table.blocks[rows, :width], blocks[holders > 1])
        chosen = ~np.isin(rows, spare)
        live = np.where(shared, table.block_size, live)[chosen]  # as good as full
        return choose_packings(
            rows[chosen], live, full[chosen], self._most_sources, most_destinations, table.block_size
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


def _empty_blocks(table: TokenTable, rows: Ints, blocks: Ints) -> tuple[Ints, Ints]:
    """(row, column) of those among the first ``blocks`` [R] blocks of each request that have no live token."""
    width = int(blocks.max(initial=0))
    empty = (table.live_in_block[rows, :width] == 0) & (np.arange(width) < blocks[:, None])
    request, column = np.nonzero(empty)
    return rows[request], column
