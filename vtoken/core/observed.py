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
    """

    observed: ObservedRuns
    holed: QueryRuns
    live: NDArray[np.bool_]
    total: int

    def __bool__(self) -> bool:
        return len(self.observed.index) > 0 or len(self.holed.index) > 0
