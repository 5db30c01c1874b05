"""Attention problems over a paged cache in which everything that must not be read is poison."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vtoken.kernels.attention_mass import QuerySegments
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


def segments(**fields: list[int]) -> QuerySegments:
    """All queries of a segment count alike."""
    numbers = {name: np.array(values, dtype=np.int64) for name, values in fields.items()}
    return QuerySegments(**numbers, decay=np.ones(len(fields["first"])))


def fading(parts: QuerySegments, decay: float | list[float]) -> QuerySegments:
    """The same with other weights."""
    return replace(parts, decay=np.broadcast_to(np.float64(decay), parts.first.shape))


NO_SEGMENTS = segments(first=[], count=[], context=[], row=[], offset=[], stride=[])


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


PATTERNS = ("half", "late", "lone", "last", "all")


def live_mask(pattern: str, lengths: list[int]) -> Tensor:
    """Bool [R, more than the longest], something live within each length and everything beyond it.

    Args:
        pattern: "half" of the positions at random, none of the first 270 ("late", more than a part of any kernel), a
            "lone" one in the middle, only the "last" one, or "all".
    """
    generator = torch.Generator().manual_seed(len(lengths))
    live = torch.ones(len(lengths), max(lengths) + 5, dtype=torch.bool)
    for row, length in zip(live, lengths, strict=True):
        own = row[:length]
        if pattern == "half":
            own[:] = torch.rand(length, generator=generator) < 0.5
            own[torch.randint(length, (), generator=generator)] = True
        elif pattern == "late":
            own[: min(270, length - 1)] = False
        elif pattern == "lone":
            own[: length // 2] = own[length // 2 + 1 :] = False
        elif pattern == "last":
            own[:-1] = False
    return live


def last_live(p: Paged, live: Tensor) -> Tensor:
    """A mask of one position per request: the last one of ``live`` within its length."""
    top = torch.zeros_like(live)
    for row, own, length in zip(top, live, p.lengths.tolist(), strict=True):
        row[own[:length].nonzero()[-1]] = True
    return top


def fill_dead(p: Paged, live: Tensor, key: float, value: float) -> None:
    """Overwrite the slots of dead positions in the caches, not in the requests' own keys and values."""
    size = p.key_cache.shape[1]
    for request, length in enumerate(p.lengths.tolist()):
        dead = (~live[request, :length]).nonzero()[:, 0]
        block = p.block_table[request, dead // size].long()
        p.key_cache[block, dead % size] = key
        p.value_cache[block, dead % size] = value


def attention_of_the_live(p: Paged, query: int, request: int, live: Tensor) -> tuple[Tensor, Tensor]:
    """What is left if dead positions are taken out of a request, in float64.

    Args:
        query: row of ``p.query``.
        live: the positions that the query attends, and which of them are live, bool [length].

    Returns:
        Output [Hq, D], and the probability of each position summed over the heads, [length].
    """
    at = live.nonzero()[:, 0]
    group = p.query.shape[1] // p.key_cache.shape[2]
    output, mass = [], torch.zeros(len(live), dtype=torch.float64)
    for head, row in enumerate(p.query[query].double()):
        keys, values = (each[request][at, head // group].double() for each in (p.keys, p.values))
        probability = torch.softmax(p.scale * (keys @ row), dim=0)
        output.append(probability @ values)
        mass[at] += probability
    return torch.stack(output), mass
