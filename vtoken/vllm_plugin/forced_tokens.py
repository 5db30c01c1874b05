"""Making a request emit given tokens, so that a text's likelihood can be measured in decode steps.

vLLM scores a given text only as a prompt (``prompt_logprobs``), where eviction has not happened yet; its own replay of
given outputs needs the V2 model runner. This works through its public logits processors, with or without vtoken:

    engine argument     logits_processors=[FORCED_TOKENS_PROCESSOR]
    of a request        SamplingParams(extra_args={"forced_tokens": [...]}, logprobs=0)

With ``logprobs_mode="raw_logprobs"``, vLLM's default, the log-probability of a forced token is the model's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vtoken.vllm_plugin.engine import FORCED_TOKENS


def forced_tokens(extra_args: Mapping[str, Any] | None) -> list[int]:
    """The tokens that a request must emit first, after which it is free; none unless asked for.

    Raises:
        ValueError: one sentence, unless they are a list of token ids.
    """
    tokens = (extra_args or {}).get(FORCED_TOKENS, [])
    well_formed = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
    if not well_formed:
        raise ValueError(f"vtoken: '{FORCED_TOKENS}' = {tokens!r} is refused: it must be a list of token ids.")
    return tokens


class ForcedTokens(AdapterLogitsProcessor):
    """Leaves the next forced token as the only choice; vLLM keeps one ``choose`` per request and row of the batch."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request whose forced tokens are malformed. Raises ValueError."""
        forced_tokens(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling must see it."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """What one request's logits go through, or None for a request that is free."""
        forced = forced_tokens(params.extra_args)
        return _choice(forced) if forced else None


def _choice(forced: Sequence[int]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def choose(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """logits: float [vocab], changed in place."""
        step = len(output_token_ids)
        if step < len(forced):
            logits.fill_(float("-inf"))
            logits[forced[step]] = 0.0
        return logits

    return choose
