"""H2O (Zhang et al., NeurIPS 2023, arXiv 2306.14048): heavy hitters of all attention so far, and recent tokens."""

import math
from dataclasses import dataclass
from typing import Any

from vtoken.policies.base import ALL, Needs, Observation, Policy, PolicyBatch


@dataclass(frozen=True)
class H2O(Policy):
    """Keep the tokens that received most attention, from every query of the prompt and of decoding.

    With a_q(t) the probability that query q gives token t, summed over heads and layers, n the length, and f the
    first query that the request computed itself (0 unless its prompt begins with a hit in the prefix cache):

        state(t)    = sum over q = max(t, f) ... n - 1 of decay^(n-1-q) * a_q(t)
        priority(t) = state(t) / sum over q = max(t, f) ... n - 1 of decay^(n-1-q)      if average, else state(t)

    The paper's score is the plain sum (``decay=1, average=False``). It grows with a token's age: after a long prompt
    no generated token ever catches up, so each one is evicted as it leaves ``recent`` and the cache freezes. The
    default is therefore the mean over the queries that could see the token, as kvpress's ObservedAttentionPress has
    it. Other differences: one choice of tokens for all layers and heads, made from their sum, where the paper lets
    each head choose; ``decay`` below 1 forgets old attention; the recent half of the paper's cache is ``recent``.
    A mean over few queries is noisy, which ``recent`` also guards against.

    After a hit the prefix's own queries are missing from the sums: an earlier request computed them, and their
    attention is not kept. So a prompt may keep other tokens on a hit than on a miss. The last ``observation_window``
    queries are always computed, and ``whole_prompt`` asks for all of them: equal choices, and no hits.

    Attributes:
        decay: weight of a query's attention relative to the next one's, in (0, 1].
        average: divide by the weights of the queries that could see the token.
        whole_prompt: look at every query of the prompt, and take nothing from the prefix cache for that.
        observation_window: last queries of the prompt that never come from it; the engine's option of that name.
    """

    decay: float = 1.0
    average: bool = True
    whole_prompt: bool = False
    observation_window: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError("decay must lie in (0, 1]")

    @property
    def needs(self) -> Needs:
        own = ALL if self.whole_prompt else self.observation_window
        return Needs(prompt_queries=ALL, decode_queries=True, query_decay=self.decay, own_queries=own)

    def observe(self, seen: Observation) -> Any:
        return seen.per_token(self.decay**seen.queries) * seen.state + seen.mass

    def priority(self, batch: PolicyBatch) -> Any:
        if not self.average:
            return batch.state
        queries = batch.per_token(batch.length) - batch.xp.maximum(batch.tokens, batch.per_token(batch.first_query))
        if self.decay == 1:
            return batch.state / queries
        # (1 - decay^queries) / (1 - decay), which would lose all digits in float32 for a decay near 1.
        rate = math.log(self.decay)
        return batch.state * (math.expm1(rate) / batch.xp.expm1(rate * queries))
