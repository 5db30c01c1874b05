"""Where the numbers of one token lie inside a block: found by probing, not by assumption.

Attention backends pack K and V in ways of their own (vLLM's x86 kernels hold a block's K transposed), so the map
is read off the function that writes the cache: write known values, see where they arrive.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WriteTokens = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(key [S, H, D], value [S, H, D], one-block cache, slot mapping [S]) -> None"""


@dataclass(frozen=True)
class BlockLayout:
    """``elements[o]`` are the positions, inside one layer's block, of the numbers of the token at offset o.

    Shape [S, 2 * H * D], int64; column j means the same number (head, dimension, K or V) for every offset.
    """

    elements: Tensor

    @property
    def block_size(self) -> int:
        return int(self.elements.shape[0])


def probe_layout(write: WriteTokens, cache: Tensor, num_heads: int, head_size: int) -> BlockLayout:
    """Read the layout off ``write``.

    Every number of every offset gets an identity, which is written to the cache bit by bit: values 0 and 1 are
    exact in every cache dtype.

    Args:
        write: writes S tokens into the first block of ``cache``.
        cache: a scratch cache of one block, in the backend's own shape.

    Raises:
        ValueError: the tokens of a block do not lie in separate places, so none can be moved alone.
    """
    numbers = 2 * num_heads * head_size
    block_size = cache.numel() // numbers
    identity = torch.arange(block_size * numbers, device=cache.device)
    slots = torch.arange(block_size, device=cache.device)

    def arrived(values: Tensor) -> Tensor:
        pairs = values.view(block_size, 2, num_heads, head_size).to(cache.dtype)
        cache.zero_()
        write(pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), cache, slots)
        # In storage order: a backend may permute the axes of its blocks.
        return cache.as_strided((cache.numel(),), (1,)).float() != 0

    written = arrived(torch.ones_like(identity))
    found = torch.zeros(cache.numel(), dtype=torch.int64, device=cache.device)
    for bit in range(int(identity.numel()).bit_length()):
        found += arrived((identity >> bit) & 1).long() << bit
    if not (written.all() and torch.equal(found.sort().values, identity)):
        raise ValueError(
            "vtoken: the attention backend does not keep the tokens of a KV block in separate places, "
            "so they cannot be moved; choose another attention backend."
        )
    return BlockLayout(found.argsort().view(block_size, numbers))


def positions_of(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first ``length`` positions of a request, [length, H, D], out of [blocks, S, H, D] by its row of a table."""
    position = torch.arange(length, device=cache.device)
    return cache[blocks[position // cache.shape[1]].long(), position % cache.shape[1]]


def vec_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, [blocks, S, H, D] each, of a layer's cache [blocks, H, S, 2 * D] of vLLM's CPU backend.

    In the layouts that it calls "vec" and "vec16", the S * 2 * D numbers of a block's head are its keys, transposed to
    [D, S], and then its values, [S, D]. Both results are views of the cache.
    """
    blocks, heads, size, numbers = cache.shape
    halves = cache.view(blocks, heads, 2, size * numbers // 2)
    keys = halves[:, :, 0].view(blocks, heads, numbers // 2, size).permute(0, 3, 1, 2)
    values = halves[:, :, 1].view(blocks, heads, size, numbers // 2).permute(0, 2, 1, 3)
    return keys, values


def check_vec_layout(layout: BlockLayout, num_heads: int, head_size: int) -> None:
    """Raises ValueError if the backend does not write its cache as ``vec_views`` reads it."""
    block = torch.arange(layout.elements.numel(), device=layout.elements.device)
    keys, values = vec_views(block.view(1, num_heads, layout.block_size, 2 * head_size))
    if not torch.equal(layout.elements, torch.stack([keys[0], values[0]], dim=1).flatten(1)):
        raise ValueError(
            "vtoken: the attention backend does not keep the keys of a block transposed, values in rows, so attention "
            "cannot be observed yet; set block_size=16 on an x86 CPU, elsewhere use streaming_llm, random or key_norm."
        )
