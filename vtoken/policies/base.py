"""The contract of an eviction policy: flat arrays of live tokens in, one keep-priority per token out.

The runtime, not the policy, protects sinks, recent and grace tokens, picks the lowest priorities of each request and
breaks ties by position. A policy never sees a block, and is a function of a request and its own history, never of
what else is in the batch.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

ALL = 2**31 - 1
"""As ``Needs.prompt_queries``: every query of the prompt."""

MOST_SINGLE_QUERIES = 1024
"""Queries of a prompt that can be shown one by one: each takes a row of masses as long as the prompt."""


@dataclass(frozen=True)
class Needs:
    """What the runtime has to measure for a policy; the default is nothing at all.

    Attributes:
        prompt_queries: how many of the last queries before the prompt is reduced are observed; ``ALL`` for every one.
        decode_queries: whether the queries of decode steps are observed, every ``score_interval``-th one.
        each_query: ``observe`` is called once per prompt query, in order, instead of once with their sum.
            The runtime then keeps one row of masses per query, so ``prompt_queries`` is limited.
        query_decay: in a sum over queries, the weight of a query relative to the one after it.
        key_norms: fill in ``PolicyBatch.key_norm``.
        own_queries: how many of the last queries before the prompt is reduced a request computes itself, whatever the
            prefix cache holds: attention that an earlier request has computed cannot be looked at. None for all of
            ``prompt_queries``, so that a hit changes nothing that is observed, and with ``ALL`` there is none.
    """

    prompt_queries: int = 0
    decode_queries: bool = False
    each_query: bool = False
    query_decay: float = 1.0
    key_norms: bool = False
    own_queries: int | None = None

    def __post_init__(self) -> None:
        if type(self.prompt_queries) is not int or self.prompt_queries < 0:
            raise ValueError("prompt_queries must be a count of queries, or ALL")
        if self.each_query and self.prompt_queries > MOST_SINGLE_QUERIES:
            raise ValueError(f"with each_query, prompt_queries must be at most {MOST_SINGLE_QUERIES}")
        if not 0 < self.query_decay <= 1:
            raise ValueError("query_decay must lie in (0, 1]")
        if self.own_queries is None:
            return
        if type(self.own_queries) is not int or self.own_queries < 0:
            raise ValueError("own_queries must be a count of queries, ALL, or None")
        if self.own_queries < self.prompt_queries < ALL:
            raise ValueError(
                f"own_queries = {self.own_queries} must not be below prompt_queries = {self.prompt_queries}, "
                "which are all observed"
            )

    @property
    def attention(self) -> bool:
        """Whether attention has to be observed at all."""
        return self.prompt_queries > 0 or self.decode_queries

    @property
    def computed_queries(self) -> int:
        """How many of the last queries before the prompt is reduced are never taken from the prefix cache."""
        return self.prompt_queries if self.own_queries is None else self.own_queries


@dataclass(frozen=True)
class PolicyBatch:
    """Live tokens of all requests concerned, as flat arrays of numpy or torch (N tokens of R requests).

    Attributes:
        xp: the array namespace, numpy or torch.
        tokens: logical ids, request after request, in any order within one, int64 [N].
        counts: live tokens per request, int64 [R].
        length: logical length of each request, evicted tokens included, int64 [R].
        prompt_hash: a number in [0, 2**31) that depends on the request's prompt tokens only, int64 [R].
        state: what ``observe`` last returned for each token, float32 [N]; 0 for a token not observed yet.
        key_norm: sum over layers and KV heads of the L2 norm of the token's key, float32 [N], if needed.
        first_query: position of the first query that the request computed itself, int64 [R]; above 0 after a hit in
            the prefix cache. The queries before it were an earlier request's, and nobody has looked at them.
    """

    xp: Any
    tokens: Any
    counts: Any
    length: Any
    prompt_hash: Any
    state: Any
    key_norm: Any = None
    first_query: Any = None

    def per_token(self, values: Any) -> Any:
        """One value per request, shape [R], repeated for each of its tokens, shape [N]."""
        repeat = getattr(self.xp, "repeat_interleave", None) or self.xp.repeat  # torch and numpy differ in the name
        return repeat(values, self.counts)


@dataclass(frozen=True)
class Observation(PolicyBatch):
    """What attention gave each live token in one decode step, or in a prompt up to where it is reduced.

    In how many forwards a prompt was computed does not show: its queries are summed up before they are shown.

    Attributes:
        mass: attention probability summed over query heads, the observed layers and the observed queries, older
            queries weighted with ``query_decay``, float32 [N]. One query's mass sums to heads x layers. A decode
            query stands for the ``score_interval`` queries since the last one, so its mass comes multiplied by that.
        queries: queries that ``mass`` stands for, int64 [R].
        position: logical position of the last of them, int64 [R]; a later token has no mass from it.
        attended: tokens that it attended, itself included, int64 [R].
        of_prompt: whether these are queries of a prompt rather than of a decode step, bool [R].
    """

    mass: Any = None
    queries: Any = None
    position: Any = None
    attended: Any = None
    of_prompt: Any = None


class Policy(ABC):
    """Decides which tokens matter. Subclasses are frozen dataclasses whose fields are the policy's options."""

    @property
    def needs(self) -> Needs:
        """What the runtime measures for this policy."""
        return Needs()

    def check(self, config: Any) -> None:  # noqa: B027 - most policies suit all settings
        """Refuse settings of the engine (a ``VTokenConfig``) that do not suit: ValueError with one clause."""

    def observe(self, seen: Observation) -> Any:
        """The new ``state`` of every token, float [N], from the old one and a forward's attention."""
        raise NotImplementedError(f"{type(self).__name__} asks for attention and does not say what to make of it")

    @abstractmethod
    def priority(self, batch: PolicyBatch) -> Any:
        """One keep-priority per live token, higher is kept, shape [N]."""
