"""The runtime's part towards a policy, played on explicit attention matrices: observe, take priorities, evict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vtoken.core.selection import select_victims
from vtoken.policies import Observation, Policy, PolicyBatch

NAMESPACES = {"numpy": np, "torch": torch}
PER_TOKEN = ("tokens", "state", "key_norm", "mass")
PER_REQUEST = ("counts", "length", "prompt_hash", "first_query", "queries", "position", "attended", "of_prompt")
KINDS = dict.fromkeys(("state", "key_norm", "mass"), "float32") | {"of_prompt": "bool"}

Attend = Callable[[int, np.ndarray], np.ndarray]
"""(query, the live tokens that it sees) -> probability per head (of any layer) and token, [heads, tokens]"""


def to(xp: Any, values: Any, kind: str = "int64") -> Any:
    """An array of numpy or torch with one of the contract's dtypes: "int64", "float32" or "bool"."""
    return xp.asarray(np.asarray(values, dtype=kind))


def observation(xp: Any = np, **arrays: Any) -> Observation:
    """An Observation with what the test does not care about filled in: one request, nothing remembered."""
    count = len(arrays["tokens"])
    arrays.setdefault("counts", [count])
    requests = len(arrays["counts"])
    for name in ("state", "key_norm", "mass"):
        arrays.setdefault(name, np.zeros(count))
    arrays.setdefault("length", [max(arrays["tokens"]) + 1])
    arrays.setdefault("position", np.asarray(arrays["length"]) - 1)
    arrays.setdefault("attended", arrays["counts"])
    for name in ("prompt_hash", "queries"):
        arrays.setdefault(name, np.full(requests, 1))
    for name in ("first_query", "of_prompt"):
        arrays.setdefault(name, np.zeros(requests))
    return Observation(xp, **{name: to(xp, value, KINDS.get(name, "int64")) for name, value in arrays.items()})


def request_of(batch: Observation, index: int) -> Observation:
    """One request of a batch, alone."""
    bounds = np.concatenate([[0], np.cumsum(np.asarray(batch.counts))])
    part = slice(int(bounds[index]), int(bounds[index + 1]))
    tokens = {name: getattr(batch, name)[part] for name in PER_TOKEN}
    return replace(batch, **tokens, **{name: getattr(batch, name)[index : index + 1] for name in PER_REQUEST})


@dataclass
class Request:
    """One request under a policy. ``live`` is in the order in which slots would be reused, not in logical order.

    Attributes:
        attend: the model.
        prefix_hit: leading tokens that come from a prefix cache, so that their queries are never seen.
    """

    policy: Policy
    attend: Attend
    xp: Any = np
    sinks: int = 4
    recent: int = 16
    prompt_hash: int = 1
    prefix_hit: int = 0
    live: list[int] = field(default_factory=list)
    length: int = 0
    state: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prefix_hit:
            self.live, self.length = list(range(self.prefix_hit)), self.prefix_hit

    def prefill(self, parts: Sequence[int]) -> None:
        """Compute a prompt, or its next part, in forwards of so many tokens, and let the policy look at its end.

        Query by query if it wants that, else at their sum over all forwards.
        """
        end = self.length + sum(parts)
        needs = self.policy.needs
        for part in parts:
            first = max(self.length, end - needs.prompt_queries)
            self.live += range(self.length, self.length + part)
            self.length += part
            for query in range(first, self.length) if needs.each_query else ():
                self._observe([query], 1, of_prompt=True)
        if needs.prompt_queries and not needs.each_query:
            queries = list(range(max(end - sum(parts), end - needs.prompt_queries), end))
            self._observe(queries, len(queries), of_prompt=True)

    def decode(self, evict_count: int, observe: bool = True, stands_for: int = 1) -> list[int]:
        """One step: one more token, and so many tokens evicted, which are returned."""
        slot = next((i for i, token in enumerate(self.live) if token < 0), len(self.live))
        self.live[slot : slot + 1] = [self.length]
        self.length += 1
        if observe and self.policy.needs.decode_queries:
            self._observe([self.length - 1], stands_for)
        return self.evict(evict_count)

    def evict(self, count: int) -> list[int]:
        """Let the policy choose."""
        if count <= 0:
            return []
        batch = self._batch()
        priority = np.asarray(self.policy.priority(batch))
        tokens, one = np.asarray(batch.tokens), np.ones(1, dtype=np.int64)
        victims = select_victims(
            priority, tokens, one * len(tokens), one * self.length, one * count, self.sinks, self.recent
        ).tolist()
        self.live = [-1 if token in victims else token for token in self.live]
        if count > 1:  # the runtime fills holes after a burst
            self.live = [token for token in self.live if token >= 0]
        return victims

    def _batch(self, **observed: Any) -> Observation:
        tokens = [token for token in self.live if token >= 0]
        return observation(
            self.xp,
            tokens=tokens,
            length=[self.length],
            prompt_hash=[self.prompt_hash],
            first_query=[self.prefix_hit],
            state=[self.state.get(token, 0.0) for token in tokens],
            **observed,
        )

    def _observe(self, queries: list[int], stands_for: int, of_prompt: bool = False) -> None:
        tokens = np.array([token for token in self.live if token >= 0])
        mass = np.zeros(len(tokens), dtype=np.float32)
        for query in queries:
            sees = np.flatnonzero(tokens <= query)
            weight = self.policy.needs.query_decay ** (queries[-1] - query)
            mass[sees] += weight * self.attend(query, tokens[sees]).sum(axis=0).astype(np.float32)
        seen = self._batch(
            mass=mass * (stands_for / len(queries)),
            queries=[stands_for],
            position=[queries[-1]],
            of_prompt=[of_prompt],
            attended=[int((tokens <= queries[-1]).sum())],
        )
        state = np.asarray(self.policy.observe(seen), dtype=np.float32)
        self.state.update(zip(tokens.tolist(), state.tolist(), strict=True))


def random_model(seed: int, heads: int = 6, size: int = 1024, importance: dict[int, float] | None = None) -> Attend:
    """Softmax attention of fixed random logits, with a bonus for some tokens."""
    bonus = np.zeros(size)
    for token, value in (importance or {}).items():
        bonus[token] = value

    def attend(query: int, tokens: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng([seed, query]).normal(size=(heads, size))[:, tokens]
        weights = np.exp(noise + bonus[tokens])
        return weights / weights.sum(axis=1, keepdims=True)

    return attend


def priorities(policy: Policy, batch: PolicyBatch) -> np.ndarray:
    """As numpy, whatever the namespace."""
    return np.asarray(policy.priority(batch))
