"""How much of a decode step is spent in vtoken's hooks: outermost vtoken frames minus the vLLM calls inside them.

Stock and own methods are wrapped in a timer that charges every moment to whoever is innermost, so that a vLLM call
inside a hook counts as vLLM's. Relocation is listed apart. Shares are of the same steps, so they compare across
machines; times do not.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.evaluation.model import ensure_model, model_dtype
from vtoken.vllm_plugin import make_engine


class ExclusiveTimer:
    """Charges wall time to the innermost wrapped call, by category."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack = ["outside"]
        self._since = perf_counter()

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
        now = perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now


def instrument(timer: ExclusiveTimer) -> None:
    """Wrap every method that vtoken overrides, and the stock method below it."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    from vtoken.kernels.relocation import Relocator
    from vtoken.vllm_plugin import compat, kv_cache

    pairs = [
        (compat.VTokenScheduler, compat.VTokenScheduler.__mro__[1:]),
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


def measure(model: Path, running: int, steps: int, prompt: int, config: VTokenConfig) -> dict[str, float]:
    """Decode steps at a fixed number of running requests; medians and shares over them."""
    timer = ExclusiveTimer()
    instrument(timer)
    engine = make_engine(
        str(model),
        config,
        dtype=model_dtype(),
        enforce_eager=True,
        enable_prefix_caching=False,
        block_size=32,
        max_model_len=4096,
        max_num_seqs=max(64, running),
        kv_cache_memory_bytes=4 << 30,
    )
    rng = np.random.default_rng(0)
    for n in range(running):
        engine.add_request(f"r{n}", rng.integers(100, 40000, prompt).tolist(), steps + 40)
    while not (engine.snapshot().running == running and engine.snapshot().waiting == 0):
        engine.step()
    for _ in range(4):  # the last prefill chunks, and a warm cache
        engine.step()
    shares, rows = [], []
    for _ in range(steps):
        timer.take()
        began = perf_counter()
        engine.step()
        total = perf_counter() - began
        spent = timer.take()
        rows.append((total, spent.get("vtoken", 0.0), spent.get("relocation", 0.0)))
        shares.append(spent.get("vtoken", 0.0) / total)
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.preemptions) == (running, 0)
    engine.shutdown()
    total, own, moved = (sum(column) for column in zip(*rows, strict=True))
    return {
        "running": running,
        "steps": steps,
        "step_ms_median": 1e3 * statistics.median(row[0] for row in rows),
        "hooks_ms_median": 1e3 * statistics.median(row[1] for row in rows),
        "relocation_ms_median": 1e3 * statistics.median(row[2] for row in rows),
        "hooks_share": own / total,
        "hooks_share_p95": float(np.percentile(shares, 95)),
        "relocation_share": moved / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--budget", type=int, default=400)
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    config = VTokenConfig(budget=args.budget, interval=args.interval)
    model = args.model or ensure_model()
    print(json.dumps(measure(model, args.running, args.steps, args.prompt, config), indent=2))


if __name__ == "__main__":
    main()
