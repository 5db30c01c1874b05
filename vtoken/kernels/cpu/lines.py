"""Cache lines: fetched before they are needed, and written past the caches."""

from typing import Any

from vtoken.kernels.jit import intrinsic, ir, types

__all__ = ["LINE", "fence", "prefetch", "stream_line"]

LINE = 64
"""Bytes"""

_BYTE, _INT, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_HALF = ir.VectorType(_LONG, LINE // 16)


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Bring the line at an address into the caches; no address is wrong."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
        function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        to_read, keep, data = (ir.Constant(_INT, n) for n in (0, 3, 1))
        builder.call(function, [builder.inttoptr(arguments[0], _BYTE.as_pointer()), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def stream_line(typing: Any, target: Any, source: Any) -> Any:
    """Copy a line to an address that is a multiple of its size, without reading first what it held.

    Other threads may see it late: there has to be a ``fence`` between such stores and the news that they are done.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for start in (0, LINE // 2):
            to, at = (
                builder.inttoptr(builder.add(address, ir.Constant(_LONG, start)), _HALF.as_pointer())
                for address in arguments
            )
            store = builder.store(builder.load(at, align=1), to, align=LINE // 2)
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def fence(typing: Any) -> Any:
    """All stores before it are seen before those after it, the streamed ones included."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit
