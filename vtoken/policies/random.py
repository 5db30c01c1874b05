"""Random: the baseline that every other policy has to beat."""

from dataclasses import dataclass
from typing import Any

from vtoken.policies.base import Policy, PolicyBatch

MASK = 2**31 - 1


@dataclass(frozen=True)
class Random(Policy):
    """Keep a uniform sample: priority(t) = hash(seed, the request's prompt, t), fixed for the token's whole life.

    Evicting the lowest of such numbers, whenever one must go, leaves a uniform sample without replacement of
    everything that is unprotected, however often that is done. Equal prompts get equal choices.

    Attributes:
        seed: another one for another sample, in [0, 2**31).
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MASK:
            raise ValueError("seed must lie in [0, 2**31)")

    def priority(self, batch: PolicyBatch) -> Any:
        request = _mix(_mix(self.seed) ^ batch.prompt_hash)
        return _mix(batch.per_token(request) ^ batch.tokens)


def _mix(x: Any) -> Any:
    """A bijection of [0, 2**31) that spreads every bit over all; no product reaches 2**63, in any array library."""
    for odd in (0x2C1B3C6D, 0x297A2D39, 0x1B56C4E9):
        x = (x + 0x1E3779B9) & MASK
        x = ((x ^ (x >> 15)) * odd) & MASK
    return x ^ (x >> 16)
