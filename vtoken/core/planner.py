"""Pure functions from a snapshot of the token table to a plan of moves."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ragged import Ints, ranges
from vtoken.core.token_table import HOLE, Moves


@dataclass(frozen=True)
class Snapshot:
    """What the planner may look at: the requests concerned, as they are between two forwards.

    Shapes: ``rows`` [R], ``logical_at`` [R, W] (token per physical position, -1 for a hole), ``num_live`` [R].
    """

    rows: Ints
    logical_at: NDArray[np.int32]
    num_live: Ints


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
    new token. E evicted tokens cause at most E - 1 moves, and one eviction per step causes none at all.

    Args:
        next_tokens: shape [R], 1 if the next forward computes a single token and may recycle a hole, else 0:
            then all holes are filled, and the tokens of the next forward are appended.
        block_size: slots per block.
    """
    extent = snapshot.num_live + next_tokens
    width = snapshot.logical_at.shape[1]
    columns = np.arange(width)
    holes = (snapshot.logical_at == HOLE) & (columns < extent[:, None])
    stragglers = (snapshot.logical_at != HOLE) & (columns >= extent[:, None])
    moving = stragglers.sum(axis=1)

    source_row, source = np.nonzero(stragglers)
    hole_row, hole = np.nonzero(holes)
    # np.nonzero lists row by row in ascending order, so each request's lowest `moving` holes come first.
    taken = ranges(np.searchsorted(hole_row, np.arange(len(snapshot.rows))), moving)
    moves = Moves(snapshot.rows[source_row], source.astype(np.int64), hole[taken].astype(np.int64))
    return Plan(snapshot.rows, moves, -(-extent // block_size))
