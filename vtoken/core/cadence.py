"""When a request is reduced, and which of its queries are looked at: functions of its own length alone.

Nothing here depends on what else is in the batch or on how a prompt was cut into forwards, so a request's result
does not either.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ragged import Ints

Flags = NDArray[np.bool_]


OWN = ("head", "protect_prompt", "recent", "prompt_queries", "decode_queries", "own_queries")
"""Fields in which one request of an engine may differ from another."""


@dataclass(frozen=True)
class Cadence:
    """The rhythm of evictions and observations, in tokens; the fields are those of ``VTokenConfig`` and ``Needs``.

    Those that are ``OWN`` are one value, or an array [R] with one for each request that a method is asked about.

    Attributes:
        interval: tokens between two evictions of a request that decodes.
        chunk: tokens between two evictions of a prompt; 0 to reduce it only once it is whole.
        head: leading tokens that are never evicted; the whole prompt with ``protect_prompt``.
        recent, grace: newest tokens that are never evicted; of the generated ones, if that is more.
        prompt_queries: how many of the last queries before a prompt is reduced are observed.
        decode_queries, score_interval: whether queries of decode steps are, and every how many.
        own_queries: how many of the last queries before a prompt is reduced the request has to compute itself.
    """

    interval: int = 1
    chunk: int = 0
    head: Ints | int = 0
    protect_prompt: Flags | bool = False
    recent: Ints | int = 0
    grace: int = 0
    prompt_queries: Ints | int = 0
    decode_queries: Flags | bool = False
    score_interval: int = 1
    own_queries: Ints | int = 1

    def next_reduction(self, position: Ints | int, prefill_end: Ints | int, budget: Ints | int) -> Ints:
        """Where the part of a prompt that holds the token before ``position`` ends and is reduced; ``position`` > 0.

        As long as nothing has to go, nothing ends: the first part is the longest one that the budget lets stand.
        """
        if not self.chunk:
            return np.asarray(prefill_end)
        end = np.maximum(-(-np.asarray(position) // self.chunk), (np.asarray(budget) - self.interval) // self.chunk + 1)
        return np.minimum(prefill_end, end * self.chunk)

    def longest_hit(self, prefill_end: int, budget: int) -> int:
        """The most leading tokens that a request with a budget may take from the prefix cache.

        Up to where its prompt is reduced for the first time, so that the result does not depend on what is cached, and
        without the queries that its policy has to look at; one at least is computed, and then the reduction follows.
        """
        return max(int(self.next_reduction(1, prefill_end, budget)) - max(int(self.own_queries), 1), 0)

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
        budget: Ints,
        decodes: Flags,
    ) -> Ints:
        """The first of a forward's new tokens whose query is observed, ``new_tokens`` if none is; shape [R].

        A request without a budget is never reduced, so nothing is observed for it.

        Args:
            logical_length: tokens of the sequence after the forward.
            new_tokens: tokens that the forward computes.
            prefill_end: tokens of the prefill.
            prompt_length: tokens of the original prompt.
            budget: tokens; 0 for a request that is never reduced.
            decodes: the forward is a decode step.
        """
        if not np.any(self.decode_queries) and decodes.all():
            return new_tokens
        start = logical_length - new_tokens
        first = self.next_reduction(logical_length, prefill_end, budget) - self.prompt_queries
        in_prompt = np.clip(first - start, 0, new_tokens)
        looks = self.decode_queries & ((logical_length - prompt_length) % self.score_interval == 0)
        observed = np.where(decodes, np.where(looks, 0, new_tokens), in_prompt)
        return np.where(budget > 0, observed, new_tokens)

    def protected_head(self, prompt_length: Ints) -> Ints:
        """Leading tokens that no eviction may take, shape [R]."""
        return np.maximum(self.head, np.where(self.protect_prompt, prompt_length, 0))

    def protected_tail(self, logical_length: Ints, prefill_end: Ints) -> Ints:
        """Newest tokens that no eviction may take, shape [R]."""
        generated = np.maximum(logical_length - prefill_end, 0)
        return np.maximum(self.recent, np.minimum(self.grace, generated))
