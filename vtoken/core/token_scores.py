"""What is remembered of each token beside its slot: one number of the policy's own, and the norm of its key."""

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ragged import Ints
from vtoken.core.token_table import TokenTable

Floats = NDArray[np.float32]


class TokenScores:
    """Two numbers per logical token and one per request, in the rows of a token table.

    Indexed by logical id, so that neither an eviction nor a relocation has to touch them.

    Attributes:
        state: what the policy made of the token's attention so far, float32 [rows, tokens].
        key_norm: norm of its key, float32 [rows, tokens].
        prompt_hash: depends on the tokens of the request's prompt alone, int64 [rows].
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self.state = np.zeros((0, 0), dtype=np.float32)
        self.key_norm = np.zeros((0, 0), dtype=np.float32)
        self.prompt_hash = np.zeros(0, dtype=np.int64)

    def follow(self, rows: Ints, tokens: Ints) -> None:
        """New tokens have been registered, shape [N] each: they start with nothing, in a table that may have grown."""
        rows_needed, columns_needed = self._table.logical_at.shape
        if self.state.shape != (rows_needed, columns_needed):
            self.state, self.key_norm = (_grown(a, rows_needed, columns_needed) for a in (self.state, self.key_norm))
        self.state[rows, tokens] = 0
        self.key_norm[rows, tokens] = 0

    def start(self, row: int, prompt_hash: int) -> None:
        """A request has taken this row."""
        if row >= len(self.prompt_hash):
            self.prompt_hash = np.resize(self.prompt_hash, max(2 * len(self.prompt_hash), row + 1))
        self.prompt_hash[row] = prompt_hash


def _grown(array: Floats, rows: int, columns: int) -> Floats:
    larger = np.zeros((rows, columns), dtype=np.float32)
    larger[: array.shape[0], : array.shape[1]] = array
    return larger
