"""Decode attention on a GPU: checked in Triton's interpreter and compiled for sm_90; not yet run on hardware.

Two launches. The first cuts every request's context into parts that are attended on their own (as Flash-Decoding
does, Dao et al. 2023), so that few long requests still fill the device; it leaves the logits behind. The second joins
the parts and turns the logits into probabilities, for which the denominator over the whole context is needed.
Programs write to places of their own: lane of ``mass`` = KV head, so nothing depends on the order in which they run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vtoken.kernels.gpu.tiles import LOWEST, attended, mask_arguments, tile_shape

PROGRAMS = 1024
"""Wanted in a launch: several for each multiprocessor of a large device."""


@triton.jit
def part_of(length, part, PARTS: tl.constexpr, TILE: tl.constexpr):
    """Bounds of a part of the positions: whole tiles, shared out evenly."""
    size = tl.cdiv(tl.cdiv(length, PARTS), TILE) * TILE
    start = tl.minimum(part * size, length)
    return start, tl.minimum(start + size, length)


@triton.jit
def add_tile(logit, value, highest, total, output):
    """The running softmax after one more tile: logits [members, tokens], values [tokens, dimensions]."""
    new_highest = tl.maximum(highest, tl.max(logit, 1))
    probability = tl.exp2(logit - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    output = tl.dot(probability.to(value.dtype), value, output * shrink[:, None], input_precision="ieee")
    return new_highest, total * shrink + tl.sum(probability, 1), output


@triton.jit
def store_part(outputs, sums, line, highest, total, output, in_group, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Leave a part's output and the log2 of its denominator; where nothing was live, no NaN and no weight."""
    dimension = tl.arange(0, HEAD_PAD)
    nonempty = tl.where(total > 0, total, 1)
    tl.store(sums + line, tl.where(total > 0, highest + tl.log2(nonempty), float("-inf")), mask=in_group)
    tl.store(
        outputs + line[:, None] * HEAD_SIZE + dimension[None, :],
        output / nonempty[:, None],
        mask=in_group[:, None] & (dimension < HEAD_SIZE)[None, :],
    )


@triton.jit
def attend_part(
    query,
    query_stride_r,
    query_stride_h,
    query_stride_d,
    keys,
    key_stride_b,
    key_stride_s,
    key_stride_h,
    key_stride_d,
    values,
    value_stride_b,
    value_stride_s,
    value_stride_h,
    value_stride_d,
    block_table,
    table_stride,
    live,
    live_stride,
    lengths,
    mass_offsets,
    scale_log2,
    logits,
    logits_stride,
    outputs,
    sums,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per request, KV head and part: attention within the part.

    Leaves logits[query head, offset + position] in units of log2 if mass is wanted, the part's normalised output
    outputs[request, query head, part, dimension], and sums[request, query head, part], the log2 of its denominator.
    """
    request, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start, end = part_of(tl.load(lengths + request).to(tl.int32), part, PARTS, TILE)
    offset = tl.load(mass_offsets + request).to(tl.int64)
    kept_end = tl.where(offset >= 0, end, start)
    member, dimension = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_PAD)
    head = kv_head * GROUP + member
    in_group, in_head = member < GROUP, dimension < HEAD_SIZE

    q = tl.load(
        query + request * query_stride_r + head[:, None] * query_stride_h + dimension[None, :] * query_stride_d,
        mask=in_group[:, None] & in_head[None, :],
        other=0,
    )
    highest = tl.full([GROUP_PAD], LOWEST, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    output = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        inside = attended(live, live_stride, request, position, end)
        block = tl.load(block_table + request * table_stride + position // BLOCK_SIZE, mask=inside, other=0).to(
            tl.int64
        )
        place = position % BLOCK_SIZE
        key = tl.load(
            keys
            + kv_head * key_stride_h
            + (block * key_stride_b + place * key_stride_s)[None, :]
            + dimension[:, None] * key_stride_d,
            mask=in_head[:, None] & inside[None, :],
            other=0,
        )
        logit = tl.dot(q, key, input_precision="ieee") * scale_log2
        logit = tl.where(inside[None, :], logit, float("-inf"))
        tl.store(
            logits + head[:, None].to(tl.int64) * logits_stride + offset + position[None, :],
            logit,
            mask=in_group[:, None] & (position < kept_end)[None, :],
        )
        value = tl.load(
            values
            + kv_head * value_stride_h
            + (block * value_stride_b + place * value_stride_s)[:, None]
            + dimension[None, :] * value_stride_d,
            mask=inside[:, None] & in_head[None, :],
            other=0,
        )
        highest, total, output = add_tile(logit, value, highest, total, output)

    line = (request * tl.num_programs(1) * GROUP + head) * PARTS + part
    store_part(outputs, sums, line, highest, total, output, in_group, HEAD_SIZE, HEAD_PAD)


@triton.jit
def join_parts(
    logits,
    logits_stride,
    outputs,
    sums,
    lengths,
    mass_offsets,
    output,
    output_stride_r,
    output_stride_h,
    output_stride_d,
    mass,
    mass_stride,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per request, KV head and part: the mass of the part's positions, and in part 0 the output."""
    request, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start, end = part_of(tl.load(lengths + request).to(tl.int32), part, PARTS, TILE)
    offset = tl.load(mass_offsets + request).to(tl.int64)
    end = tl.where(offset >= 0, end, start)
    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    in_group = member < GROUP

    line = (request * tl.num_programs(1) * GROUP + head) * PARTS
    part_sums = tl.load(sums + line[:, None] + tl.arange(0, PARTS)[None, :], mask=in_group[:, None], other=0)
    highest = tl.max(part_sums, 1)
    whole = highest + tl.log2(tl.sum(tl.exp2(part_sums - highest[:, None]), 1))

    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        inside = in_group[:, None] & (position < end)[None, :]
        logit = tl.load(
            logits + head[:, None].to(tl.int64) * logits_stride + offset + position[None, :],
            mask=inside,
            other=float("-inf"),
        )
        probability = tl.sum(tl.exp2(logit - whole[:, None]), 0)
        place = mass + kv_head.to(tl.int64) * mass_stride + offset + position
        before = tl.load(place, mask=position < end, other=0)
        tl.store(place, before + probability, mask=position < end)

    if part == 0:
        dimension = tl.arange(0, HEAD_PAD)
        inside = in_group[:, None] & (dimension < HEAD_SIZE)[None, :]
        joined = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
        for other_part in range(PARTS):
            weight = tl.exp2(tl.load(sums + line + other_part, mask=in_group, other=0) - whole)
            row = (line + other_part)[:, None] * HEAD_SIZE + dimension[None, :]
            joined += weight[:, None] * tl.load(outputs + row, mask=inside, other=0)
        place = request * output_stride_r + head[:, None] * output_stride_h + dimension[None, :] * output_stride_d
        tl.store(output + place, joined.to(output.dtype.element_ty), mask=inside)


def decode_attention(
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
    """``decode_attention_reference``, with lane of ``mass`` = KV head; the positions of ``live`` are contiguous.

    Logits, softmax and mass are float32. As in most fused kernels, a probability is rounded to the dtype of the values
    before it is multiplied with them. The number of parts depends on shapes alone, never on lengths: they stay on the
    device, and equal batches give equal bits.
    """
    requests, query_heads, head_size = query.shape
    kv_heads = key_cache.shape[2]
    parts = max(1, min(16, triton.next_power_of_2(PROGRAMS // (requests * kv_heads))))
    logits = torch.empty(query_heads, mass.shape[1], device=query.device)
    outputs = torch.empty(requests, query_heads, parts, head_size, device=query.device)
    sums = torch.empty(requests, query_heads, parts, device=query.device)
    shape = {
        "GROUP": query_heads // kv_heads,
        "GROUP_PAD": max(16, triton.next_power_of_2(query_heads // kv_heads)),  # tensor cores take 16 rows
        "PARTS": parts,
        **tile_shape(key_cache),
    }
    grid = (requests, kv_heads, parts)
    attend_part[grid](
        query,
        *query.stride(),
        key_cache,
        *key_cache.stride(),
        value_cache,
        *value_cache.stride(),
        block_table,
        block_table.stride(0),
        *mask_arguments(live),
        lengths,
        mass_offsets,
        scale / math.log(2),
        logits,
        logits.stride(0),
        outputs,
        sums,
        BLOCK_SIZE=key_cache.shape[1],
        **shape,
    )
    join_parts[grid](
        logits,
        logits.stride(0),
        outputs,
        sums,
        lengths,
        mass_offsets,
        output,
        *output.stride(),
        mass,
        mass.stride(0),
        **shape,
    )
