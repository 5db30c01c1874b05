"""The contract of an eviction policy: flat arrays of live tokens in, one keep-priority per token out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PolicyBatch:
    """All requests of a step that must forget something, as flat arrays (numpy or torch alike).

    The runtime, not the policy, protects sinks and recent tokens, picks the lowest priorities of each request
    and breaks ties by position.

    Attributes:
        tokens: logical ids of the live tokens, request after request, in any order within one, shape [N].
        offsets: bounds of the requests in ``tokens``, shape [R + 1].
        length: logical length of each request, shape [R].
    """

    tokens: Any
    offsets: Any
    length: Any


class Policy(ABC):
    """Decides which tokens matter. Stateless: a function of a request and its own history, never of the batch."""

    @abstractmethod
    def priority(self, batch: PolicyBatch) -> Any:
        """One keep-priority per live token, higher is kept, shape [N]."""
