"""Relocation on the CPU."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from vtoken.core.ragged import Ints
from vtoken.kernels.jit import njit
from vtoken.kernels.layout import BlockLayout


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


def relocation(cache: Tensor, layout: BlockLayout) -> Callable[[Ints, Ints], None]:
    """Compile ``relocate_reference`` for a cache, an integer view [layers, blocks, numbers per block] of it.

    Returns:
        A function of the sources and destinations, int64 [M] each.
    """
    numbers, elements = cache.numpy(), layout.elements.numpy()

    def relocate(sources: Ints, destinations: Ints) -> None:
        _copy_numbers(numbers, elements, sources, destinations)

    relocate(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    return relocate
