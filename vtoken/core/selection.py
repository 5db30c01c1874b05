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
    sinks: int,
    recent: int,
) -> Ints:
    """The logical ids to evict, request by request, shape [sum(counts)].

    Args:
        priority: per live token of every request, higher is kept, shape [N].
        tokens: logical id per live token, in any order within a request, shape [N].
        live: live tokens per request, shape [R]; the segments of the arrays above.
        length: logical length per request, shape [R].
        counts: how many tokens each request must forget, shape [R].
        sinks, recent: leading and newest tokens that are never taken.

    Raises:
        ValueError: a request has fewer unprotected tokens than it must forget.
    """
    owner = segment_ids(live)
    keep = np.asarray(priority, dtype=np.float64).copy()
    keep[(tokens < sinks) | (tokens >= length[owner] - recent)] = np.inf
    if len(counts) and (counts == 1).all():
        return _lowest_of_each(keep, tokens, live, owner)
    order = np.lexsort((tokens, keep, owner))
    taken = order[ranges(offsets_of(live)[:-1], counts)]
    if (owner[taken] != segment_ids(counts)).any() or np.isinf(keep[taken]).any():
        raise ValueError("a request must forget more tokens than it has unprotected ones")
    return tokens[taken]


def _lowest_of_each(keep: NDArray[np.float64], tokens: Ints, live: Ints, owner: Ints) -> Ints:
    """One victim per request, in linear time: the steady state of decoding."""
    starts = offsets_of(live)[:-1]
    lowest = np.minimum.reduceat(keep, starts)
    if np.isinf(lowest).any():
        raise ValueError("a request must forget more tokens than it has unprotected ones")
    candidates = np.where(keep == lowest[owner], tokens, np.iinfo(np.int64).max)
    return np.minimum.reduceat(candidates, starts)
