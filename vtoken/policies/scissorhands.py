"""Scissorhands (Liu et al., NeurIPS 2023, arXiv 2305.17118): what mattered lately goes on mattering."""

from dataclasses import dataclass
from typing import Any

from vtoken.policies.base import Needs, Observation, Policy, PolicyBatch


@dataclass(frozen=True)
class Scissorhands(Policy):
    """Evict the tokens that most often received less attention than the average token.

    With a_q(t) the probability that query q gives token t, summed over heads and layers, for each query q >= t:

        state(t)    <- (1 - 1/history) * state(t) + [a_q(t) < mean of a_q over the tokens that q attends]
        priority(t) =  -state(t)

    Differences from the paper: the window of its last w queries fades out instead of ending sharply, with the same
    total weight; one choice for all layers and heads, made from their sum; as many tokens go as the budget demands
    instead of half of the buffer at once; of a prompt the last ``observation_window`` queries are counted. A decode
    query that stands for k queries (``score_interval=k``) counts k times.

    Attributes:
        history: queries over which the count fades, the paper's w, at least 1.
        observation_window: queries of the prompt that are counted; the engine's option of that name.
    """

    history: int = 400
    observation_window: int = 32

    def __post_init__(self) -> None:
        if self.history < 1:
            raise ValueError("history must be at least 1")

    @property
    def needs(self) -> Needs:
        return Needs(prompt_queries=self.observation_window, decode_queries=True, each_query=True)

    def observe(self, seen: Observation) -> Any:
        xp = seen.xp
        request = seen.per_token(xp.cumsum(xp.ones_like(seen.counts), 0) - 1)
        # In float64, and by request, so that a mean does not depend on what else is in the batch.
        total = xp.bincount(request, weights=xp.asarray(seen.mass, dtype=xp.float64), minlength=len(seen.counts))
        attended = seen.tokens <= seen.per_token(seen.position)
        below = attended & (seen.mass < seen.per_token(total / seen.attended))
        fading = (1 - 1 / self.history) ** seen.queries
        return seen.per_token(fading) * seen.state + seen.per_token(seen.queries) * below

    def priority(self, batch: PolicyBatch) -> Any:
        return -batch.state
