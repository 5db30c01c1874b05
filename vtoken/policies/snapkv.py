"""SnapKV (Li et al., NeurIPS 2024, arXiv 2404.14469): what the end of the prompt looks at, with its neighbours."""

from dataclasses import dataclass
from typing import Any, Literal

from vtoken.policies.base import Needs, Observation, Policy, PolicyBatch


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep the tokens that the last ``observation_window`` queries attend, pooled over neighbouring tokens.

    With a_q(t) the probability that query q gives token t, summed over heads and layers, and w the window:

        prompt       state(t) =  pool over the kernel_size tokens around t of (sum over the last w queries q of a_q)
        each decode  state(t) <- (1 - 1/w) * state(t) + a_q(t)
        priority(t)           =  state(t)

    As in the paper the window's own tokens neither are pooled nor give to their neighbours, and they are kept: by
    ``recent``, which must therefore be at least as long. Beyond the ends of a request the pooling sees zeros.
    Differences: the paper keeps everything generated, while here the budget holds, so the window slides on, fading
    out instead of ending sharply; one choice for all layers and heads, made from their sum, instead of one per head.

    Pooling needs the tokens in logical order, which costs a sort. So it is done once, as the prompt is observed, and
    decode steps stay linear. Where a prompt is reduced in chunks, each chunk's end is a window, and the older fade.

    Attributes:
        kernel_size: tokens that are pooled, an odd number; 1 to leave it out.
        pooling: "avg", the default of the paper's code and what kvpress does, or "max".
        observation_window: the engine's option of that name.
    """

    kernel_size: int = 5
    pooling: Literal["avg", "max"] = "avg"
    observation_window: int = 32

    def __post_init__(self) -> None:
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError("kernel_size must be odd and at least 1")

    def check(self, config: Any) -> None:
        if config.recent < self.observation_window:
            raise ValueError(
                f"option 'recent' = {config.recent} is refused by snapkv: raise it to observation_window = "
                f"{self.observation_window} or lower that, since the window's own tokens must stay"
            )

    @property
    def needs(self) -> Needs:
        return Needs(prompt_queries=self.observation_window, decode_queries=True)

    def observe(self, seen: Observation) -> Any:
        fading = (1 - 1 / self.observation_window) ** seen.queries
        mass = self._pooled(seen) if seen.of_prompt.any() else seen.mass
        return seen.per_token(fading) * seen.state + mass

    def priority(self, batch: PolicyBatch) -> Any:
        return batch.state

    def _pooled(self, seen: Observation) -> Any:
        """The mass that is added, shape [N]: pooled where it comes from a prompt."""
        xp = seen.xp
        before_window = seen.tokens <= seen.per_token(seen.position - self.observation_window)
        request = seen.per_token(xp.cumsum(xp.ones_like(seen.counts), 0) - 1)
        order = xp.argsort(request * 2**31 + seen.tokens)
        single = xp.where(before_window, seen.mass, 0)[order]
        pooled = single + 0
        combine = xp.add if self.pooling == "avg" else xp.maximum
        for shift in range(1, min(self.kernel_size // 2 + 1, len(single))):
            neighbours = request[shift:] == request[:-shift]
            pooled[shift:] = combine(pooled[shift:], neighbours * single[:-shift])
            pooled[:-shift] = combine(pooled[:-shift], neighbours * single[shift:])
        result = xp.empty_like(pooled)
        result[order] = pooled / (self.kernel_size if self.pooling == "avg" else 1)
        return xp.where(before_window & seen.per_token(seen.of_prompt), result, seen.mass)
