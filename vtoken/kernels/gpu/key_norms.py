"""Key norms on a GPU: checked in Triton's interpreter and compiled for sm_90; not yet run on hardware."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from vtoken.kernels.layout import BlockLayout


@triton.jit
def norms_per_layer(
    cache,
    layer_stride,
    block_stride,
    number_stride,
    elements,
    slots,
    norms,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """One program per token and layer: sum over the KV heads of the norm of the key."""
    token, layer = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    block = cache + layer.to(tl.int64) * layer_stride + slot // BLOCK_SIZE * block_stride
    dimension = tl.arange(0, HEAD_PAD)
    inside = dimension < HEAD_SIZE
    places = elements + slot % BLOCK_SIZE * (NUM_HEADS * HEAD_SIZE) + dimension
    total = 0.0
    for head in range(NUM_HEADS):
        element = tl.load(places + head * HEAD_SIZE, mask=inside, other=0)
        key = tl.load(block + element.to(tl.int64) * number_stride, mask=inside, other=0).to(tl.float32)
        total += tl.sqrt_rn(tl.sum(key * key))
    tl.store(norms + layer * tl.num_programs(0) + token, total)


def key_norms(cache: Tensor, layout: BlockLayout, num_heads: int, head_size: int, slots: Tensor) -> Tensor:
    """``key_norms_reference``; all layers are one launch, and torch then sums over them in a fixed order."""
    elements = layout.elements[:, : num_heads * head_size].to(torch.int32).contiguous()
    norms = torch.empty(len(cache), len(slots), device=cache.device)
    if len(slots):
        norms_per_layer[(len(slots), len(cache))](
            cache,
            *cache.stride(),
            elements,
            slots,
            norms,
            BLOCK_SIZE=layout.block_size,
            NUM_HEADS=num_heads,
            HEAD_SIZE=head_size,
            HEAD_PAD=triton.next_power_of_2(head_size),
            num_warps=1,
        )
    return norms.sum(dim=0)
