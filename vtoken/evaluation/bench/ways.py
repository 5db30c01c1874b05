"""The four ways to run that experiments compare, on engines of one kind."""

from collections.abc import Sequence
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.quality_of import QUALITY_COLUMNS, quality_cells
from vtoken.evaluation.plan import BLOCK_SIZE
from vtoken.evaluation.workloads import Workload

__all__ = [
    "AGAIN",
    "EVICTING",
    "FILL",
    "NAIVE",
    "NATIVE",
    "PACK",
    "POLICIES",
    "QUALITY_COLUMNS",
    "QUICK_BLOCKS",
    "SHARE",
    "WAYS",
    "blocks_for",
    "config_of",
    "quality_cells",
]

NATIVE, NAIVE, PACK, FILL = "native", "none", "pack", "fill"
EVICTING = (NAIVE, PACK, FILL)
WAYS = (NATIVE, *EVICTING)
AGAIN = "fill again"
"""``fill`` in another engine: the A of an A/A pair."""
POLICIES = ("h2o", "scissorhands", "random")
SHARE = 0.5
"""Of the prompt that is kept."""
QUICK_BLOCKS = 16
"""The pool of the quick forms, which so share engines."""


def config_of(way: str) -> VTokenConfig | None:
    """Settings of an engine that evicts this way: h2o, and whatever else of ``POLICIES`` a request asks for."""
    if way == NATIVE:
        return None
    others: dict[str, dict[str, Any]] = {policy: {} for policy in POLICIES[1:]}
    settings: dict[str, Any] = {"reclaim": FILL if way == AGAIN else way, "request_policies": others}
    return VTokenConfig(policy=POLICIES[0], budget=SHARE, **settings)


def blocks_for(works: Sequence[Workload], requests: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that hold so many of the longest of these requests, with all of their tokens."""
    return requests * max(-(-work.total_tokens // block_size) for work in works)
