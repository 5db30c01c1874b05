"""numba, imported so that vLLM can still start another engine in this process."""

import llvmlite.binding.ffi
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["carray", "cfunc", "cgutils", "intrinsic", "ir", "njit", "types"]

# vLLM 0.32 looks through every module's attributes for Triton kernels when a CPU engine starts, and takes what
# `vars()` returns for a dict. llvmlite's library handle makes a C function of any name it is asked for, `__dict__`
# included, so a second engine in a process that has loaded numba would end in an AttributeError.
llvmlite.binding.ffi.lib._fntab.setdefault("__dict__", {})
