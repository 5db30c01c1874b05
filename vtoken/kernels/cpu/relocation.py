"""Relocation on the CPU.

What it costs is memory traffic. Where a backend keeps the keys of a block transposed, the numbers of one token lie in
as many cache lines as its heads have dimensions, and its neighbours lie in the same lines. So tokens that go to the
same block are moved together, a piece of the block at a time that fits the first cache; the lines of the next piece are
fetched meanwhile, which the processor cannot guess; and where whole lines are written, they go past the caches, so that
what they held is not read first.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vtoken.core.ragged import Ints
from vtoken.kernels.cpu.lines import LINE, fence, prefetch, stream_line
from vtoken.kernels.cpu.vectors import array_at
from vtoken.kernels.jit import njit
from vtoken.kernels.layout import BlockLayout

TILE = 4096
"""Bytes of a piece of a block, so that four of them fit the first cache."""

PIECE = np.dtype([("base", np.int64), ("count", np.int64), ("step", np.int64), ("stride", np.int64)])
"""``count`` numbers of every token: number j of the token at offset o lies at base + j * step + o * stride."""


def pieces_of(elements: NDArray[np.int64], most: int) -> NDArray[np.void] | None:
    """Split a layout's map into as few pieces as describe it, or None if a token's numbers do not lie evenly.

    Args:
        elements: ``BlockLayout.elements``, shape [S, numbers].
        most: numbers that a piece may span of one token, unless they are adjacent.
    """
    base = np.sort(elements[0])
    order = np.argsort(elements[0])
    stride = (elements[1] - elements[0])[order] if len(elements) > 1 else np.zeros_like(base)
    offsets = np.arange(len(elements))[:, None]
    if not np.array_equal(elements[:, order], base + offsets * stride):
        return None
    pieces: list[tuple[int, int, int, int]] = []
    first = 0
    while first < len(base):
        step = int(base[first + 1] - base[first]) if first + 1 < len(base) else 1
        last = first + 1
        while (
            last < len(base)
            and base[last] - base[last - 1] == step
            and stride[last] == stride[first]
            and (step == 1 or (last + 1 - first) * step <= most)
        ):
            last += 1
        pieces.append((int(base[first]), last - first, step, int(stride[first])))
        first = last
    return np.array(pieces, dtype=PIECE)


@njit(nogil=True)
def _copy_row(like, target, source, count):  # type: ignore[no-untyped-def]
    """``count`` adjacent numbers."""
    size = count * like.itemsize
    if (target | size) & (LINE - 1) == 0:
        for line in range(0, size, LINE):
            stream_line(target + line, source + line)
    else:
        read, write = array_at(source, like.dtype), array_at(target, like.dtype)
        for number in range(count):
            write[number] = read[number]


@njit(nogil=True)
def _copy_column(like, target, source, count, step):  # type: ignore[no-untyped-def]
    """``count`` numbers that are ``step`` numbers apart."""
    read, write = array_at(source, like.dtype), array_at(target, like.dtype)
    at, by = np.uint64(0), np.uint64(step)
    for _ in range(count):
        write[at] = read[at]
        at += by


@njit(nogil=True)
def _fetch(address, size):  # type: ignore[no-untyped-def]
    line = address & -LINE
    while line < address + size:
        prefetch(line)
        line += LINE


@njit(nogil=True)
def _fetch_rows(address, step, size, first, last):  # type: ignore[no-untyped-def]
    """Rows ``first`` to ``last`` of some that are ``step`` bytes apart, ``size`` bytes of each."""
    address += first * step
    for _ in range(last - first):
        _fetch(address, size)
        address += step


def _bounds(*blocks: Ints) -> Ints:
    """Where any of them changes, from 0 to M > 0: [groups + 1]."""
    changes = np.any([np.diff(each) != 0 for each in blocks], axis=0)
    return np.concatenate([[0], np.flatnonzero(changes) + 1, [len(blocks[0])]])


MOVE = np.dtype(
    [
        (name, np.int64)
        for name in [
            "from_block",
            "to_block",
            "read",
            "write",
            "nth",
            "of",
            "low_read",
            "span_read",
            "low_write",
            "span_write",
        ]
    ]
)
"""Bytes from a layer's start to the two blocks, and the offsets within them; which of how many moves this is that have
both blocks in common, and so share lines; the least offset of these moves, and how far the others lie from it."""


def _prepare(size: int, block_stride: int, sources: Ints, destinations: Ints) -> tuple[NDArray[np.void], Ints]:
    """The moves, M > 0 of them, and where the block that they go to changes."""
    moves = np.empty(len(sources), dtype=MOVE)
    from_block, to_block = sources // size, destinations // size
    moves["from_block"], moves["to_block"] = from_block * block_stride, to_block * block_stride
    runs = _bounds(from_block, to_block)
    counts = np.diff(runs)
    moves["nth"], moves["of"] = np.arange(len(moves)) - np.repeat(runs[:-1], counts), np.repeat(counts, counts)
    for side, offsets in (("read", sources - from_block * size), ("write", destinations - to_block * size)):
        low, high = (least.reduceat(offsets, runs[:-1]) for least in (np.minimum, np.maximum))
        moves[side], moves[f"low_{side}"] = offsets, np.repeat(low, counts)
        moves[f"span_{side}"] = np.repeat(high - low, counts)
    return moves, _bounds(to_block)


@njit(nogil=True)  # compiled anew at each start: seconds, and no cache folder that may be unwritable
def _copy_pieces(like, cache, layers, layer_stride, pieces, size, stage, moves, groups):  # type: ignore[no-untyped-def]
    """``cache`` is an address, ``stage`` that of a tile that belongs to the caller; the layers' stride is in bytes."""
    item = like.itemsize
    for layer in range(layers):
        here = cache + layer * layer_stride
        for group in range(len(groups) - 1):
            first, last = groups[group], groups[group + 1]
            for number in range(len(pieces)):
                base, count, step, stride = _piece(pieces, number, item)
                # A block that is written as a whole is put together elsewhere and then streamed.
                staged = last - first == size and stride == item and step == item * size

                # What comes next: another piece of this group, another group, or another layer.
                there, next_first, next_last = here, first, last
                if number + 1 == len(pieces):
                    next_group = group + 1
                    if next_group == len(groups) - 1:
                        next_group, there = 0, here + layer_stride
                    next_first, next_last = groups[next_group], groups[next_group + 1]
                next_base, next_count, next_step, next_stride = _piece(pieces, (number + 1) % len(pieces), item)
                next_whole = next_last - next_first == size
                there += next_base

                for move in range(first, first + max(last - first, next_last - next_first)):
                    ahead = move - first + next_first
                    if ahead < next_last:
                        m = moves[ahead]
                        if next_step == item:
                            _fetch(there + m.from_block + m.read * next_stride, item * next_count)
                        else:
                            begin, end = next_count * m.nth // m.of, next_count * (m.nth + 1) // m.of
                            source = there + m.from_block + m.low_read * next_stride
                            _fetch_rows(source, next_step, m.span_read * next_stride + 1, begin, end)
                            if not next_whole:
                                target = there + m.to_block + m.low_write * next_stride
                                _fetch_rows(target, next_step, m.span_write * next_stride + 1, begin, end)
                    if move < last:
                        m = moves[move]
                        source = here + base + m.from_block + m.read * stride
                        target = here + base + m.to_block + m.write * stride
                        if step == item:
                            _copy_row(like, target, source, count)
                        elif staged:
                            _copy_column(like, stage + m.write * stride, source, count, step // item)
                        else:
                            _copy_column(like, target, source, count, step // item)
                if staged:
                    _copy_row(like, here + base + moves[first].to_block, stage, count * size)
    fence()


@njit(nogil=True)
def _piece(pieces, number, item):  # type: ignore[no-untyped-def]
    piece = pieces[number]
    return piece.base * item, piece.count, piece.step * item, piece.stride * item


@njit(nogil=True)
def _copy_by_map(cache, elements, sources, destinations):  # type: ignore[no-untyped-def]
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
        A function of the sources and destinations, int64 [M] each. One thread may call it at a time; it does not hold
        the interpreter's lock while it copies.
    """
    numbers, elements = cache.numpy(), layout.elements.numpy()
    item, size = numbers.itemsize, layout.block_size
    pieces = pieces_of(elements, max(1, TILE // item)) if numbers.strides[2] == item else None

    if pieces is None:

        def relocate(sources: Ints, destinations: Ints) -> None:
            _copy_by_map(numbers, elements, sources, destinations)

    else:
        like = np.empty(0, dtype=numbers.dtype)
        stage = np.empty(int(pieces["count"].max()) * size, dtype=numbers.dtype)
        layer_stride, block_stride, _ = numbers.strides

        def relocate(sources: Ints, destinations: Ints) -> None:
            moves, groups = _prepare(size, block_stride, sources, destinations)
            _copy_pieces(
                like,
                numbers.ctypes.data,  # taken anew, so that the cache lives as long as this function
                len(numbers),
                layer_stride,
                pieces,
                size,
                stage.ctypes.data,
                moves,
                groups,
            )

    def unless_empty(sources: Ints, destinations: Ints) -> None:
        if len(sources):
            relocate(sources, destinations)

    if numbers.size:
        relocate(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))  # compiles, and copies a token onto itself
    return unless_empty
