"""What vLLM does for servers that start once, done once here too, though a test process starts fifty engines.

Each start and each end of an engine has Python's garbage collector walk through everything that was ever imported,
seven times in all, and each start looks through every attribute of every module for Triton kernels. Together that is
three quarters of what starting and ending an engine of a tiny model takes. None of it is under test, but for one thing:
the search must get past numba, which ``test_plugin.py`` sees to.
"""

import atexit
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_freeze, _thaw = gc.freeze, gc.unfreeze
_running = 0


def _nothing() -> None:
    pass


@functools.cache
def _prepare() -> None:
    """vLLM freezes the heap when an engine has started and thaws it at its end: here what was imported stays frozen."""
    from vllm.platforms import current_platform

    gc.freeze = gc.unfreeze = _nothing
    platform = type(current_platform)
    # Cached: the kernels that have been replaced stay so.
    platform.register_triton_kernel_overrides = staticmethod(functools.cache(platform.register_triton_kernel_overrides))


@functools.cache
def _freeze_what_was_imported() -> None:
    gc.collect()
    _freeze()
    atexit.register(_thaw)  # what counts references at the end would take what is frozen for lost


@contextmanager
def quick_starts() -> Iterator[None]:
    """Around an engine's life."""
    global _running  # noqa: PLW0603
    _prepare()
    _running += 1
    try:
        yield
    finally:
        _running -= 1
        if not _running:  # an engine that is alive must not be frozen: it would never be freed
            _freeze_what_was_imported()
