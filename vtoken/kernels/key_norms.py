"""How long tokens' keys are: a key that is short draws attention from few queries, or from nearly all of them.

The score of Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (EMNLP 2024).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.core.ragged import Ints
from vtoken.kernels.layout import BlockLayout


def key_norms_reference(cache: Tensor, layout: BlockLayout, num_heads: int, head_size: int, slots: Tensor) -> Tensor:
    """The Euclidean norms of the tokens' keys, summed over all layers and KV heads.

    Args:
        cache: all layers, shape [layers, blocks, numbers per block], any strides.
        layout: where a token's numbers lie in a block.
        num_heads, head_size: H and D.
        slots: block * S + offset, shape [M].

    Returns:
        float32 [M], accumulated in float32 whatever the dtype of the cache.
    """
    size = layout.block_size
    elements = layout.elements[slots % size, : num_heads * head_size]
    keys = cache[:, (slots // size)[:, None], elements].float().view(len(cache), len(slots), num_heads, head_size)
    return torch.linalg.vector_norm(keys, dim=-1).sum(dim=(0, 2))


class KeyNorms:
    """Key norms over one KV cache, all layers in one launch: numba on the CPU, Triton on a GPU, torch elsewhere.

    Args:
        cache, layout, num_heads, head_size: as for ``key_norms_reference``.

    Raises:
        ValueError: the numbers of a cache on the CPU are neither float32 nor bfloat16.
    """

    def __init__(self, cache: Tensor, layout: BlockLayout, num_heads: int, head_size: int) -> None:
        self._device = cache.device
        if cache.device.type == "cpu":
            from vtoken.kernels.cpu.key_norms import key_norms

            self._on_cpu = key_norms(cache, layout, num_heads, head_size)
            return
        if cache.device.type == "cuda":
            from vtoken.kernels.gpu.key_norms import key_norms as on_device
        else:
            on_device = key_norms_reference
        self._on_device = lambda slots: on_device(cache, layout, num_heads, head_size, slots)

    def __call__(self, slots: Ints) -> NDArray[np.float32]:
        """Sum over layers and KV heads of the norms of the keys in these slots, [M] to float32 [M]."""
        if self._device.type == "cpu":
            return self._on_cpu(slots)
        norms: NDArray[np.float32] = self._on_device(torch.from_numpy(slots).to(self._device)).cpu().numpy()
        return norms
