"""Who spends the time of a step: every moment is charged to the innermost wrapped call."""

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any


class ExclusiveTimer:
    """Charges time to the innermost wrapped call, by category.

    Args:
        clock: wall time, or the processor time of a thread that does everything itself.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack = ["outside"]
        self._clock = clock
        self._since = clock()

    def wrap(self, owner: type, name: str, category: str) -> None:
        """Replace a method that ``owner`` itself defines."""
        if name not in vars(owner):
            return
        stock: Callable[..., Any] = vars(owner)[name]

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch(category, push=True)
            try:
                return stock(*args, **kwargs)
            finally:
                self._switch(category, push=False)

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        self._charge()
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def _switch(self, category: str, push: bool) -> None:
        self._charge()
        if push:
            self._stack.append(category)
        else:
            self._stack.pop()

    def _charge(self) -> None:
        now = self._clock()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now


def instrument(timer: ExclusiveTimer) -> None:
    """Wrap every method that vtoken overrides, and the stock method below it."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    from vtoken.kernels.relocation import Relocator
    from vtoken.vllm_plugin import compat, kv_cache

    pairs = [
        (compat.EvictingScheduler, compat.VTokenScheduler.__mro__[2:]),
        (compat.EvictingRunner, compat.VTokenCPUModelRunner.__mro__[2:]),
        (
            kv_cache.EvictableAttentionManager,
            (*kv_cache.EvictableAttentionManager.__mro__[1:2], SingleTypeKVCacheManager),
        ),
    ]
    for own, stock in pairs:
        names = [name for name, value in vars(own).items() if callable(value) and name != "__init__"]
        for base in stock:
            if base.__module__.startswith("vllm."):
                for name in names:
                    timer.wrap(base, name, "vllm")
        for name in names:
            timer.wrap(own, name, "vtoken")
    timer.wrap(Relocator, "__call__", "relocation")
