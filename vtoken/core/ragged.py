"""Flat arrays with offsets: how a batch of sequences of different length is held without a Python loop."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def offsets_of(counts: Ints) -> Ints:
    """Counts of R segments, shape [R], to their bounds in the flat array, shape [R + 1]."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def segment_ids(counts: Ints) -> Ints:
    """[2, 3] -> [0, 0, 1, 1, 1]."""
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def ranges(starts: Ints, counts: Ints) -> Ints:
    """The concatenation of start, start + 1, ... for every segment: [5, 0], [2, 3] -> [5, 6, 0, 1, 2]."""
    total = int(counts.sum())
    if total == len(counts) == np.count_nonzero(counts):  # one each, as in a decode step
        return starts.astype(np.int64)
    return np.arange(total, dtype=np.int64) + np.repeat(starts - offsets_of(counts)[:-1], counts)
