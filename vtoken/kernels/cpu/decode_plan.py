"""Which thread does what in a decode step's attention: the same for all layers, so it is decided once per step."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vtoken.core.ragged import Ints
from vtoken.kernels.cpu.vectors import record_of

PIECE = record_of("request head block tokens part state first_state states")
"""A run of a request's tokens for one KV head, worked on by one thread.

``block`` is the first one's place in the request's row, ``part`` where its logits start in the thread's scratch,
``state`` where its sums lie; its softmax consists of ``states`` of them from ``first_state`` on.
"""

SHORTEST = 4
"""Blocks from a softmax's end within which no cut is made: two threads' merging costs more than they save."""


@dataclass(frozen=True)
class DecodePlan:
    """How a step's work is divided.

    Attributes:
        pieces: records ``PIECE``, in the order of request, head and block.
        lane_pieces: where each lane's pieces start, and where the last one's end, [lanes + 1].
        divided: some softmax is worked on by several threads.
        parts, states: room that is needed for these, the parts per lane.
    """

    pieces: Any
    lane_pieces: Ints
    divided: bool
    parts: int
    states: int


def divide(lengths: Ints, heads: int, lanes: int, size: int, per_part: int) -> DecodePlan:
    """Cut the work into pieces, in order of request and KV head, and deal them out.

    Args:
        lengths: tokens of each request, at least 1, [R].
        heads: KV heads of a request.
        lanes: threads.
        size: tokens of a block.
        per_part: blocks of a part.
    """
    blocks = -(-lengths // size)
    ends = np.cumsum(np.repeat(blocks, heads))
    starts = ends - np.repeat(blocks, heads)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(1, lanes) * total // lanes
    following = np.searchsorted(ends, cuts, side="right")
    if total:
        for bound in (starts, ends):
            cuts = np.where(np.abs(cuts - bound[following]) < SHORTEST, bound[following], cuts)
    edges = np.unique(np.concatenate([starts, cuts, [total]]))
    first, last = edges[:-1], edges[1:]
    softmax = np.searchsorted(ends, first, side="right")

    pieces = np.zeros(len(first), dtype=PIECE)
    request = softmax // heads
    block = first - starts[softmax]
    pieces["request"], pieces["head"], pieces["block"] = request, softmax % heads, block
    pieces["tokens"] = np.minimum((last - first) * size, lengths[request] - block * size)
    lane_pieces = np.searchsorted(first, np.concatenate([[0], cuts, [total]]))

    # Whole softmaxes take turns in one place of a thread's scratch; what waits for others has places of its own.
    parts = -(-(last - first) // per_part)
    whole = (first == starts[softmax]) & (last == ends[softmax])
    lane = np.searchsorted(lane_pieces, np.arange(len(first)), side="right") - 1
    pieces["state"] = pieces["first_state"] = lane
    pieces["states"] = 1
    after = np.full(lanes, parts[whole].max(initial=0))
    for state, piece in enumerate(np.flatnonzero(~whole), start=lanes):
        pieces["part"][piece] = after[lane[piece]]
        after[lane[piece]] += parts[piece]
        pieces["state"][piece] = state
        same = (softmax == softmax[piece]).nonzero()[0]
        pieces["first_state"][piece] = state - (piece - same[0])
        pieces["states"][piece] = len(same)
    return DecodePlan(pieces, lane_pieces, not whole.all(), int(after.max(initial=0)), lanes + int((~whole).sum()))
