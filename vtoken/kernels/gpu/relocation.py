"""Relocation on a GPU: checked in Triton's interpreter and compiled for sm_90; not yet run on hardware."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from vtoken.kernels.layout import BlockLayout


@triton.jit
def copy_tokens(
    cache,
    layer_stride,
    block_stride,
    number_stride,
    elements,
    sources,
    destinations,
    BLOCK_SIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per move, layer and TILE of a token's numbers.

    No destination is named twice and no slot is both, so the order is free.
    """
    source, destination = tl.load(sources + tl.program_id(0)), tl.load(destinations + tl.program_id(0))
    layer = cache + tl.program_id(1).to(tl.int64) * layer_stride
    number = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = number < NUMBERS
    read = tl.load(elements + source % BLOCK_SIZE * NUMBERS + number, mask=inside, other=0)
    write = tl.load(elements + destination % BLOCK_SIZE * NUMBERS + number, mask=inside, other=0)
    source_block = layer + source // BLOCK_SIZE * block_stride
    destination_block = layer + destination // BLOCK_SIZE * block_stride
    values = tl.load(source_block + read.to(tl.int64) * number_stride, mask=inside)
    tl.store(destination_block + write.to(tl.int64) * number_stride, values, mask=inside)


def relocate(cache: Tensor, layout: BlockLayout, sources: Tensor, destinations: Tensor) -> None:
    """``relocate_reference`` in one launch; ``cache`` is an integer view, sources and destinations are int64."""
    elements = layout.elements.to(torch.int32)
    numbers = elements.shape[1]
    tile = min(1024, triton.next_power_of_2(numbers))
    grid = (len(sources), len(cache), triton.cdiv(numbers, tile))
    copy_tokens[grid](
        cache,
        *cache.stride(),
        elements,
        sources,
        destinations,
        BLOCK_SIZE=layout.block_size,
        NUMBERS=numbers,
        TILE=tile,
    )
