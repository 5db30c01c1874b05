"""Key norms on the CPU. One thread: a step's new tokens are few next to what their forward has computed."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.core.ragged import Ints
from vtoken.kernels.jit import njit
from vtoken.kernels.layout import BlockLayout


@njit
def _from_float32(number):  # type: ignore[no-untyped-def]
    return number


@njit
def _from_bfloat16(bits):  # type: ignore[no-untyped-def]
    """bfloat16 is the upper half of float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(nogil=True)
def _add_norms(numbers, number_from, elements, slots, norms):  # type: ignore[no-untyped-def]
    size, heads, head_size = elements.shape
    for layer in range(len(numbers)):
        for token in range(len(slots)):
            block, places = numbers[layer, slots[token] // size], elements[slots[token] % size]
            for head in range(heads):
                squares = np.float32(0)
                for d in range(head_size):
                    number = number_from(block[places[head, d]])
                    squares += number * number
                norms[token] += np.sqrt(squares)


def key_norms(
    cache: Tensor, layout: BlockLayout, num_heads: int, head_size: int
) -> Callable[[Ints], NDArray[np.float32]]:
    """Compile ``key_norms_reference`` for a cache, [layers, blocks, numbers per block] of float32 or bfloat16.

    Returns:
        A function from slots, int64 [M], to norms, float32 [M].

    Raises:
        ValueError: another dtype.
    """
    if cache.dtype == torch.float32:
        numbers, number_from = cache.numpy(), _from_float32
    elif cache.dtype == torch.bfloat16:
        numbers, number_from = cache.view(torch.uint16).numpy(), _from_bfloat16
    else:
        raise ValueError(
            f"vtoken: key norms cannot be taken on the CPU of a KV cache of {cache.dtype} yet; set dtype='bfloat16' "
            "or dtype='float32', or use a policy that does not look at keys."
        )
    elements = layout.elements[:, : num_heads * head_size].reshape(-1, num_heads, head_size).numpy()

    def norms_of(slots: Ints) -> NDArray[np.float32]:
        norms = np.zeros(len(slots), dtype=np.float32)
        _add_norms(numbers, number_from, elements, slots, norms)
        return norms

    norms_of(np.empty(0, dtype=np.int64))
    return norms_of
