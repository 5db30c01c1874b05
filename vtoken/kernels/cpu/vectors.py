"""What the kernels compute with: products of small matrices held in registers, and powers of two.

Addresses are plain integers here, because what the kernels read is part of a cache that they know by address.
Everything is compiled for the machine it runs on; a vector of 8 numbers is one register with AVX2, half of one with
AVX-512, two with NEON.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from vtoken.kernels.jit import carray, cgutils, intrinsic, ir, njit, types

LANES = 8
"""Numbers in a vector."""

_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_LINE = 64
_REGISTERS = 16
"""Vector registers of AVX2; there are 32 with AVX-512 and with NEON."""

_FUSED = {"contract"}
"""A product and a sum may become one instruction; nothing is assumed about NaN, infinities or order."""


def tile_shape(rows: int, width: int) -> tuple[int, int]:
    """Rows and vectors of the tiles that cover ``rows`` (the last tile may reach beyond) by ``width`` numbers.

    The more numbers a tile has, the less its additions wait for each other and the fewer numbers are loaded for each.

    Args:
        width: a multiple of 16.
    """

    def fits(tile_rows: int, vectors: int) -> bool:
        """The tile stays in registers, with what ``tile_product`` multiplies to get it."""
        return tile_rows * vectors + min(tile_rows, vectors) + 1 <= _REGISTERS

    most_rows = next(n for n in range(_REGISTERS, 0, -1) if fits(n, 2))
    tile_rows = -(-rows // -(-rows // most_rows))
    return tile_rows, next((n for n in (8, 4) if width % (n * LANES) == 0 and fits(tile_rows, n)), 2)


@lru_cache
def tile_product(
    rows: int, vectors: int, a_stride: int, b_stride: int, c_stride: int, narrow: bool, accumulate: bool
) -> Callable[[int, int, int, int, int], None]:
    """Compile ``product(a, b, c, n, ahead)``: c [rows, width] = a [rows, n] @ b [n, width], with width = 8 * vectors.

    As many bytes as b has are meanwhile fetched from ``ahead`` into the cache: the blocks of a request lie anywhere,
    and the processor, which fetches ahead what follows what is being read, would have to wait for each.

    Args:
        a_stride, b_stride, c_stride: numbers from one row to the next; rows are contiguous.
        narrow: b is bfloat16 instead of float32, as a and c are.
        accumulate: add to what c holds instead of replacing it.

    Returns:
        A function for compiled code; a, b, c and ahead are addresses.
    """
    size = 2 if narrow else 4

    @intrinsic
    def product(typing: Any, a: Any, b: Any, c: Any, n: Any, ahead: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, b, c, n, ahead = arguments
            floats = _FLOAT.as_pointer()

            def at(base: Any, offset: Any, kind: Any) -> Any:
                return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

            def number(value: int) -> Any:
                return ir.Constant(ir.IntType(64), value)

            def place(row: int, vector: int) -> Any:
                return at(c, number(4 * (row * c_stride + vector * LANES)), _FLOATS)

            tile = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(vectors)] for _ in range(rows)]
            for row in range(rows):
                for vector in range(vectors):
                    initial = (
                        builder.load(place(row, vector), align=4) if accumulate else ir.Constant(_FLOATS, [0.0] * LANES)
                    )
                    builder.store(initial, tile[row][vector])
            start_of_row = [builder.inttoptr(builder.add(a, number(4 * row * a_stride)), floats) for row in range(rows)]
            with cgutils.for_range(builder, n) as loop:
                row_of_b = builder.mul(loop.index, number(size * b_stride))
                bytes_ahead = builder.mul(loop.index, number(size * vectors * LANES))
                for line in range(0, size * vectors * LANES, _LINE):
                    _prefetch(builder, at(ahead, builder.add(bytes_ahead, number(line)), _BYTE))

                def left(row: int) -> Any:
                    return _broadcast(builder, builder.load(builder.gep(start_of_row[row], [loop.index]), align=4))

                def right(vector: int) -> Any:
                    address = builder.add(row_of_b, number(size * vector * LANES))
                    if not narrow:
                        return builder.load(at(b, address, _FLOATS), align=4)
                    bits = builder.zext(builder.load(at(b, address, _SHORTS), align=2), _INTS)
                    return builder.bitcast(builder.shl(bits, ir.Constant(_INTS, [16] * LANES)), _FLOATS)

                def add(row: int, vector: int, left: Any, right: Any) -> None:
                    term = builder.fmul(left, right, flags=("contract",))
                    total = builder.fadd(builder.load(tile[row][vector]), term, flags=("contract",))
                    builder.store(total, tile[row][vector])

                # The fewer of the two stay in registers, the others come one by one.
                if rows < vectors:
                    lefts = [left(row) for row in range(rows)]
                    for vector in range(vectors):
                        one = right(vector)
                        for row in range(rows):
                            add(row, vector, lefts[row], one)
                else:
                    rights = [right(vector) for vector in range(vectors)]
                    for row in range(rows):
                        one = left(row)
                        for vector in range(vectors):
                            add(row, vector, one, rights[vector])
            for row in range(rows):
                for vector in range(vectors):
                    builder.store(builder.load(tile[row][vector]), place(row, vector), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), emit

    return product


def _broadcast(builder: Any, value: Any) -> Any:
    lane = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(lane, lane, ir.Constant(_INTS, [0] * LANES))


def _prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    to_read, keep, data = (ir.Constant(_INT, n) for n in (0, 3, 1))
    builder.call(prefetch, [address, to_read, keep, data])


def _reinterpret(source: Any, target: Any) -> Any:
    @intrinsic
    def reinterpret(typing: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), emit

    return reinterpret


bits_of = _reinterpret(types.float32, types.int32)
float_of = _reinterpret(types.int32, types.float32)


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), emit


@njit
def array_at(address, dtype):  # type: ignore[no-untyped-def]
    """Array over memory at an address, of no particular length: what is read of it is the caller's business."""
    return carray(_pointer(address), 2**40, dtype)


@njit
def floats_at(address):  # type: ignore[no-untyped-def]
    """float32 array over memory at an address."""
    return carray(_pointer(address), 2**40, np.float32)


def record_of(integers: str, floats: str = "") -> np.dtype[Any]:
    """A record of int64 and float64 numbers of the given names, as compiled code gets its arguments."""
    return np.dtype([(name, np.int64) for name in integers.split()] + [(name, np.float64) for name in floats.split()])


# 2**f = 1 + f * (C1 + f * (C2 + ...)) on [-1/2, 1/2]: the least maximum of the relative error at this degree, 9.2e-8.
_C1, _C2, _C3, _C4, _C5 = np.array(
    [0.6931469775872219, 0.2402224208584346, 0.055507337737881385, 0.009671512638439465, 0.0013264714349625756],
    dtype=np.float32,
)
_ROUNDING = np.float32(1.5 * 2**23)  # added to a small number, it leaves the nearest integer in the lowest bits
_LEAST = np.float32(-126)
_MANTISSA = np.int32(23)


@njit(fastmath=_FUSED, error_model="numpy")
def exp2(x):  # type: ignore[no-untyped-def]
    """2**x for float32 x <= 0; relative error below 3e-7, and 2**-126 for everything smaller.

    Without a branch or a table, so that loops over it become vector instructions.
    """
    x = _LEAST if x < _LEAST else x
    rounded = x + _ROUNDING
    f = x - (rounded - _ROUNDING)
    fraction = np.float32(1) + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * _C5))))
    return float_of(np.int32(bits_of(fraction) + np.int32(bits_of(rounded) << _MANTISSA)))
