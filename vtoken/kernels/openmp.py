"""Compiled functions that run as a team of threads, in the OpenMP runtime that torch already uses.

numba's own parallel loops would start a second pool of threads beside torch's. vLLM pins torch's threads to cores, and
the two pools would take turns on them: every kernel would wait for threads that spin or sleep in the other. So a
numba C function is handed to the runtime that torch loaded, through the entry points that a compiler emits calls to
for ``#pragma omp parallel`` (GNU's libgomp has them, and Intel's and LLVM's libiomp5 and libomp export them too).

Where none of these is loaded, a region runs on the calling thread, as a team of one. Bodies must therefore do all
lanes of their work whatever the size of the team: ``for lane in range(thread_number(), lanes, team_size())``.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch  # loads the runtime that is looked up below

from vtoken.kernels.jit import njit

__all__ = ["barrier", "has_runtime", "num_threads", "run_team", "team_size", "thread_number"]

_ENTRY_POINTS = {
    "GOMP_parallel": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]),
    "GOMP_barrier": (None, []),
    "omp_get_thread_num": (ctypes.c_int, []),
    "omp_get_num_threads": (ctypes.c_int, []),
}


def find_runtime(library: Any) -> dict[str, Callable[..., Any]] | None:
    """The entry points of the OpenMP runtime, or None if one of them is missing.

    Args:
        library: the symbols to look in, ``ctypes.CDLL(None)`` for those of the process.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name, (result, arguments) in _ENTRY_POINTS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            return None
        function.restype, function.argtypes = result, arguments
        found[name] = function
    return found


_runtime = find_runtime(ctypes.CDLL(None))
has_runtime = _runtime is not None
"""Whether a region gets more than one thread."""

if _runtime is not None:
    _parallel = _runtime["GOMP_parallel"]
    thread_number = _runtime["omp_get_thread_num"]
    team_size = _runtime["omp_get_num_threads"]
    barrier = _runtime["GOMP_barrier"]
else:

    @njit
    def thread_number() -> int:
        return 0

    @njit
    def team_size() -> int:
        return 1

    @njit
    def barrier() -> None:
        pass


def num_threads() -> int:
    """Threads that torch uses for one operation, and so the lanes that work is divided into."""
    return torch.get_num_threads() if has_runtime else 1


def run_team(body: Any, data: int, threads: int) -> None:
    """Run a compiled body on a team of threads, and return when all of them have.

    Args:
        body: a numba C function ``void(void *data)`` that calls ``thread_number``, ``team_size`` and ``barrier`` of
            this module. It must not raise, and needs no interpreter: the interpreter's lock is not held.
        data: address handed to every thread; what lies there must stay alive until the call returns.
        threads: size wanted; the runtime may give fewer, one inside another region for instance.
    """
    if has_runtime:
        _parallel(body.address, data, threads, 0)
    else:
        body.ctypes(data)
