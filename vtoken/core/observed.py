"""Which queries of a forward our own kernels attend or look at."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ragged import Ints


@dataclass(frozen=True)
class QueryRuns:
    """The last ``count`` queries of each of these requests, shape [R] each.

    Attributes:
        index: place of the request in the batch, which is its row of the block table.
        first: place of its first such query in the batch's flat arrays.
        count: queries, at least one.
        attended: positions that the last of them attends, holes included; the one before it attends one less.
    """

    index: Ints
    first: Ints
    count: Ints
    attended: Ints


_NOBODY = np.empty(0, dtype=np.int64)
NO_RUNS = QueryRuns(_NOBODY, _NOBODY, _NOBODY, _NOBODY)


@dataclass(frozen=True)
class ObservedRuns(QueryRuns):
    """Those whose attention mass is wanted, each in its own manner: one for all, or one for each run, shape [R].

    Attributes:
        each_query: one row of masses per query of the run, instead of their sum.
        query_decay: weight of a query relative to the one after it, in a sum.
    """

    each_query: NDArray[np.bool_] | bool = False
    query_decay: NDArray[np.float64] | float = 1.0

    @property
    def lines(self) -> Ints:
        """Rows of masses of each run, shape [R]."""
        return np.where(self.each_query, self.count, 1)


@dataclass(frozen=True)
class AttendedQueries:
    """What a forward needs beside, or instead of, the backend's attention.

    Attributes:
        observed: queries whose attention mass is wanted, and how.
        holed: all queries of the requests that have holes.
        live: which positions of these requests take part, bool [holed requests, P].
        total: queries of the forward, over all requests.
        spared: single queries that the backend could attend as well, if with them its kernel need not run at all.
    """

    observed: ObservedRuns
    holed: QueryRuns
    live: NDArray[np.bool_]
    total: int
    spared: QueryRuns = NO_RUNS

    def __bool__(self) -> bool:
        return any(len(runs.index) for runs in (self.observed, self.holed, self.spared))


NO_QUERIES = AttendedQueries(
    ObservedRuns(_NOBODY, _NOBODY, _NOBODY, _NOBODY), NO_RUNS, np.empty((0, 0), dtype=np.bool_), 0
)
"""For a forward that the backend does alone."""
