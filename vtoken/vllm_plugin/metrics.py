"""vtoken's metrics on vLLM's /metrics, made anew from the engines' own totals each time that somebody asks.

No front-end process keeps totals of its own, so there is nothing to add up over several of them, and nothing is lost
or counted twice where there are. One is counted where it happens: the requests that a front end refuses (refused.py).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vtoken.vllm_plugin.monitor import Counts

LABELS = ("model_name", "engine")
"""As vLLM's own metrics have them."""
Gauge = Callable[[Counts], float]
GAUGES: dict[str, tuple[str, Gauge]] = {
    "vtoken_live_tokens": ("Tokens in the KV cache that are attended.", lambda c: c.live_tokens),
    "vtoken_dead_tokens": ("Slots of held blocks whose token was evicted.", lambda c: c.dead_tokens),
    "vtoken_held_tokens": (
        "Slots of held blocks: live, dead or not used yet.",
        lambda c: c.held_tokens,
    ),
    "vtoken_held_blocks": ("KV-cache blocks that requests hold.", lambda c: c.held_blocks),
    "vtoken_free_blocks": (
        "Blocks that requests can have, cached prefixes in some of them.",
        lambda c: c.free_blocks,
    ),
    "vtoken_pool_blocks": ("Blocks that requests can hold, all of them together.", lambda c: c.num_blocks),
    "vtoken_waste_ratio": (
        "F: share of the slots of held blocks that is not live, 0 to 1.",
        lambda c: 1.0 - c.live_tokens / c.held_tokens if c.held_tokens else 0.0,
    ),
}
COUNTERS: dict[str, tuple[str, Gauge]] = {
    "vtoken_tokens_evicted": ("Tokens that policies have evicted.", lambda c: c.tokens_evicted),
    "vtoken_tokens_moved": ("Tokens that were copied to another slot to empty a block.", lambda c: c.tokens_moved),
    "vtoken_blocks_reclaimed": (
        "Blocks given back before their request ended.",
        lambda c: c.blocks_reclaimed,
    ),
    "vtoken_relocations": ("Steps after which tokens were copied to other slots.", lambda c: c.relocations),
    "vtoken_copied_bytes": ("K and V copied to other slots, over all layers and workers.", lambda c: c.copied_bytes),
    "vtoken_requests_failed": (
        "Requests that vtoken has ended with an error.",
        lambda c: c.requests_failed,
    ),
}
PHASE_SECONDS = "vtoken_phase_seconds"
PHASES = "Seconds of the host in vtoken's part of a step: plan, settle (scheduler); wait, begin, place, evict (worker)."
AGE = "vtoken_counts_age_seconds"


class EngineMetrics(Collector):
    """What the engines tell, beside what vLLM's registry has, as one page of metrics.

    Args:
        registry: vLLM's.
        model_name: as in vLLM's labels.
        engines: the counts of each engine; none if they are not known.
        age: seconds since they were true.
    """

    def __init__(self, registry: Collector, model_name: str, engines: Sequence[Counts], age: float) -> None:
        self._registry, self._model_name = registry, model_name
        self._engines, self._age = engines, age

    def collect(self) -> Iterable[Metric]:
        yield from self._registry.collect()
        if not self._engines:
            return
        for name, (text, value) in GAUGES.items():
            yield self._family(GaugeMetricFamily(name, text, labels=LABELS), value)
        for name, (text, value) in COUNTERS.items():
            yield self._family(CounterMetricFamily(name, text, labels=LABELS), value)
        phases = CounterMetricFamily(PHASE_SECONDS, PHASES, labels=(*LABELS, "phase"))
        for engine, counts in enumerate(self._engines):
            for phase, seconds in counts.phase_seconds.items():
                phases.add_metric((self._model_name, str(engine), phase), seconds)
        yield phases
        yield GaugeMetricFamily(AGE, "Seconds since these counts were true, which a long step delays.", self._age)

    def _family(self, family: Any, value: Gauge) -> Metric:
        for engine, counts in enumerate(self._engines):
            family.add_metric((self._model_name, str(engine)), value(counts))
        metric: Metric = family
        return metric


def registry_with(registry: Collector, model_name: str, engines: Sequence[Counts], age: float) -> CollectorRegistry:
    """One registry for both; see ``EngineMetrics``."""
    both = CollectorRegistry(auto_describe=True)
    both.register(EngineMetrics(registry, model_name, engines, age))
    return both
