"""Copying tokens' K/V to other slots, in all layers at once."""

import numpy as np
import torch
from torch import Tensor

from vtoken.core.ragged import Ints
from vtoken.kernels.jit import njit
from vtoken.kernels.layout import BlockLayout

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def relocate_reference(cache: Tensor, layout: BlockLayout, sources: Tensor, destinations: Tensor) -> None:
    """Copy every token's K/V from its source slot to its destination slot.

    Args:
        cache: all layers, shape [layers, blocks, numbers per block], any strides.
        layout: where a token's numbers lie in a block.
        sources, destinations: slots (block * S + offset), shape [M]; no slot is named twice.
    """
    size = layout.block_size
    values = cache[:, (sources // size)[:, None], layout.elements[sources % size]]
    cache[:, (destinations // size)[:, None], layout.elements[destinations % size]] = values


@njit(nogil=True)  # compiled anew at each start: a second, and no cache folder that may be unwritable
def _copy_numbers(cache, elements, sources, destinations):  # type: ignore[no-untyped-def]
    size, numbers = elements.shape
    for layer in range(cache.shape[0]):
        for move in range(len(sources)):
            source = cache[layer, sources[move] // size]
            destination = cache[layer, destinations[move] // size]
            read, write = elements[sources[move] % size], elements[destinations[move] % size]
            for number in range(numbers):
                destination[write[number]] = source[read[number]]


class Relocator:
    """Relocation over one KV cache, all layers in one launch: compiled on the CPU, torch elsewhere.

    Args:
        cache: as for ``relocate_reference``.
        layout: probed from the backend that writes the cache.
    """

    def __init__(self, cache: Tensor, layout: BlockLayout) -> None:
        self._cache, self._layout = cache, layout
        self._on_cpu = cache.device.type == "cpu"
        if self._on_cpu:
            # Bits are copied, not numbers, so dtypes that numpy does not know are moved just as well.
            self._numbers = cache.view(_INTEGER[cache.element_size()]).numpy()
            self._elements = layout.elements.numpy()
            self(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    def __call__(self, sources: Ints, destinations: Ints) -> None:
        """Copy M tokens from slots to slots, shape [M] each."""
        if self._on_cpu:
            _copy_numbers(self._numbers, self._elements, sources, destinations)
        elif len(sources):
            device = self._cache.device
            relocate_reference(
                self._cache,
                self._layout,
                torch.from_numpy(sources).to(device, non_blocking=True),
                torch.from_numpy(destinations).to(device, non_blocking=True),
            )
