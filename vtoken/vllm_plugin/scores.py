"""What the policy is told: the attention of observed queries and the norms of keys, token by token."""

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vtoken.core.observed import ObservedQueries
from vtoken.core.ragged import Ints, offsets_of, ranges, segment_ids
from vtoken.core.token_scores import Floats, TokenScores
from vtoken.core.token_table import TokenTable
from vtoken.policies import Observation, Policy, PolicyBatch

KeyNorms = Callable[[Ints], Floats]
"""slots [M] -> sum over layers and KV heads of the norm of the key there [M]"""


class Observer(Protocol):
    """Collects attention mass while a forward runs."""

    heads: int  # query heads x observed layers: what the mass of one query sums to

    def begin(self, queries: ObservedQueries | None, block_table: NDArray[np.int32]) -> None:
        """Say what the next forward is to observe; None for nothing."""

    def take(self) -> Floats:
        """The masses of the forward that has just ended.

        Request after request, and in each request either one row of ``attended`` numbers, the sum over its queries,
        or one such row per query, oldest first, as the policy needs it.
        """


class ScoreKeeper:
    """Feeds a policy with what its needs say, and keeps what it makes of it.

    Args:
        table: where the tokens lie.
        policy: whose ``observe`` and ``priority`` are called.
        observer: for policies that look at attention.
        key_norms: for policies that look at keys.
    """

    def __init__(
        self, table: TokenTable, policy: Policy, observer: Observer | None = None, key_norms: KeyNorms | None = None
    ) -> None:
        self._table = table
        self._policy = policy
        self._needs = policy.needs
        self._observer = observer
        self._key_norms = key_norms
        self._scores = TokenScores(table)
        self._rows = np.empty(0, dtype=np.int64)
        self._stands_for = np.empty(0, dtype=np.int64)
        self._queries: ObservedQueries | None = None
        assert observer is not None or not self._needs.attention
        assert key_norms is not None or not self._needs.key_norms

    def start(self, row: int, prompt: Sequence[int] | None) -> None:
        """A request begins in this row of the table, with an empty cache."""
        tokens = np.asarray(prompt if prompt is not None else (), dtype=np.int64)
        self._scores.start(row, zlib.crc32(tokens.tobytes()) & (2**31 - 1))

    def follow(self, rows: Ints, tokens: Ints) -> None:
        """New tokens have a slot, shape [N] each."""
        self._scores.follow(rows, tokens)

    def watch(self, rows: Ints, stands_for: Ints, queries: ObservedQueries, block_table: NDArray[np.int32]) -> None:
        """The next forward's observed queries, of requests in these rows; each stands for so many queries."""
        if self._observer is None:
            return
        self._rows, self._stands_for = rows, stands_for
        self._queries = queries if len(rows) else None
        self._observer.begin(self._queries, block_table)

    def absorb_keys(self, rows: Ints, tokens: Ints, slots: Ints) -> None:
        """The forward has written these tokens' keys, shape [N] each."""
        if self._key_norms is not None and len(slots):
            self._scores.key_norm[rows, tokens] = self._key_norms(slots)

    def absorb_attention(self) -> Ints:
        """Let the policy look at the forward that has just ended; rows whose attention is no probability."""
        if self._queries is None:
            return np.empty(0, dtype=np.int64)
        assert self._observer is not None
        queries, mass = self._queries, self._observer.take()
        self._queries = None
        if not self._needs.each_query:
            return self._absorb(np.arange(len(self._rows)), queries.count, queries.attended, mass)
        lines = np.repeat(queries.attended, queries.count)
        starts, first_line = offsets_of(lines)[:-1], offsets_of(queries.count)[:-1]
        wrong = []
        for turn in range(int(queries.count.max())):
            some = np.flatnonzero(queries.count > turn)
            widths = queries.attended[some]
            line = ranges(starts[first_line[some] + turn], widths)
            seen_by_it = queries.attended[some] - (queries.count[some] - 1 - turn)
            wrong.append(self._absorb(some, np.ones_like(some), seen_by_it, mass[line]))
        return np.unique(np.concatenate(wrong))

    def batch(self, rows: Ints) -> PolicyBatch:
        """The live tokens of requests that have no holes, as a policy is shown them."""
        owner, tokens, live = self._live(rows)
        return PolicyBatch(
            np,
            tokens,
            live,
            self._table.length[rows],
            self._scores.prompt_hash[rows],
            self._scores.state[owner, tokens],
            self._scores.key_norm[owner, tokens],
        )

    def _absorb(self, some: Ints, count: Ints, attended: Ints, mass: Floats) -> Ints:
        """``some`` are indices into the watched requests; the other arrays run over them and their tokens."""
        assert self._observer is not None and self._queries is None
        rows, stands_for = self._rows[some], self._stands_for[some]
        owner, tokens, live = self._live(rows)
        wrong = self._wrong(mass, live, count)
        if wrong.any():
            mass = np.where(wrong[segment_ids(live)], np.float32(0), mass)
        seen = Observation(
            np,
            tokens,
            live,
            self._table.length[rows],
            self._scores.prompt_hash[rows],
            self._scores.state[owner, tokens],
            self._scores.key_norm[owner, tokens],
            mass=mass * np.repeat(stands_for, live).astype(np.float32),
            queries=count * stands_for,
            position=self._table.length[rows] - 1 - (live - attended),
            attended=attended,
        )
        self._scores.state[owner, tokens] = self._policy.observe(seen)
        return rows[wrong]

    def _wrong(self, mass: Floats, live: Ints, count: Ints) -> NDArray[np.bool_]:
        """Whether a request's mass is not what ``count`` queries must sum to; written so that NaN is wrong."""
        assert self._observer is not None
        sums = np.add.reduceat(mass, offsets_of(live)[:-1], dtype=np.float64)
        decay = self._needs.query_decay
        weights = count if decay == 1 else (1 - decay ** count.astype(np.float64)) / (1 - decay)
        expected = self._observer.heads * weights
        return ~(np.abs(sums - expected) <= 1e-3 * expected)

    def _live(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """(row, logical id) of every live token and the number per request; without holes they come first."""
        live = self._table.num_live[rows]
        owner = np.repeat(rows, live)
        return owner, self._table.logical_at[owner, ranges(np.zeros_like(live), live)].astype(np.int64), live
