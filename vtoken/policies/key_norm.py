"""Key norms (Devoto et al., EMNLP 2024, arXiv 2406.11430): keys with a small norm attract attention."""

from dataclasses import dataclass
from typing import Any

from vtoken.policies.base import Needs, Policy, PolicyBatch


@dataclass(frozen=True)
class KeyNorm(Policy):
    """Keep the tokens whose keys have the smallest L2 norms: priority(t) = -(sum of ||k_t|| over layers and KV heads).

    The paper lets each head choose, and evicts nothing in a model's first layers; here there is one choice for all
    layers and heads, made from their sum. Attention need not be looked at, and a score never changes.
    """

    @property
    def needs(self) -> Needs:
        return Needs(key_norms=True)

    def priority(self, batch: PolicyBatch) -> Any:
        return -batch.key_norm
