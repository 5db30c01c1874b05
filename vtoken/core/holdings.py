"""What the requests of a token table hold: blocks, and how many of their slots are live, dead or not used yet."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.core.history import Holding
from vtoken.core.ragged import Ints
from vtoken.core.token_table import TokenTable


@dataclass(frozen=True)
class PoolUse:
    """Blocks and slots that requests hold; what several of them share counts once.

    Attributes:
        blocks: held.
        slots: of these blocks.
        live: slots whose token somebody attends.
        dead: slots whose token nobody attends any more. The others are not used yet.
    """

    blocks: int
    slots: int
    live: int
    dead: int

    @property
    def waste(self) -> float:
        """F = 1 - live / slots; 0 if nothing is held."""
        return 1.0 - self.live / self.slots if self.slots else 0.0


def pool_use(table: TokenTable, req_ids: Iterable[str] | None = None) -> PoolUse:
    """What these requests hold together, or all of them. Raises KeyError for one that has no row."""
    size, rows = table.block_size, table.rows(table.req_ids if req_ids is None else req_ids)
    place, column = np.nonzero(np.arange(table.blocks.shape[1]) < table.num_blocks[rows, None])
    row = rows[place]
    ids, live = table.blocks[row, column], table.live_in_block[row, column]
    used = np.clip(table.end[row] - column * size, 0, size)
    shared = np.bincount(ids)[ids] > 1 if len(ids) else np.zeros(0, dtype=np.bool_)
    alone = ~shared
    blocks, num_live, num_used = int(alone.sum()), int(live[alone].sum()), int(used[alone].sum())
    if shared.any():
        distinct, block = np.unique(ids[shared], return_inverse=True)
        slots = column[shared, None] * size + np.arange(size)
        lives = np.zeros((len(distinct), size), dtype=np.bool_)
        np.logical_or.at(lives, block, table.logical_at[row[shared, None], slots] >= 0)
        filled = np.zeros(len(distinct), dtype=np.int64)
        np.maximum.at(filled, block, used[shared])
        blocks, num_live, num_used = blocks + len(distinct), num_live + int(lives.sum()), num_used + int(filled.sum())
    return PoolUse(blocks, blocks * size, num_live, num_used - num_live)


@dataclass(frozen=True)
class Holdings:
    """Who holds which blocks, as flat arrays: the requests one after the other, each in the order of its positions.

    Attributes:
        names: the R requests.
        counts: blocks of each, shape [R].
        blocks, live: block ids, and how many live tokens each of them has, shape [N].
    """

    names: list[str]
    counts: Ints
    blocks: NDArray[np.int32]
    live: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.blocks.nbytes + self.live.nbytes

    def listed(self) -> list[Holding]:
        """The same, request by request."""
        ends = np.cumsum(self.counts)[:-1]
        each = zip(self.names, np.split(self.blocks, ends), np.split(self.live, ends), strict=True)
        return [Holding(name, blocks.tolist(), live.tolist()) for name, blocks, live in each] if self.names else []


def holdings(table: TokenTable) -> Holdings:
    """Who holds which blocks of this table, and how much of each is live."""
    names = list(table.req_ids)
    rows = table.rows(names)
    place, column = np.nonzero(np.arange(table.blocks.shape[1]) < table.num_blocks[rows, None])
    row = rows[place]
    return Holdings(names, table.num_blocks[rows], table.blocks[row, column], table.live_in_block[row, column])
