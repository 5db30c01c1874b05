"""Which queries of a forward are observed."""

from dataclasses import dataclass

from vtoken.core.ragged import Ints


@dataclass(frozen=True)
class ObservedQueries:
    """The last ``count`` queries of each of these requests, shape [R] each.

    Attributes:
        index: place of the request in the batch, which is its row of the block table.
        first: place of its first observed query in the batch's flat arrays.
        count: observed queries, at least one.
        attended: positions that the last of them attends; the one before it attends one less, and so on.
        whole: the forward computes no query beside these.
    """

    index: Ints
    first: Ints
    count: Ints
    attended: Ints
    whole: bool
