"""Attention mass on a GPU: checked in Triton's interpreter and compiled for sm_90; not yet run on hardware.

Two launches, which compute the logits twice rather than keep them: first every query's softmax denominator, a program
taking some queries over all their positions; then the mass, a program taking some positions over all queries that see
them. So each number of ``mass`` belongs to one program, with lane = KV head, and sums are made in a fixed order.

A tile's rows are (query, member of the KV head's group) pairs, since those share the keys.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vtoken.kernels.attention_mass import QuerySegments
from vtoken.kernels.gpu.tiles import LOWEST, attended, mask_arguments, tile_shape


@triton.jit
def load_segment(segments):
    """The program's column of [6, n]: first, count, context, row, offset, stride."""
    segment, n = tl.program_id(2), tl.num_programs(2)
    return (
        tl.load(segments + segment),
        tl.load(segments + n + segment).to(tl.int32),
        tl.load(segments + 2 * n + segment).to(tl.int32),
        tl.load(segments + 3 * n + segment),
        tl.load(segments + 4 * n + segment),
        tl.load(segments + 5 * n + segment),
    )


@triton.jit
def load_keys(
    keys, key_stride_b, key_stride_s, key_stride_h, key_stride_d, table_row, position, inside,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Keys of these positions, [HEAD_PAD, TILE]; 0 where not inside."""
    dimension = tl.arange(0, HEAD_PAD)
    block = tl.load(table_row + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    place = block * key_stride_b + position % BLOCK_SIZE * key_stride_s + tl.program_id(1) * key_stride_h
    return tl.load(
        keys + place[None, :] + dimension[:, None] * key_stride_d,
        mask=inside[None, :] & (dimension < HEAD_SIZE)[:, None],
        other=0,
    )


@triton.jit
def load_queries(
    query, query_stride_t, query_stride_h, query_stride_d, first, j, head, inside,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Queries of these rows, [rows, HEAD_PAD]; 0 where not inside."""
    dimension = tl.arange(0, HEAD_PAD)
    row = query + (first + j) * query_stride_t + head * query_stride_h
    return tl.load(
        row[:, None] + dimension[None, :] * query_stride_d,
        mask=inside[:, None] & (dimension < HEAD_SIZE)[None, :],
        other=0,
    )


@triton.jit
def sum_queries(
    query,
    query_stride_t,
    query_stride_h,
    query_stride_d,
    keys,
    key_stride_b,
    key_stride_s,
    key_stride_h,
    key_stride_d,
    block_table,
    table_stride,
    live,
    live_stride,
    segments,
    scale_log2,
    sums,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per QUERIES queries, KV head and segment: sums[query, head], the log2 of the denominator."""
    first, count, context, table_row, _, _ = load_segment(segments)
    first_j = tl.program_id(0) * QUERIES
    if first_j >= count:
        return
    row = tl.arange(0, QUERIES * GROUP_PAD)
    j, member = first_j + row // GROUP_PAD, row % GROUP_PAD
    head = tl.program_id(1) * GROUP + member
    inside = (j < count) & (member < GROUP)
    q = load_queries(query, query_stride_t, query_stride_h, query_stride_d, first, j, head, inside, HEAD_SIZE, HEAD_PAD)
    end = context + tl.minimum(first_j + QUERIES, count) - 1
    seen = tl.minimum(context + j, end)

    highest = tl.full([QUERIES * GROUP_PAD], LOWEST, tl.float32)
    total = tl.zeros([QUERIES * GROUP_PAD], tl.float32)
    for start in range(0, end, TILE):
        position = start + tl.arange(0, TILE)
        attending = attended(live, live_stride, table_row, position, end)
        key = load_keys(
            keys, key_stride_b, key_stride_s, key_stride_h, key_stride_d,
            block_table + table_row * table_stride, position, attending, BLOCK_SIZE, HEAD_SIZE, HEAD_PAD,
        )  # fmt: skip
        logit = tl.dot(q, key, input_precision="ieee") * scale_log2
        logit = tl.where(attending[None, :] & (position[None, :] < seen[:, None]), logit, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logit, 1))
        total = total * tl.exp2(highest - new_highest) + tl.sum(tl.exp2(logit - new_highest[:, None]), 1)
        highest = new_highest
    tl.store(sums + (first + j) * tl.num_programs(1) * GROUP + head, highest + tl.log2(total), mask=inside)


@triton.jit
def add_mass(
    query,
    query_stride_t,
    query_stride_h,
    query_stride_d,
    keys,
    key_stride_b,
    key_stride_s,
    key_stride_h,
    key_stride_d,
    block_table,
    table_stride,
    live,
    live_stride,
    segments,
    scale_log2,
    sums,
    decays_log2,
    mass,
    mass_stride,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per TILE positions, KV head and segment: what all queries of the segment give to these positions."""
    first, count, context, table_row, offset, stride = load_segment(segments)
    end = context + count - 1
    start = tl.program_id(0) * TILE
    if start >= end:
        return
    position = start + tl.arange(0, TILE)
    attending = attended(live, live_stride, table_row, position, end)
    key = load_keys(
        keys, key_stride_b, key_stride_s, key_stride_h, key_stride_d,
        block_table + table_row * table_stride, position, attending, BLOCK_SIZE, HEAD_SIZE, HEAD_PAD,
    )  # fmt: skip
    row, turn = tl.arange(0, QUERIES * GROUP_PAD), tl.arange(0, QUERIES)
    member = row % GROUP_PAD
    head = tl.program_id(1) * GROUP + member
    lane = mass + tl.program_id(1).to(tl.int64) * mass_stride + offset

    decay_log2 = tl.load(decays_log2 + tl.program_id(2))
    summed = tl.zeros([TILE], tl.float32)
    first_to_see = tl.maximum(start - context + 1, 0)
    for first_j in range(first_to_see // QUERIES * QUERIES, count, QUERIES):
        j = first_j + row // GROUP_PAD
        inside = (j < count) & (member < GROUP)
        q = load_queries(
            query, query_stride_t, query_stride_h, query_stride_d, first, j, head, inside, HEAD_SIZE, HEAD_PAD
        )
        whole = tl.load(sums + (first + j) * tl.num_programs(1) * GROUP + head, mask=inside, other=0)
        logit = tl.dot(q, key, input_precision="ieee") * scale_log2
        visible = inside[:, None] & attending[None, :] & (position[None, :] < (context + j)[:, None])
        probability = tl.where(visible, tl.exp2(logit - whole[:, None]), 0.0)
        of_query = tl.sum(tl.reshape(probability, [QUERIES, GROUP_PAD, TILE]), 1)
        query_j = first_j + turn
        if stride == 0:
            younger = tl.maximum(count - 1 - query_j, 0).to(tl.float32)
            summed += tl.sum(of_query * tl.exp2(younger * decay_log2)[:, None], 0)
        else:
            place = lane + query_j[:, None] * stride + position[None, :]
            seen = (query_j < count)[:, None] & (position[None, :] < (context + query_j)[:, None])
            tl.store(place, tl.load(place, mask=seen, other=0) + of_query, mask=seen)
    if stride == 0:
        before = tl.load(lane + position, mask=position < end, other=0)
        tl.store(lane + position, before + summed, mask=position < end)


def attention_mass(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    segments: QuerySegments,
    scale: float,
    mass: Tensor,
    live: Tensor | None = None,
) -> None:
    """``attention_mass_reference``, with lane of ``mass`` = KV head; everything after the products is float32.

    The positions of ``live`` are contiguous.
    """
    if not len(segments.first):
        return
    tokens, query_heads, _ = query.shape
    kv_heads = key_cache.shape[2]
    group = query_heads // kv_heads
    group_pad = triton.next_power_of_2(group)
    queries = max(1, (16 if key_cache.element_size() == 4 else 64) // group_pad)
    fields = (segments.first, segments.count, segments.context, segments.row, segments.offset, segments.stride)
    sums = torch.empty(tokens, query_heads, device=query.device)
    decays = torch.from_numpy(np.log2(segments.decay).astype(np.float32)).to(query.device)
    arguments = (
        query,
        *query.stride(),
        key_cache,
        *key_cache.stride(),
        block_table,
        block_table.stride(0),
        *mask_arguments(live),
        torch.from_numpy(np.stack(fields)).to(query.device),
        scale / math.log(2),
        sums,
    )
    shape = {
        "BLOCK_SIZE": key_cache.shape[1],
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "QUERIES": queries,
        **tile_shape(key_cache),
    }
    n, longest = len(segments.first), int((segments.context + segments.count).max()) - 1
    sum_queries[(triton.cdiv(int(segments.count.max()), queries), kv_heads, n)](*arguments, **shape)
    add_mass[(triton.cdiv(longest, shape["TILE"]), kv_heads, n)](*arguments, decays, mass, mass.stride(0), **shape)
