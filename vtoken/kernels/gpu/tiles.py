"""Sizes of the attention kernels' tiles: checked by compiling for sm_90 without spills; not yet tuned on hardware."""

from typing import Any

import triton
from torch import Tensor

_KEY_BYTES = 16384
"""Keys of one tile: with the copies that are loaded ahead, within 99 KiB of shared memory up to head size 128."""


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
