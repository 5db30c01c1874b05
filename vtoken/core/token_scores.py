"""What is remembered of each token beside its slot."""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ragged import Ints
from vtoken.core.token_table import TokenTable

Floats = NDArray[np.float32]


def prompt_hash(prompt: Sequence[int] | None) -> int:
    """A number in [0, 2**31) that depends on the tokens of a prompt alone."""
    tokens = np.asarray(prompt if prompt is not None else (), dtype=np.int64)
    return zlib.crc32(tokens.tobytes()) & (2**31 - 1)


class TokenScores:
    """Three numbers per logical token and four per request, in the rows of a token table.

    Indexed by logical id, so that neither an eviction nor a relocation has to touch them.

    Attributes:
        state: what the policy made of the token's attention so far, float32 [rows, tokens].
        key_norm: norm of its key, float32 [rows, tokens].
        pending: attention of a prompt's queries that the policy has not been shown yet, float32 [rows, tokens].
        pending_queries: how many these are, int64 [rows].
        prompt_hash: depends on the tokens of the request's prompt alone, int64 [rows].
        first_query: position of the first query that the request computed itself, int64 [rows].
        policy: place of the request's policy among those on offer, int64 [rows].
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self.state = np.zeros((0, 0), dtype=np.float32)
        self.key_norm = np.zeros((0, 0), dtype=np.float32)
        self.pending = np.zeros((0, 0), dtype=np.float32)
        self.pending_queries = np.zeros(0, dtype=np.int64)
        self.prompt_hash = np.zeros(0, dtype=np.int64)
        self.first_query = np.zeros(0, dtype=np.int64)
        self.policy = np.zeros(0, dtype=np.int64)

    def start(self, row: int, prompt_hash: int, first_query: int, policy: int = 0) -> None:
        """A request has taken this row."""
        rows = self._table.logical_at.shape[0]
        if len(self.prompt_hash) != rows:
            for name in ("pending_queries", "prompt_hash", "first_query", "policy"):
                setattr(self, name, np.resize(getattr(self, name), rows))
        self.pending_queries[row] = 0
        self.prompt_hash[row] = prompt_hash
        self.first_query[row] = first_query
        self.policy[row] = policy

    def follow(self, rows: Ints, tokens: Ints) -> None:
        """New tokens have been registered, shape [N] each: they start with nothing, in a table that may have grown."""
        self._grow()
        for array in (self.state, self.key_norm, self.pending):
            array[rows, tokens] = 0

    def _grow(self) -> None:
        shape = self._table.logical_at.shape
        if self.state.shape == shape:
            return
        for name in ("state", "key_norm", "pending"):
            setattr(self, name, _grown(getattr(self, name), shape))


def _grown(array: Floats, shape: tuple[int, ...]) -> Floats:
    larger = np.zeros(shape, dtype=np.float32)
    larger[: array.shape[0], : array.shape[1]] = array
    return larger
