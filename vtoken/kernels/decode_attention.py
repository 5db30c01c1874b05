"""Attention of one new token per request over a paged cache, which also says how much each position was looked at."""

import torch
from torch import Tensor

from vtoken.kernels.layout import positions_of


def live_positions(live: Tensor | None, row: int, length: int, device: torch.device) -> Tensor:
    """Which of the first ``length`` positions take part, int64: all of them without a mask."""
    return torch.arange(length, device=device) if live is None else live[row, :length].nonzero()[:, 0]


def decode_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    output: Tensor,
    mass: Tensor,
    mass_offsets: Tensor,
    live: Tensor | None = None,
) -> None:
    """Write each request's attention output, and add to ``mass`` how its query heads spread their probability.

    The query of request r attends the positions 0 .. lengths[r] - 1, of which position p lies at block
    ``block_table[r, p // S]``, offset ``p % S``. Query head h uses KV head ``h // (Hq // H)``. For each head,

        probability = softmax(scale * query @ keys.T),  output = probability @ values,

    and ``mass[:, mass_offsets[r] + p]`` gains the sum of position p's probability over the Hq heads, so a request
    adds Hq in all. What lies beyond a request's length, in the cache as in the table, has no influence.

    Nor has what the slots of positions hold that are not ``live``; their probability is exactly 0. (On the CPU their
    values have to be finite, as those of any token are that was once computed.) The queries of a
    prompt's chunk are a row each, with its own row of table and mask, and with the positions that it attends.

    The compiled versions are the same function; they differ in the lane of ``mass`` that they add to. Scores,
    softmax and sums are in float32 whatever the dtype of the cache.

    Args:
        query: [R, Hq, D].
        key_cache, value_cache: one layer's cache, [blocks, S, H, D] each, any strides.
        block_table: [R, W], int32.
        lengths: positions of each request, [R], at least 1 each.
        scale: what a product of query and key is multiplied by, usually D ** -0.5.
        output: [R, Hq, D], written.
        mass: float32 [lanes, N], added to, never cleared. No two workers add to the same lane: it is for the
            caller to sum over them. The reference uses lane 0.
        mass_offsets: where each request's position 0 lies in ``mass``, [R], or -1 if its mass is not wanted. The
            requests' ranges do not overlap.
        live: bool [R, P], P >= the largest length, True where a position takes part, at least once within each
            request's length; None: all do.
    """
    group = query.shape[1] // key_cache.shape[2]
    for request in range(len(query)):
        length, offset = int(lengths[request]), int(mass_offsets[request])
        at = live_positions(live, request, length, query.device)
        keys = positions_of(key_cache, block_table[request], length)[at].float().repeat_interleave(group, dim=1)
        values = positions_of(value_cache, block_table[request], length)[at].float().repeat_interleave(group, dim=1)
        scores = scale * torch.einsum("hd,phd->hp", query[request].float(), keys)
        probability = torch.softmax(scores, dim=1)
        output[request] = torch.einsum("hp,phd->hd", probability, values).to(output.dtype)
        if offset >= 0:
            mass[0, offset + at] += probability.sum(dim=0)
