"""A fingerprint of a token's K/V, by which a copy is checked bit for bit without keeping what was there before."""

import torch
from torch import Tensor

from vtoken.kernels.layout import BlockLayout
from vtoken.kernels.relocation import bits_of

CHUNK = 2**22
"""Numbers that are gathered at once, 8 bytes each and twice that while they are mixed."""

# Odd constants of splitmix64, as int64.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def digest(cache: Tensor, layout: BlockLayout, slots: Tensor) -> Tensor:
    """Hash the bits of each token's numbers, each number together with which one it is, in every layer.

    A token has the same digest wherever it lies, on every device, in every layout. Integer sums wrap around, so that
    their order does not matter.

    Args:
        cache: all layers, shape [layers, blocks, numbers per block], any strides, any dtype of 1 to 8 bytes.
        layout: where a token's numbers lie in a block.
        slots: of the tokens (block * S + offset), int64, shape [M].

    Returns:
        int64, shape [layers, M].
    """
    bits, size = bits_of(cache), layout.block_size
    layers, numbers = len(cache), layout.elements.shape[1]
    salts = _mix((torch.arange(numbers, device=cache.device) + 1) * _STEP)
    digests = torch.empty(layers, len(slots), dtype=torch.int64, device=cache.device)
    tokens = max(1, CHUNK // max(1, layers * numbers))
    for first in range(0, len(slots), tokens):
        some = slots[first : first + tokens]
        values = bits[:, (some // size)[:, None], layout.elements[some % size]].long()
        digests[:, first : first + tokens] = _mix(_mix(values + salts).sum(dim=-1))
    return digests


def _mix(values: Tensor) -> Tensor:
    """A bijection of 64-bit integers in which every bit of the result hangs on all bits: splitmix64's."""
    values = (values ^ (values >> 30 & 2**34 - 1)) * _FIRST
    values = (values ^ (values >> 27 & 2**37 - 1)) * _SECOND
    return values ^ (values >> 31 & 2**33 - 1)
