"""Pure functions from a snapshot of the token table to a plan of moves."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ragged import Ints, ranges
from vtoken.core.token_table import HOLE, Moves


@dataclass(frozen=True)
class Snapshot:
    """What the planner may look at: the requests concerned, as they are between two forwards.

    Shapes: ``rows`` [R], ``logical_at`` [R, W] (token per physical position, -1 for a hole), ``start`` [R], the first
    position that may be written, ``end`` [R], one past the last token once all holes from there on are filled.
    """

    rows: Ints
    logical_at: NDArray[np.int32]
    start: Ints
    end: Ints


@dataclass(frozen=True)
class Plan:
    """Moves, and how many leading blocks each request keeps afterwards. Shapes: ``rows``, ``keep_blocks`` [R]."""

    rows: Ints
    moves: Moves
    keep_blocks: Ints


def plan_fill(snapshot: Snapshot, next_tokens: Ints, block_size: int) -> Plan:
    """Make each request dense for its next forward by moving the fewest tokens into its own holes.

    With L live tokens and one token to come, positions 0 ... L are to be full at the next forward. Every live
    token that lies beyond moves into the lowest hole that is left; one hole among the first L + 1 stays for the
    new token. E evicted tokens cause at most E - 1 moves, and one eviction per step causes none at all. Read-only
    blocks at the front are left as they are, holes and all: then L counts the tokens behind them, and so do positions.

    Args:
        next_tokens: shape [R], 1 if the next forward computes a single token and may recycle a hole, else 0:
            then all holes are filled, and the tokens of the next forward are appended.
        block_size: slots per block.
    """
    extent = snapshot.end + next_tokens
    width = snapshot.logical_at.shape[1]
    columns = np.arange(width)
    holes = (snapshot.logical_at == HOLE) & (columns < extent[:, None]) & (columns >= snapshot.start[:, None])
    stragglers = (snapshot.logical_at != HOLE) & (columns >= extent[:, None])
    moving = stragglers.sum(axis=1)

    source_row, source = np.nonzero(stragglers)
    hole_row, hole = np.nonzero(holes)
    # np.nonzero lists row by row in ascending order, so each request's lowest `moving` holes come first.
    taken = ranges(np.searchsorted(hole_row, np.arange(len(snapshot.rows))), moving)
    moves = Moves(snapshot.rows[source_row], source.astype(np.int64), hole[taken].astype(np.int64))
    return Plan(snapshot.rows, moves, -(-extent // block_size))


@dataclass(frozen=True)
class Packing:
    """Some sparse blocks of one request that are copied together.

    Attributes:
        row: of the request.
        sources: places of the blocks in the request's row, ascending, [m].
        destinations: blocks that their live tokens fill, fewer than m.
    """

    row: int
    sources: Ints
    destinations: int


def choose_packings(
    rows: Ints,
    live_in_block: NDArray[np.int32],
    full_blocks: Ints,
    most_sources: int,
    most_destinations: int,
    block_size: int,
) -> list[Packing]:
    """Which blocks to pack, the requests with the most dead slots first.

    Of each request the blocks with the fewest live tokens are taken, up to ``most_sources`` of them, and of these as
    many as free the most blocks on balance (fewer if that frees as many, or if there is no room for more). A
    request whose blocks would not become fewer is left alone.

    Args:
        rows: shape [R].
        live_in_block: live tokens per block of each request, [R, W].
        full_blocks: leading blocks of each request that are not being filled any more, [R].
        most_sources: at most so many blocks per request.
        most_destinations: at most so many blocks to copy into, over all requests.
        block_size: slots per block.
    """
    full = np.arange(live_in_block.shape[1]) < full_blocks[:, None]
    dead = np.where(full, block_size - live_in_block, 0).sum(axis=1)
    packings: list[Packing] = []
    for n in np.argsort(-dead, kind="stable").tolist():
        if dead[n] < block_size or most_destinations < 1:
            break
        live = live_in_block[n, : full_blocks[n]]
        sparsest = np.argsort(live, kind="stable")[:most_sources]
        needed = -(-np.cumsum(live[sparsest]) // block_size)
        gain = np.arange(1, len(sparsest) + 1) - needed
        gain[needed > most_destinations] = 0
        if gain.max() > 0:
            best = int(np.argmax(gain))
            packings.append(Packing(int(rows[n]), np.sort(sparsest[: best + 1]), int(needed[best])))
            most_destinations -= int(needed[best])
    return packings


def plan_packing(packing: Packing, logical_at: NDArray[np.int32], block_size: int) -> Moves:
    """The moves of one packing, in logical order, once its destinations stand before the first source.

    Args:
        packing: its ``sources`` count without the destinations.
        logical_at: token per position of the request's row with the destinations inserted, [W].
        block_size: slots per block.
    """
    first = int(packing.sources[0]) * block_size
    columns = packing.sources + packing.destinations
    positions = (columns[:, None] * block_size + np.arange(block_size)).reshape(-1)
    positions = positions[logical_at[positions] != HOLE]
    positions = positions[np.argsort(logical_at[positions])]
    rows = np.full(len(positions), packing.row, dtype=np.int64)
    return Moves(rows, positions, first + np.arange(len(positions)))
