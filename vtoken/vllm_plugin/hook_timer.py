"""Who spends the time of a step: every moment is charged to the innermost wrapped call.

The time inside vtoken's hooks is that of its outermost frames less the vLLM calls inside them, so both are wrapped:
every method that vtoken overrides, and the stock method below it. Relocation is listed apart.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vtoken.kernels.relocation import Relocator
from vtoken.vllm_plugin import compat, kv_cache


class ExclusiveTimer:
    """Charges time to the innermost wrapped call, by category; time outside all of them is that of "outside".

    It belongs to the thread that makes it. What other threads call, such as the one that copies tokens beside the
    host's work, is not counted.

    Args:
        clock: wall time, or the processor time of a thread that does everything itself.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack = ["outside"]
        self._clock = clock
        self._since = clock()
        self._thread = get_ident()
        self._wrapped: list[tuple[type, str, Any]] = []

    def wrap(self, owner: type, name: str, category: str) -> None:
        """Replace a method that ``owner`` itself defines; one that it does not is left where it is."""
        if name not in vars(owner):
            return
        stock: Callable[..., Any] = vars(owner)[name]

        def timed(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread:
                return stock(*args, **kwargs)
            self._charge()
            self._stack.append(category)
            try:
                return stock(*args, **kwargs)
            finally:
                self._charge()
                self._stack.pop()

        self._wrapped.append((owner, name, stock))
        setattr(owner, name, timed)

    def unwrap(self) -> None:
        """Put all methods back. No wrapped call may be under way."""
        while self._wrapped:
            owner, name, stock = self._wrapped.pop()
            setattr(owner, name, stock)

    def take(self) -> dict[str, float]:
        """Seconds by category since this was last called."""
        self._charge()
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def _charge(self) -> None:
        now = self._clock()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now


@contextmanager
def timed_hooks(clock: Callable[[], float] = perf_counter) -> Iterator[ExclusiveTimer]:
    """A timer over all hooks of this process, for as long as the context lasts."""
    timer = ExclusiveTimer(clock)
    instrument(timer)
    try:
        yield timer
    finally:
        timer.unwrap()


def instrument(timer: ExclusiveTimer) -> None:
    """Wrap every method that vtoken overrides as "vtoken", and the stock method below it as "vllm".

    What stands for vLLM's runner where there is no model is "simulation".
    """
    runner = compat.VTokenCPUModelRunner if current_platform.is_cpu() else compat.VTokenGPUModelRunner
    manager = kv_cache.EvictableAttentionManager
    pairs = [
        (compat.EvictingScheduler, compat.VTokenScheduler.__mro__[2:]),
        (compat.EvictingRunner, runner.__mro__[2:]),
        (manager, (*manager.__mro__[1:2], SingleTypeKVCacheManager)),
    ]
    for own, stock in pairs:
        names = [name for name, value in vars(own).items() if callable(value) and name != "__init__"]
        for base in stock:
            if base.__module__.startswith("vllm."):
                for name in names:
                    timer.wrap(base, name, "vllm")
        for name in names:
            timer.wrap(own, name, "vtoken")
    for name in vars(compat.EvictingRunner):
        timer.wrap(compat.ModelFreeRunner, name, "simulation")
    timer.wrap(Relocator, "__call__", "relocation")
