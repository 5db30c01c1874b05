"""How many tokens a request keeps, and when the surplus goes. Which tokens is the policy's business."""

import math

import numpy as np
from numpy.typing import NDArray

from vtoken.config import VTokenConfig, check_budget_floor
from vtoken.core.cadence import Cadence
from vtoken.core.ragged import Ints


def resolve_budget(config: VTokenConfig, num_prompt_tokens: int) -> int:
    """The budget in tokens of a request with these settings, fixed at its first admission.

    A share is taken of the original prompt and rounded up; it is never below what must be protected anyway.

    Raises:
        ValueError: one clause, for a count of tokens that such a prompt's protected tokens exceed.
    """
    if isinstance(config.budget, int):
        check_budget_floor(config.budget, config, num_prompt_tokens)
        return config.budget
    # A product such as 0.1 * 30 may end up a rounding error above the integer that was meant.
    return max(math.ceil(round(config.budget * num_prompt_tokens, 9)), config.protected_with(num_prompt_tokens))


def cadence_of(
    config: VTokenConfig, prompt_queries: int = 0, decode_queries: bool = False, own_queries: int = 1
) -> Cadence:
    """The rhythm that the settings ask for, with the queries that a policy wants observed."""
    return Cadence(
        interval=config.interval,
        chunk=config.prefill_chunk if config.prefill_evict == "chunked" else 0,
        head=config.head,
        protect_prompt=config.protect_prompt,
        recent=config.recent,
        grace=config.grace,
        prompt_queries=prompt_queries,
        decode_queries=decode_queries,
        score_interval=config.score_interval,
        own_queries=own_queries,
    )


def longest_request(config: VTokenConfig, max_length: int) -> int:
    """The most slots that a request of this length, which asks for nothing, ever takes."""
    if config.reclaim != "fill" or config.compress == "asked":  # a budget bounds what is attended, not the holes
        return max_length
    if isinstance(config.budget, int):
        budget = config.budget  # of prompts that need more to be protected none is taken
    else:
        budget = resolve_budget(config, max_length)
    return max_length if budget >= max_length else cadence_of(config).peak_length(max_length, budget)


def eviction_counts(
    length: Ints,
    logical_length: Ints,
    prompt_length: Ints,
    budget: Ints,
    ends_prefill: NDArray[np.bool_],
    decodes: NDArray[np.bool_],
    interval: int,
) -> Ints:
    """Tokens that each request must forget after this forward, shape [R].

    A request is looked at when its prefill ends and whenever it has then produced a multiple of ``interval``
    tokens; it is reduced to ``budget - interval``, so that the next ``interval`` forwards attend at most
    ``budget`` tokens. A context that cannot outgrow the budget before the next look is left alone.

    Args:
        length: tokens in the cache after this forward.
        logical_length: tokens of the sequence after this forward, evicted ones included.
        prompt_length: tokens of the original prompt.
        budget: tokens; 0 for a request that is never reduced.
        ends_prefill: this forward ends the prefill, or a part of it after which the prompt is reduced.
        decodes: this forward is a decode step.
        interval: tokens between two looks.
    """
    surplus = length - (budget - interval)
    outgrown = (budget > 0) & (surplus > 0)
    if not outgrown.any():
        return np.zeros_like(surplus)
    due = ends_prefill | (decodes & ((logical_length - prompt_length) % interval == 0))
    return np.where(due & outgrown, surplus, 0)
