"""Copying tokens' K/V to other slots, in all layers at once."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vtoken.core.ragged import Ints
from vtoken.kernels.layout import BlockLayout

Relocate = Callable[[Ints, Ints], None]
"""(sources, destinations) -> None; slots (block * S + offset), [M] each"""


def relocate_reference(cache: Tensor, layout: BlockLayout, sources: Tensor, destinations: Tensor) -> None:
    """Copy every token's K/V from its source slot to its destination slot.

    Args:
        cache: all layers, shape [layers, blocks, numbers per block], any strides.
        layout: where a token's numbers lie in a block.
        sources, destinations: slots (block * S + offset), shape [M]. No destination is named twice, and no slot is
            both; a source may be copied to several places.
    """
    size = layout.block_size
    values = cache[:, (sources // size)[:, None], layout.elements[sources % size]]
    cache[:, (destinations // size)[:, None], layout.elements[destinations % size]] = values


def bits_of(cache: Tensor) -> Tensor:
    """The same memory as integers: what is copied are bits, whatever number format they are in."""
    return cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[cache.element_size()])


class Relocator:
    """Relocation over one KV cache, all layers in one launch: numba on the CPU, Triton on a GPU, torch elsewhere.

    Args:
        cache: as for ``relocate_reference``.
        layout: probed from the backend that writes the cache.
    """

    def __init__(self, cache: Tensor, layout: BlockLayout) -> None:
        self._relocate = _version_for(cache, layout)

    def __call__(self, sources: Ints, destinations: Ints) -> None:
        """Copy tokens from slots to slots, as ``relocate_reference`` does; int64, shape [M] each.

        On a GPU the copies are ordered on the current stream, and the host does not wait for them.
        """
        self._relocate(sources, destinations)


def _version_for(cache: Tensor, layout: BlockLayout) -> Relocate:
    device = cache.device
    if device.type == "cpu":
        from vtoken.kernels.cpu.relocation import relocation

        return relocation(bits_of(cache), layout)

    if device.type == "cuda":
        from vtoken.kernels.gpu.relocation import relocate as on_device
    else:
        on_device = relocate_reference

    def relocate(sources: Ints, destinations: Ints) -> None:
        if len(sources):
            slots = torch.from_numpy(np.stack([sources, destinations]))
            if device.type == "cuda":
                # From any other memory the upload would wait for what the stream has still to do. torch hands out
                # neither this memory nor that of the copy again before this stream is through with them.
                slots = slots.pin_memory()
            on_device(bits_of(cache), layout, *slots.to(device, non_blocking=True))

    return relocate
