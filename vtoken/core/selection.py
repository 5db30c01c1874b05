"""From keep-priorities to victims: protect, take the lowest k of each request, break ties by position."""

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ragged import Ints, offsets_of, ranges, segment_ids


def select_victims(
    priority: NDArray[np.floating] | Ints,
    tokens: Ints,
    live: Ints,
    length: Ints,
    counts: Ints,
    sinks: Ints | int,
    recent: Ints | int,
) -> Ints:
    """The logical ids to evict, request by request, shape [sum(counts)].

    Args:
        priority: per live token of every request, higher is kept, shape [N].
        tokens: logical id per live token, in any order within a request, shape [N].
        live: live tokens per request, shape [R]; the segments of the arrays above.
        length: logical length per request, shape [R].
        counts: how many tokens each request must forget, shape [R].
        sinks: leading tokens that are never taken, one number or one per request.
        recent: newest tokens that are never taken, one number or one per request.

    Raises:
        ValueError: a request has fewer unprotected tokens than it must forget, or a priority is not a number.
    """
    owner = segment_ids(live)
    keep = np.asarray(priority, dtype=np.float64)
    if np.isnan(keep).any():
        raise ValueError("a policy must give every token a priority, NaN is none")
    protected = (tokens < np.broadcast_to(sinks, live.shape)[owner]) | (tokens >= (length - recent)[owner])
    if (np.bincount(owner, weights=~protected, minlength=len(live)) < counts).any():
        raise ValueError("a request must forget more tokens than it has unprotected ones")
    if len(counts) and (counts == 1).all():
        return _lowest_of_each(keep, tokens, protected, live, owner)
    order = np.lexsort((tokens, keep, protected, owner))
    return tokens[order[ranges(offsets_of(live)[:-1], counts)]]


def _lowest_of_each(
    keep: NDArray[np.float64], tokens: Ints, protected: NDArray[np.bool_], live: Ints, owner: Ints
) -> Ints:
    """One victim per request, in linear time: the steady state of decoding."""
    starts = offsets_of(live)[:-1]
    keep = np.where(protected, np.inf, keep)
    lowest = np.minimum.reduceat(keep, starts)
    candidates = np.where((keep == lowest[owner]) & ~protected, tokens, np.iinfo(np.int64).max)
    return np.minimum.reduceat(candidates, starts)
