"""How much attention each cached position gets from runs of consecutive queries, without the attention's output."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.core.ragged import Ints
from vtoken.kernels.decode_attention import live_positions
from vtoken.kernels.layout import positions_of


@dataclass(frozen=True)
class QuerySegments:
    """Runs of consecutive queries, each of one request; one number for each of n segments, shape [n].

    All int64, but for ``decay``, which is float64.

    Attributes:
        first: row in ``query`` of a segment's first query.
        count: queries, at least 1.
        context: positions that the first query attends, at least 1; the j-th attends ``context + j``.
        row: the request's row of the block table.
        offset: where position 0 lies in ``mass``.
        stride: 0 if all queries of the segment add up at ``offset``; otherwise query j adds at ``offset + j * stride``.
        decay: where they add up, the weight of a query relative to the one after it, 0 < decay <= 1.

    The places that two segments add to do not overlap, nor do those of two queries whose stride is not 0.
    """

    first: Ints
    count: Ints
    context: Ints
    row: Ints
    offset: Ints
    stride: Ints
    decay: NDArray[np.float64]


def attention_mass_reference(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    segments: QuerySegments,
    scale: float,
    mass: Tensor,
    live: Tensor | None = None,
) -> None:
    """Add to ``mass`` the probability that the queries' heads give to each position they attend.

    With ``probability[h] = softmax(scale * query[h] @ keys.T)`` over the ``context + j`` positions that the j-th
    query of a segment attends,

        mass[:, offset + j * stride + p] += weight_j * sum over the Hq heads of probability[h, p],

    where ``weight_j = decay ** (count - 1 - j)`` if stride is 0, and 1 otherwise: a running score that fades by
    ``decay`` per query, of which the last counts in full. The positions are found as in
    ``decode_attention_reference``, and here too the compiled versions differ in the lane of ``mass`` alone and
    what lies beyond a query's context has no influence. Nor has what the slots of positions hold that are not
    ``live``; their probability is exactly 0.

    Args:
        query: [T, Hq, D].
        key_cache: one layer's keys, [blocks, S, H, D], any strides; they hold the keys of the queries' own tokens.
        block_table: [R, W], int32.
        segments: which queries to look at, and where their mass goes.
        scale: what a product of query and key is multiplied by, usually D ** -0.5.
        mass: float32 [lanes, N], added to, never cleared; the reference uses lane 0.
        live: bool [R, P], P >= the most positions attended, True where a position takes part, at least once within
            each query's context; None: all do.
    """
    group = query.shape[1] // key_cache.shape[2]
    fields = (segments.first, segments.count, segments.context, segments.row, segments.offset, segments.stride)
    numbers = zip(*(field.tolist() for field in (*fields, segments.decay)), strict=True)
    for first, count, context, row, offset, stride, decay in numbers:
        keys = positions_of(key_cache, block_table[row], context + count - 1).float().repeat_interleave(group, dim=1)
        for j in range(count):
            length, start = context + j, offset + j * stride
            at = live_positions(live, row, length, query.device)
            scores = scale * torch.einsum("hd,phd->hp", query[first + j].float(), keys[at])
            weight = decay ** (count - 1 - j) if stride == 0 else 1.0
            mass[0, start + at] += weight * torch.softmax(scores, dim=1).sum(dim=0)
