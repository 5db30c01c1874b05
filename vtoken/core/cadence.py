"""When a request is reduced, and which of its queries are looked at: functions of its own length alone.

Nothing here depends on what else is in the batch or on how a prompt was cut into forwards, so a request's result
does not either.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ragged import Ints


@dataclass(frozen=True)
class Cadence:
    """The rhythm of evictions and observations, in tokens; the fields are those of ``VTokenConfig`` and ``Needs``.

    Attributes:
        interval: tokens between two evictions of a request that decodes.
        chunk: tokens between two evictions of a prompt; 0 to reduce it only once it is whole.
        recent, grace: newest tokens that are never evicted; of the generated ones, if that is more.
        prompt_queries: how many of the last queries before a prompt is reduced are observed.
        decode_queries, score_interval: whether queries of decode steps are, and every how many.
    """

    interval: int = 1
    chunk: int = 0
    recent: int = 0
    grace: int = 0
    prompt_queries: int = 0
    decode_queries: bool = False
    score_interval: int = 1

    def next_reduction(self, position: Ints | int, prefill_end: Ints | int) -> Ints:
        """Where the part of a prompt that holds the token before ``position`` ends and is reduced; ``position`` > 0."""
        if not self.chunk:
            return np.asarray(prefill_end)
        return np.minimum(prefill_end, -(-np.asarray(position) // self.chunk) * self.chunk)

    def peak_length(self, tokens: int, budget: int) -> int:
        """The most tokens that a request with a budget ever attends if its prefill has this many."""
        if not self.chunk:
            return max(tokens, budget)
        return max(min(tokens, budget - self.interval + self.chunk), budget)

    def observed_from(
        self,
        logical_length: Ints,
        new_tokens: Ints,
        prefill_end: Ints,
        prompt_length: Ints,
        decodes: NDArray[np.bool_],
    ) -> Ints:
        """The first of a forward's new tokens whose query is observed, ``new_tokens`` if none is; shape [R].

        Args:
            logical_length: tokens of the sequence after the forward.
            new_tokens: tokens that the forward computes.
            prefill_end: tokens of the prefill.
            prompt_length: tokens of the original prompt.
            decodes: the forward is a decode step.
        """
        start = logical_length - new_tokens
        first = self.next_reduction(logical_length, prefill_end) - self.prompt_queries
        in_prompt = np.clip(first - start, 0, new_tokens)
        looks = self.decode_queries and ((logical_length - prompt_length) % self.score_interval == 0)
        return np.where(decodes, np.where(looks, 0, new_tokens), in_prompt)

    def protected_tail(self, logical_length: Ints, prefill_end: Ints) -> Ints:
        """Newest tokens that no eviction may take, shape [R]."""
        generated = np.maximum(logical_length - prefill_end, 0)
        return np.maximum(self.recent, np.minimum(self.grace, generated))
