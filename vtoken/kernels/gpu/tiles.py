"""What the attention kernels share. Sizes are checked by compiling for sm_90 without spills, not tuned on hardware."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEY_BYTES = 16384
"""Keys of one tile: with the copies that are loaded ahead, within 99 KiB of shared memory up to head size 128."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Below every logit, and a number: a tile of dead positions only, compared with it, leaves exponentials of 0."""


@triton.jit
def attended(live, live_stride, row, position, end):  # type: ignore[no-untyped-def]
    """Which of these positions take part: those before ``end`` that are live, if there is a mask."""
    inside = position < end
    if live is not None:
        inside = inside & (tl.load(live + row * live_stride + position, mask=inside, other=0) != 0)
    return inside


def mask_arguments(live: Tensor | None) -> tuple[Tensor | None, int]:
    """``live`` and ``live_stride`` of ``attended``, for a mask [R, P] with contiguous positions, or for none."""
    return (None, 0) if live is None else (live.view(torch.uint8), live.stride(0))


def tile_shape(key_cache: Tensor) -> dict[str, Any]:
    """Launch options that follow from a layer's keys, [blocks, S, H, D]."""
    head_size, bytes_per_number = key_cache.shape[3], key_cache.element_size()
    head_pad = triton.next_power_of_2(head_size)
    return {
        "HEAD_SIZE": head_size,
        "HEAD_PAD": head_pad,
        "TILE": max(16, min(64, _KEY_BYTES // (head_pad * bytes_per_number))),
        "num_warps": 8 if bytes_per_number == 4 else 4,  # float32 products are made in registers
    }
