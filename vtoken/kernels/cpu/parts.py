"""Softmax over a request's tokens, a part of a few hundred at a time: the steps that both attention kernels share.

A part's logits lie in scratch as [rows, tokens of a part], a row per query and query head that use the same KV head.
Logits are in units of log 2, so that 2**x takes the place of e**x.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.kernels.cpu.vectors import LANES, array_at, bits_of, exp2, float_of, floats_at, tile_product, tile_shape
from vtoken.kernels.jit import njit

LOG2_E = float(np.log2(np.e))
_PART = 256
_DTYPES = (torch.float32, torch.bfloat16)
_SUMS = {"contract", "reassoc", "nsz"}
"""Sums in any order, so that they become vector instructions; nothing is assumed about NaN and infinities."""
_ALL_BUT_SIGN = np.int32(2**31 - 1)
_SIGN = np.int32(31)


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for.

    Attributes:
        block_size: tokens in a block (S), a multiple of 16.
        head_size: numbers in a head's key (D), a multiple of 16.
        queries: query rows that are attended together, for one KV head.
        narrow: the cache is bfloat16, not float32.
    """

    block_size: int
    head_size: int
    queries: int
    narrow: bool

    @property
    def rows(self) -> int:
        """Rows of scratch: ``queries``, and what fills the last tile."""
        tile_rows, _ = tile_shape(self.queries, self.block_size)
        return -(-self.queries // tile_rows) * tile_rows

    @property
    def blocks_per_part(self) -> int:
        return max(1, _PART // self.block_size)

    @property
    def part(self) -> int:
        """Tokens of a part."""
        return self.blocks_per_part * self.block_size

    @property
    def number_bytes(self) -> int:
        return 2 if self.narrow else 4


class CacheView(NamedTuple):
    """Where a layer's keys or values lie: the address of block 0, and the bytes between blocks and between heads."""

    address: int
    block_bytes: int
    head_bytes: int


def view_keys(key_cache: Tensor) -> CacheView:
    """Check that keys lie as the kernels read them, per block and head as [D, S].

    Args:
        key_cache: [blocks, S, H, D].

    Raises:
        ValueError: they do not, or are of a dtype that the kernels do not read.
    """
    return _view("key", key_cache, (1, key_cache.shape[1]))


def view_values(value_cache: Tensor) -> CacheView:
    """The same for values, per block and head as [S, D]."""
    return _view("value", value_cache, (value_cache.shape[3], 1))


def _view(name: str, cache: Tensor, inner: tuple[int, int]) -> CacheView:
    _, size, _, head_size = cache.shape
    if cache.dtype not in _DTYPES:
        raise ValueError(f"vtoken: a {cache.dtype} KV cache is not read on the CPU; use float32 or bfloat16.")
    if size % 16 or head_size % 16:
        raise ValueError(
            f"vtoken: block size {size} and head size {head_size} must be multiples of 16 to be read on the CPU; "
            "choose another block_size or model."
        )
    block, token, head, number = cache.stride()
    if (token, number) != inner:
        raise ValueError(
            f"vtoken: a {name} cache with strides {cache.stride()} is not in the layout of vLLM's CPU backend, "
            "keys [D, S] and values [S, D] per block and head; use the CPU_ATTN backend on x86 without AMX."
        )
    bytes_per = cache.element_size()
    return CacheView(cache.data_ptr(), block * bytes_per, head * bytes_per)


def float_rows(query: Tensor) -> Tensor:
    """The same numbers as float32 with contiguous heads: the tensor itself if it is like that."""
    query = query.float()
    return query if query.stride(-1) == 1 else query.contiguous()


def check_mass(mass: Tensor, lanes: int, end: int) -> None:
    """Check that there is room in ``mass``, [lanes, N], for N = ``end`` numbers in each lane.

    Raises:
        ValueError: there is not, or the numbers are not contiguous float32.
    """
    if mass.dtype != torch.float32 or mass.stride(-1) != 1 or mass.shape[0] < lanes or mass.shape[1] < end:
        raise ValueError(
            f"vtoken: {mass.dtype} mass {tuple(mass.shape)} with strides {mass.stride()} has no room for what was "
            f"planned; pass contiguous float32 of at least {(lanes, end)}."
        )


def align(numbers: int) -> int:
    """Rounded up to a cache line of float32, so that no two threads write to the same one."""
    return -(-numbers // 16) * 16


def live_rows(live: Any, rows: int, positions: int, masked: bool) -> NDArray[np.bool_]:
    """A mask as the kernels read it, the positions of a row contiguous: not copied if it is like that.

    Args:
        live: bool [rows or more, positions or more]; None if every position is live.
        masked: the kernel was compiled to read a mask.

    Raises:
        ValueError: it was not, or the mask is too small; compiled code would reach beyond it.
    """
    if live is None:
        return np.broadcast_to(np.ones(positions, dtype=np.bool_), (rows, positions))
    if not masked:
        raise ValueError("vtoken: this attention reads no mask of live positions; build it with masked=True.")
    mask = np.asarray(live, dtype=np.bool_)
    if mask.ndim != 2 or mask.shape[0] < rows or mask.shape[1] < positions:
        raise ValueError(
            f"vtoken: a mask of live positions of shape {mask.shape} has no room for {rows} rows of {positions}."
        )
    return mask if mask.strides[1] == 1 else np.ascontiguousarray(mask)


@lru_cache
def load_queries(heads: int, head_size: int) -> Callable[..., Any]:
    """Compile ``load(source, stride, factor, target)``: the heads of a query times a factor, side by side.

    The D float32 numbers of head h are read at source + h * stride, and written to target [heads, D].
    """

    @njit(error_model="numpy")
    def load(source, stride, factor, target):  # type: ignore[no-untyped-def]
        for row in range(heads):
            query = floats_at(source + row * stride)
            scaled = floats_at(target + 4 * row * head_size)
            for d in range(head_size):
                scaled[d] = query[d] * factor

    return load


@lru_cache
def part_logits(shape: Shape) -> Callable[..., Any]:
    """Compile ``logits(queries, keys, block_bytes, table, blocks, part, next_block)``: queries times blocks of keys.

    ``queries`` [rows, D] and ``part`` [rows, tokens] are addresses, as are ``keys``, of a head in block 0, and
    ``table``, of the numbers of the blocks (int32). Whole blocks are multiplied, dead tokens included. ``next_block``
    is what will be read after the last one.
    """
    tile_rows, vectors = tile_shape(shape.queries, shape.block_size)
    width = vectors * LANES
    product = tile_product(
        tile_rows, vectors, shape.head_size, shape.block_size, shape.part, shape.narrow, accumulate=False
    )
    rows, size, head_size, tokens, number_bytes = (
        shape.rows,
        shape.block_size,
        shape.head_size,
        shape.part,
        shape.number_bytes,
    )

    @njit(error_model="numpy")
    def logits(queries, keys, block_bytes, table, blocks, part, next_block):  # type: ignore[no-untyped-def]
        numbers = array_at(table, np.int32)
        for block in range(blocks):
            key = keys + numbers[block] * block_bytes
            ahead = keys + numbers[block + 1] * block_bytes if block + 1 < blocks else next_block
            for row in range(0, rows, tile_rows):
                for column in range(0, size, width):
                    product(
                        queries + 4 * row * head_size,
                        key + number_bytes * column,
                        part + 4 * (row * tokens + block * size + column),
                        head_size,
                        ahead + number_bytes * column * head_size,
                    )

    return logits


@lru_cache
def part_values(shape: Shape) -> Callable[..., Any]:
    """Compile ``add(part, values, block_bytes, table, tokens, sums, next_block)``: sums [rows, D] += part @ values.

    Only the first ``tokens`` tokens are read.
    """
    tile_rows, vectors = tile_shape(shape.queries, shape.head_size)
    width = vectors * LANES
    product = tile_product(
        tile_rows, vectors, shape.part, shape.head_size, shape.head_size, shape.narrow, accumulate=True
    )
    rows, size, head_size, stride, number_bytes = (
        shape.rows,
        shape.block_size,
        shape.head_size,
        shape.part,
        shape.number_bytes,
    )

    @njit(error_model="numpy")
    def add_values(part, values, block_bytes, table, tokens, sums, next_block):  # type: ignore[no-untyped-def]
        blocks = (tokens + size - 1) // size
        numbers = array_at(table, np.int32)
        for block in range(blocks):
            value = values + numbers[block] * block_bytes
            ahead = values + numbers[block + 1] * block_bytes if block + 1 < blocks else next_block
            live = min(size, tokens - block * size)
            for row in range(0, rows, tile_rows):
                for column in range(0, head_size, width):
                    product(
                        part + 4 * (row * stride + block * size),
                        value + number_bytes * column,
                        sums + 4 * (row * head_size + column),
                        live,
                        ahead + number_bytes * column * live,
                    )

    return add_values


@njit(error_model="numpy")
def maximum(numbers, count, least):  # type: ignore[no-untyped-def]
    """The largest of ``least`` and the ``count`` float32 numbers at an address; NaN if one of them is.

    Compared as integers that are ordered as the numbers are: unlike a maximum of floats, that becomes vector
    instructions without a promise that there is no NaN.
    """
    array = floats_at(numbers)
    largest = _ordered(least)
    for i in range(count):
        largest = max(largest, _ordered(array[i]))
    return float_of(np.int32(largest ^ ((largest >> _SIGN) & _ALL_BUT_SIGN)))


@njit
def _ordered(value):  # type: ignore[no-untyped-def]
    bits = bits_of(value)
    return np.int32(bits ^ ((bits >> _SIGN) & _ALL_BUT_SIGN))


@njit(fastmath=_SUMS, error_model="numpy")
def exponentials(logits, count, largest):  # type: ignore[no-untyped-def]
    """Replace the ``count`` logits x at an address by 2**(x - largest), and return their sum."""
    array = floats_at(logits)
    total = np.float32(0)
    for i in range(count):
        value = exp2(array[i] - largest)
        array[i] = value
        total += value
    return total


@njit(error_model="numpy")
def live_maximum(numbers, live, count, least):  # type: ignore[no-untyped-def]
    """``maximum`` of the numbers whose byte at ``live`` is not 0, whatever the others are."""
    array, alive = floats_at(numbers), array_at(live, np.uint8)
    start = _ordered(least)
    largest = start
    for i in range(count):
        value = _ordered(array[i])
        largest = max(largest, value if alive[i] != 0 else start)
    return float_of(np.int32(largest ^ ((largest >> _SIGN) & _ALL_BUT_SIGN)))


@njit(fastmath=_SUMS, error_model="numpy")
def live_exponentials(logits, live, count, largest):  # type: ignore[no-untyped-def]
    """``exponentials`` of the logits whose byte at ``live`` is not 0; the others become 0, even if they are NaN."""
    array, alive = floats_at(logits), array_at(live, np.uint8)
    total, nothing = np.float32(0), np.float32(0)
    for i in range(count):
        value = exp2(array[i] - largest)
        value = value if alive[i] != 0 else nothing
        array[i] = value
        total += value
    return total


@lru_cache
def add_mass(heads: int, stride: int) -> Callable[..., Any]:
    """Compile ``add(part, shares, mass, count)``: mass[p] += sum over h of part[h, p] * shares[h], for p < count.

    part [heads, stride], shares [heads] and mass [count] are addresses of float32 numbers.
    """

    @njit(fastmath=_SUMS, error_model="numpy")
    def add(part, shares, mass, count):  # type: ignore[no-untyped-def]
        exponential, share, sums = floats_at(part), floats_at(shares), floats_at(mass)
        for p in range(count):
            total = np.float32(0)
            for head in range(heads):
                total += exponential[head * stride + p] * share[head]
            sums[p] += total

    return add
