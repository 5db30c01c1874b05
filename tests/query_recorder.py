"""In the place of the attention observer: what a forward is told about holes, and made-up attention."""

from collections.abc import Callable

import numpy as np
from reference_cache import S

from vtoken.core.observed import AttendedQueries


class QueryRecorder:
    """Keeps what the forward is told, and answers for the observed queries.

    The mass that a query gives a token is a function of their two positions in the sequence, so a policy chooses the
    same victims wherever the tokens lie, and whatever else is in the batch. A token that is not live has none, and
    the masses of each query sum to ``heads``.

    Args:
        token_at: the token that lies in each of these slots, once the forward has written.
    """

    heads = 3
    queries: AttendedQueries
    block_table: np.ndarray

    def __init__(self, token_at: Callable[[np.ndarray], np.ndarray]) -> None:
        self._token_at = token_at

    def begin(self, queries: AttendedQueries, block_table: np.ndarray) -> None:
        self.queries, self.block_table = queries, block_table

    def live(self, index: int, length: int) -> np.ndarray:
        """Which positions of the request at this place of the batch take part in the forward."""
        for n in np.flatnonzero(self.queries.holed.index == index):
            return self.queries.live[n, :length]
        return np.ones(length, dtype=np.bool_)

    def take(self) -> np.ndarray:
        """As ``Observer`` has it: one row per request, or one per query."""
        observed = self.queries.observed
        each_query = np.broadcast_to(observed.each_query, len(observed.index))
        decay = np.broadcast_to(observed.query_decay, len(observed.index))
        rows: list[np.ndarray] = [np.zeros(0)]
        for n, index in enumerate(observed.index.tolist()):
            attended, count = int(observed.attended[n]), int(observed.count[n])
            masses = self._masses(index, attended, count)
            weights = decay[n] ** np.arange(count - 1, -1, -1.0)
            rows.append(masses.ravel() if each_query[n] else weights @ masses)
        return np.concatenate(rows).astype(np.float32)

    def _masses(self, index: int, attended: int, count: int) -> np.ndarray:
        """Of the last ``count`` queries of a request, shape [count, attended]."""
        blocks = self.block_table[index, : -(-attended // S)].astype(np.int64)
        tokens = self._token_at((blocks[:, None] * S + np.arange(S)).ravel()[:attended]).astype(np.int64)
        live = self.live(index, attended)
        newest = int(tokens[live].max())
        queries = np.arange(newest - count + 1, newest + 1)[:, None]
        weights = 1.0 + (tokens * 7919 + queries * 104729 + tokens * queries * 31) % 1013
        weights *= live & (tokens <= queries)
        return self.heads * weights / weights.sum(axis=1, keepdims=True)
