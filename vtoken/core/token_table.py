"""The map from logical tokens to physical slots: one row per request, kept on the CPU, O(length) per request.

Two arrays are each other's inverse. ``physical_of[row, t]`` is where logical token t lies in its request's own
sequence of slots, counted along its block table (-1: dead), and ``logical_at[row, p]`` is the token that lies
there (-1: hole or unused). A physical position p belongs to block ``blocks[row, p // S]`` at offset ``p % S``, so

    slot(t) = blocks[row, p // S] * S + p % S        with p = physical_of[row, t]

Evicting writes metadata only; no K/V moves. The paper's three mutators (arXiv 2608.13263, section on the token
table) are ``evict_tokens``, ``sync_new_tokens`` and ``apply_moves``; beside them blocks come (``insert_blocks``) and
go (``release_blocks``, ``remove_blocks``), and so do requests. None of them loops over tokens.

New tokens either recycle holes or are appended. A table that recycles keeps its requests dense; in one that appends,
holes stay where they are until all tokens of a block are dead or have moved.

A request's first blocks may be read-only, because other requests or the prefix cache want them as they are. They may
have holes, which nobody fills; a table that recycles keeps its requests dense behind them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ragged import Ints, ranges
from vtoken.core.row_index import RowIndex

HOLE = -1
DEAD = -1


@dataclass(frozen=True)
class Moves:
    """Live tokens that change their slot within their own request, one entry per token, as flat arrays."""

    rows: Ints
    sources: Ints
    destinations: Ints

    def __len__(self) -> int:
        return len(self.rows)


class TokenTable:
    """Logical token -> slot for every request of one worker.

    Args:
        block_size: slots per block, S.
        recycling: whether a single new token is written into a hole.
        requests, tokens: initial capacity; both grow by doubling.

    Attributes:
        end: one past the last position that holds a token or a hole, at the forward under way; shape [rows].
        read_only: leading blocks that must stay as they are, of requests that have lost tokens; shape [rows].
    """

    def __init__(self, block_size: int, *, recycling: bool = True, requests: int = 16, tokens: int = 1024) -> None:
        self.block_size = block_size
        self.recycling = recycling
        width = -(-tokens // block_size) * block_size
        self.physical_of = np.full((requests, width), DEAD, dtype=np.int32)
        self.logical_at = np.full((requests, width), HOLE, dtype=np.int32)
        self.blocks = np.zeros((requests, width // block_size), dtype=np.int32)
        self.live_in_block = np.zeros((requests, width // block_size), dtype=np.int32)
        self.length = np.zeros(requests, dtype=np.int64)
        self.num_live = np.zeros(requests, dtype=np.int64)
        self.end = np.zeros(requests, dtype=np.int64)
        self.num_blocks = np.zeros(requests, dtype=np.int64)
        self.read_only = np.zeros(requests, dtype=np.int64)
        self.epoch = np.zeros(requests, dtype=np.int64)
        self._row_of = RowIndex(requests)

    # -- looking things up ------------------------------------------------------------------------------------

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._row_of

    @property
    def req_ids(self) -> Iterable[str]:
        return self._row_of

    def rows(self, req_ids: Iterable[str]) -> Ints:
        """The row of each request, shape [R]. Raises KeyError for a request that has none."""
        return self._row_of.rows(req_ids)

    def find_rows(self, req_ids: Iterable[str]) -> Ints:
        """The row of each request, shape [R], -1 for one that has none."""
        return self._row_of.find(req_ids)

    def req_ids_of(self, rows: Ints) -> list[str]:
        """The requests in these rows, shape [R]."""
        return self._row_of.req_ids_of(rows)

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """Physical positions, row by row, to slots of the pool: block * S + offset, shape [N]."""
        blocks = self.blocks[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def slot(self, req_id: str, token: int) -> int:
        """The slot of one live token. Raises KeyError if the token is dead or does not exist."""
        row = self._row_of[req_id]
        if not self.is_live(req_id, token):
            raise KeyError(f"token {token} of request {req_id} is not live")
        return int(self.slots(np.array([row]), self.physical_of[row, token : token + 1].astype(np.int64))[0])

    def is_live(self, req_id: str, token: int) -> bool:
        row = self._row_of[req_id]
        return 0 <= token < self.length[row] and self.physical_of[row, token] != DEAD

    def live_tokens(self, req_id: str) -> Ints:
        """Logical ids of the live tokens in logical order."""
        row = self._row_of[req_id]
        return np.flatnonzero(self.physical_of[row, : self.length[row]] != DEAD)

    def block_ids(self, req_id: str) -> list[int]:
        row = self._row_of[req_id]
        return self.blocks[row, : self.num_blocks[row]].tolist()

    def live_per_block(self, req_id: str) -> list[int]:
        """How many live tokens each held block has, in order."""
        row = self._row_of[req_id]
        return self.live_in_block[row, : self.num_blocks[row]].tolist()

    # -- the mutators -----------------------------------------------------------------------------------------

    def dense_end(self, rows: Ints) -> Ints:
        """Where the tokens of each request end once the holes behind its read-only blocks are filled, shape [R]."""
        kept, end = self.read_only[rows], self.num_live[rows]
        if kept.any():
            leading = np.arange(int(kept.max())) < kept[:, None]
            end = end + kept * self.block_size - (self.live_in_block[rows, : leading.shape[1]] * leading).sum(axis=1)
        return end

    def frozen_blocks(self, rows: Ints) -> Ints:
        """Leading blocks of each request into which nothing is written any more, so that others may hold them, [R]."""
        recycles = self.recycling & (self.epoch[rows] > 0)
        return np.where(recycles, self.read_only[rows], self.end[rows] // self.block_size)

    def add_request(self, req_id: str, prefix: int = 0) -> int:
        """Give a request a row, with the leading tokens that are there already: full blocks, adopted when it syncs."""
        if self._row_of.full:
            self._grow_rows()
        row = self._row_of.take(req_id)
        if prefix:
            self._grow_columns(prefix, -(-prefix // self.block_size))
            self.physical_of[row, :prefix] = self.logical_at[row, :prefix] = np.arange(prefix)
            np.add.at(self.live_in_block[row], np.arange(prefix) // self.block_size, 1)
            self.length[row] = self.num_live[row] = self.end[row] = prefix
        return row

    def sync_new_tokens(
        self, rows: Ints, block_table: NDArray[np.int32], num_blocks: Ints, counts: Ints, at: Ints | None = None
    ) -> Ints:
        """Register the tokens that the next forward computes, in order; return their slots, shape [sum(counts)].

        Where holes are recycled, a single new token takes the lowest one of its request; several new tokens must be
        last and in order, so they are appended and need a request without holes.

        Args:
            rows: shape [R], each at most once.
            block_table: the requests' block ids, shape [R, >= max(num_blocks)].
            num_blocks: how many of them are each request's, shape [R].
            counts: new tokens per request, shape [R].
            at: the row of ``block_table`` of each request, shape [R], if they are not in order.
        """
        length = self.length[rows]
        self._grow_columns(int((length + counts).max(initial=0)), int(num_blocks.max(initial=0)))
        first = dense_end = self.dense_end(rows) if self.recycling else self.end[rows]
        if self.recycling and (reduced := self.epoch[rows] > 0).any():
            into_holes = reduced & (counts == 1)
            first = dense_end.copy()
            first[into_holes] = self._lowest_hole(rows[into_holes], first[into_holes])
            self._require_no_holes(rows[reduced & ~into_holes])
        self._adopt_blocks(rows, first + counts, block_table, num_blocks, at)

        owner, positions, tokens = np.repeat(rows, counts), ranges(first, counts), ranges(length, counts)
        self.physical_of[owner, tokens] = positions
        self.logical_at[owner, positions] = tokens
        np.add.at(self.live_in_block, (owner, positions // self.block_size), 1)
        self.length[rows] = length + counts
        self.num_live[rows] += counts
        self.end[rows] = dense_end + counts
        return self.slots(owner, positions)

    def evict_tokens(self, rows: Ints, tokens: Ints) -> None:
        """Mark tokens dead, shape [N] each, or refuse the whole batch with ValueError."""
        outside = (tokens < 0) | (tokens >= self.length[rows])
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            raise ValueError(f"token {tokens[at]} of row {rows[at]} does not exist, so it cannot be evicted")
        positions = self.physical_of[rows, tokens].astype(np.int64)
        if (positions == DEAD).any() or _has_duplicates(rows, tokens):
            raise ValueError("a token that is evicted must be live, and named once")
        self.physical_of[rows, tokens] = DEAD
        self.logical_at[rows, positions] = HOLE
        np.subtract.at(self.live_in_block, (rows, positions // self.block_size), 1)
        np.subtract.at(self.num_live, rows, 1)
        self.epoch[np.unique(rows)] += 1

    def evict_token(self, req_id: str, token: int) -> None:
        """Mark one token dead."""
        self.evict_tokens(self.rows([req_id]), np.array([token], dtype=np.int64))

    def apply_moves(self, moves: Moves) -> None:
        """Clear the sources and write the destinations together, or refuse the whole batch with ValueError."""
        rows, sources, destinations = moves.rows, moves.sources, moves.destinations
        capacity = self.num_blocks[rows] * self.block_size
        if ((destinations < 0) | (destinations >= capacity) | (sources < 0) | (sources >= capacity)).any():
            raise ValueError("a move must stay within the blocks of its request")
        tokens = self.logical_at[rows, sources]
        if (tokens == HOLE).any() or _has_duplicates(rows, sources):
            raise ValueError("the source of a move must hold a live token, and be named once")
        if (self.logical_at[rows, destinations] != HOLE).any() or _has_duplicates(rows, destinations):
            raise ValueError("the destination of a move must be a hole, and be named once")
        if (destinations < self.read_only[rows] * self.block_size).any():
            raise ValueError("the destination of a move must not lie in a read-only block")
        self.logical_at[rows, sources] = HOLE
        self.logical_at[rows, destinations] = tokens
        self.physical_of[rows, tokens] = destinations
        np.subtract.at(self.live_in_block, (rows, sources // self.block_size), 1)
        np.add.at(self.live_in_block, (rows, destinations // self.block_size), 1)

    def release_blocks(self, rows: Ints, keep: Ints) -> None:
        """Let each request keep its first ``keep`` blocks; the others must be empty (ValueError)."""
        dropped = np.maximum(self.num_blocks[rows] - keep, 0)
        owner, index = np.repeat(rows, dropped), ranges(np.minimum(keep, self.num_blocks[rows]), dropped)
        if self.live_in_block[owner, index].any():
            raise ValueError("a block that leaves its request must not hold a live token")
        self.num_blocks[rows] = np.minimum(self.num_blocks[rows], keep)

    def insert_blocks(self, row: int, column: int, blocks: list[int]) -> None:
        """Put empty blocks before a request's block at ``column``; the positions of what follows grow."""
        if not 0 <= column <= self.end[row] // self.block_size:
            raise ValueError("blocks can only be inserted before the end of a request")
        held = int(self.num_blocks[row])
        self._grow_columns(0, held + len(blocks))
        order = np.insert(np.arange(held), column, np.full(len(blocks), -1))
        self._rearrange(row, order)
        self.blocks[row, column : column + len(blocks)] = blocks
        self.end[row] += len(blocks) * self.block_size

    def remove_blocks(self, rows: Ints, columns: Ints) -> None:
        """Let blocks leave their requests, wherever they stand, shape [N] each; the positions of what follows shrink.

        Raises:
            ValueError: one of them holds a live token, or is still being filled.
        """
        if self.live_in_block[rows, columns].any():
            raise ValueError("a block that leaves its request must not hold a live token")
        if ((columns + 1) * self.block_size > self.end[rows]).any():
            raise ValueError("a block that is still being filled cannot leave its request")
        for row in np.unique(rows).tolist():
            gone = columns[rows == row]
            self._rearrange(row, np.delete(np.arange(self.num_blocks[row]), gone))
            self.end[row] -= len(gone) * self.block_size
            self.read_only[row] -= np.count_nonzero(gone < self.read_only[row])

    def keep_read_only(self, row: int, blocks: int) -> None:
        """From now on these leading blocks of a request must stay as they are."""
        if not 0 <= blocks <= self.num_blocks[row]:
            raise ValueError("only blocks that a request holds can be read-only")
        self.read_only[row] = blocks

    def move_last(self, row: int, first: int, last: int) -> None:
        """Let the blocks at columns ``first`` to ``last`` - 1 of a request change places with those behind them."""
        columns = np.arange(self.num_blocks[row])
        if not self.read_only[row] <= first <= last <= len(columns):
            raise ValueError("only blocks behind the read-only ones of a request can change places")
        self._rearrange(row, np.concatenate([columns[:first], columns[last:], columns[first:last]]))

    def drop_request(self, req_id: str) -> None:
        """Forget a request; unknown ids are ignored, since a request may end before its first forward."""
        if req_id not in self._row_of:
            return
        row = self._row_of.give_back(req_id)
        self.physical_of[row, : self.length[row]] = DEAD
        # What was live lies in the blocks that are held, or in a prefix whose blocks were never adopted.
        blocks = max(int(self.num_blocks[row]), -(-int(self.end[row]) // self.block_size))
        self.logical_at[row, : blocks * self.block_size] = HOLE
        self.live_in_block[row, :blocks] = 0
        for column in (self.length, self.num_live, self.end, self.num_blocks, self.read_only, self.epoch):
            column[row] = 0

    # -- inside -----------------------------------------------------------------------------------------------

    def _adopt_blocks(
        self, rows: Ints, end: Ints, block_table: NDArray[np.int32], num_blocks: Ints, at: Ints | None
    ) -> None:
        """Take up the blocks that have come, so that each request has room up to its new end."""
        grown = num_blocks - self.num_blocks[rows]
        some_grown = grown.any()
        if some_grown and (grown < 0).any():
            raise ValueError("a request cannot lose blocks while it registers new tokens")
        if (end > num_blocks * self.block_size).any():
            raise ValueError("the blocks of a request do not hold its new tokens")
        if some_grown:
            at = np.arange(len(rows)) if at is None else at
            column = ranges(self.num_blocks[rows], grown)
            self.blocks[np.repeat(rows, grown), column] = block_table[np.repeat(at, grown), column]
            self.num_blocks[rows] = num_blocks

    def _rearrange(self, row: int, order: Ints) -> None:
        """Give a request its blocks in a new order: per new column the old one, -1 for an empty block."""
        held, size = int(self.num_blocks[row]), self.block_size
        stays = order >= 0
        by_block = np.full((len(order), size), HOLE, dtype=np.int32)
        by_block[stays] = self.logical_at[row, : held * size].reshape(held, size)[order[stays]]
        tokens = by_block.reshape(-1)
        self.logical_at[row, : held * size] = HOLE
        self.logical_at[row, : len(tokens)] = tokens
        positions = np.flatnonzero(tokens != HOLE)
        self.physical_of[row, tokens[positions]] = positions
        for array in (self.blocks, self.live_in_block):
            old = array[row, :held].copy()
            array[row, : max(held, len(order))] = 0
            array[row, : len(order)][stays] = old[order[stays]]
        self.num_blocks[row] = len(order)

    def _lowest_hole(self, rows: Ints, dense_end: Ints) -> Ints:
        """The lowest position without a live token behind the read-only blocks: there is one up to the dense end."""
        if not len(rows):
            return np.empty(0, dtype=np.int64)
        holes = self.logical_at[rows, : int(dense_end.max()) + 1] == HOLE
        if self.read_only[rows].any():
            holes &= np.arange(holes.shape[1]) >= self.read_only[rows, None] * self.block_size
        return np.argmax(holes, axis=1)

    def _require_no_holes(self, rows: Ints) -> None:
        for row in rows:  # several tokens after an eviction: not in steady decode
            private = slice(self.read_only[row] * self.block_size, self.dense_end(np.array([row]))[0])
            if (self.logical_at[row, private] == HOLE).any():
                raise ValueError("several tokens can only be appended to a request without holes")

    def _grow_rows(self) -> None:
        old = len(self.length)
        for name in (
            "physical_of",
            "logical_at",
            "blocks",
            "live_in_block",
            "length",
            "num_live",
            "end",
            "num_blocks",
            "read_only",
            "epoch",
        ):
            array = getattr(self, name)
            fill = HOLE if name in ("physical_of", "logical_at") else 0
            setattr(self, name, np.concatenate([array, np.full_like(array, fill)]))
        self._row_of.grow(2 * old)

    def _grow_columns(self, tokens: int, blocks: int) -> None:
        # One column more than the slots in use, so that looking for the lowest hole never runs off the end.
        need = max(tokens, blocks * self.block_size) + 1
        have = self.physical_of.shape[1]
        if need <= have:
            return
        width = -(-max(need, 2 * have) // self.block_size) * self.block_size
        for name in ("physical_of", "logical_at"):
            self._widen(name, width, HOLE)
        for name in ("blocks", "live_in_block"):
            self._widen(name, width // self.block_size, 0)

    def _widen(self, name: str, width: int, fill: int) -> None:
        array = getattr(self, name)
        wider = np.full((array.shape[0], width), fill, dtype=array.dtype)
        wider[:, : array.shape[1]] = array
        setattr(self, name, wider)


def _has_duplicates(rows: Ints, columns: Ints) -> bool:
    if len(rows) < 2:
        return False
    keys = rows * (int(columns.max()) + 1) + columns
    return len(np.unique(keys)) != len(keys)
