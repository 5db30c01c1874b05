"""StreamingLLM (Xiao et al., ICLR 2024, arXiv 2309.17453): attention sinks and a sliding window."""

from dataclasses import dataclass
from typing import Any

from vtoken.policies.base import Policy, PolicyBatch


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the newest tokens: priority(t) = t. The sinks are kept by the runtime.

    Unlike the paper, positions are not renumbered within the cache: a survivor keeps the rotation it was
    computed with, and a query keeps its true position.
    """

    def priority(self, batch: PolicyBatch) -> Any:
        return batch.tokens
