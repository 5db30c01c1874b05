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
class AttendedQueries:
    """What a forward needs beside, or instead of, the backend's attention.

    Attributes:
        observed: queries whose attention mass is wanted.
        holed: all queries of the requests that have holes.
        live: which positions of these requests take part, bool [holed requests, P].
        total: queries of the forward, over all requests.
    """

    observed: QueryRuns
    holed: QueryRuns
    live: NDArray[np.bool_]
    total: int

    def __bool__(self) -> bool:
        return len(self.observed.index) > 0 or len(self.holed.index) > 0
