"""TOVA (Oren et al., 2024, arXiv 2401.06104): what the last query looks at."""

from dataclasses import dataclass
from typing import Any

from vtoken.policies.base import Needs, Observation, Policy, PolicyBatch


@dataclass(frozen=True)
class TOVA(Policy):
    """Keep the tokens that the newest query attends most.

        priority(t) = a_q(t), the probability that the last query q gives token t, summed over heads and layers

    The paper averages over the heads of a layer and lets each layer choose; here there is one choice for all layers,
    made from their sum. The paper protects nothing; ``sinks=0, recent=0`` does the same.
    """

    @property
    def needs(self) -> Needs:
        return Needs(prompt_queries=1, decode_queries=True)

    def observe(self, seen: Observation) -> Any:
        return seen.mass

    def priority(self, batch: PolicyBatch) -> Any:
        return batch.state
