"""Attention problems over a paged cache in which everything that must not be read is poison."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vtoken.kernels.layout import vec_views

LAYOUTS = ("tokens first", "heads first", "vec")
HEADS = [(4, 4), (4, 1), (6, 2)]
"""Query and KV heads: MHA, MQA and GQA, the last with a group that is no power of two."""


@dataclass
class Paged:
    """Requests of these lengths, with the keys and values of each, [length, H, D], once more on their own."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    lengths: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1]) ** -0.5

    @property
    def offsets(self) -> Tensor:
        """Where each request's mass lies if they follow one another."""
        return self.lengths.cumsum(0) - self.lengths


def empty_cache(layout: str, blocks: int, size: int, heads: int, head_size: int, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values, [blocks, S, H, D] each."""
    if layout == "vec":
        return list(vec_views(torch.empty(blocks, heads, size, 2 * head_size, dtype=dtype)))
    if layout == "heads first":
        pair = torch.empty(blocks, heads, size, 2 * head_size, dtype=dtype).permute(0, 2, 1, 3)
        return [pair[..., :head_size], pair[..., head_size:]]
    return list(torch.empty(2, blocks, size, heads, head_size, dtype=dtype).unbind())


def paged(
    lengths: list[int],
    heads: tuple[int, int] = (4, 2),
    head_size: int = 32,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "tokens first",
    queries: int | None = None,
    poison: tuple[float, float] = (torch.nan, 1e30),
) -> Paged:
    """Random queries and caches, the same numbers whatever the layout and the poison.

    Args:
        heads: query heads and KV heads.
        queries: rows of ``query``, by default one per request.
        poison: what unused places of the key cache and of the value cache hold.
    """
    generator = torch.Generator().manual_seed(sum(lengths) + head_size)
    query_heads, kv_heads = heads

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = numbers(len(lengths) if queries is None else queries, query_heads, head_size)
    per_request = [-(-length // size) for length in lengths]
    blocks = sum(per_request) + 3
    key_cache, value_cache = empty_cache(layout, blocks, size, kv_heads, head_size, dtype)
    key_cache.fill_(poison[0])
    value_cache.fill_(min(poison[1], torch.finfo(dtype).max))
    # Beyond a request's blocks the table names one that does not exist.
    block_table = torch.full((len(lengths), max(per_request) + 1), 2**30, dtype=torch.int32)
    order = torch.randperm(blocks, generator=generator).to(torch.int32)
    keys, values = [], []
    for request, (length, used) in enumerate(zip(lengths, per_request, strict=True)):
        block_table[request, :used], order = order[:used], order[used:]
        position = torch.arange(length)
        block = block_table[request, position // size].long()
        keys.append(numbers(length, kv_heads, head_size))
        values.append(numbers(length, kv_heads, head_size))
        key_cache[block, position % size] = keys[-1]
        value_cache[block, position % size] = values[-1]
    return Paged(query, key_cache, value_cache, block_table, torch.tensor(lengths), keys, values)
