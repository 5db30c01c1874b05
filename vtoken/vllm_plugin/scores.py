"""What the policy is told: the attention of observed queries and the norms of keys, token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vtoken.core.observed import AttendedQueries, QueryRuns
from vtoken.core.ragged import Ints, offsets_of, ranges, segment_ids
from vtoken.core.token_scores import Floats, TokenScores, prompt_hash
from vtoken.core.token_table import HOLE, TokenTable
from vtoken.policies import Needs, Observation, Policy, PolicyBatch
from vtoken.vllm_plugin.ranks import Ranks

KeyNorms = Callable[[Ints], Floats]
"""slots [M] -> sum over layers and KV heads of the norm of the key there [M]"""


class Observer(Protocol):
    """Attends where a request has holes, and collects attention mass, while a forward runs."""

    heads: int  # query heads x observed layers: what the mass of one query sums to

    def begin(self, queries: AttendedQueries, block_table: NDArray[np.int32]) -> None:
        """Say what the next forward needs."""

    def take(self) -> Floats:
        """The masses of the forward that has just ended.

        Request after request, and in each request either one row of ``attended`` numbers, the sum over its queries,
        or one such row per query, oldest first, as the policy needs it. Holes have none.
        """


def score_bytes(needs: Needs, lanes: int) -> int:
    """Bytes per slot of the KV cache that scores take: what is kept of each token, and a forward's masses."""
    if not needs.attention:
        return 4 if needs.key_norms else 0
    lines = needs.prompt_queries if needs.each_query else 1
    # state, key norm and what is pending; a mass in float32 and its sum over layers in float64
    return 4 * 3 + (4 + 8) * lanes * max(lines, 1)


Shown = TypeVar("Shown", bound=PolicyBatch)


def _read_only(batch: Shown) -> Shown:
    """A policy that writes into what it is shown would change the runtime's own arrays."""
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return batch


@dataclass(frozen=True)
class _Watched:
    """The requests whose queries a forward observes, shape [R] each; see ``StepCounts`` for the flags."""

    rows: Ints
    decodes: NDArray[np.bool_]
    ends_part: NDArray[np.bool_]
    queries: QueryRuns


class ScoreKeeper:
    """Feeds a policy with what its needs say, and keeps what it makes of it.

    Args:
        table: where the tokens lie.
        policy: whose ``observe`` is called.
        score_interval: decode queries that an observed one stands for.
        observer: for policies that look at attention.
        key_norms: for policies that look at keys.
        ranks: those who measure the other heads.
    """

    def __init__(
        self,
        table: TokenTable,
        policy: Policy,
        score_interval: int = 1,
        observer: Observer | None = None,
        key_norms: KeyNorms | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._table = table
        self._policy = policy
        self._needs = policy.needs
        self._score_interval = score_interval
        self._observer = observer
        self._key_norms = key_norms
        self._ranks = ranks or Ranks()
        self.remembers = self._needs.attention or self._needs.key_norms
        self._scores = TokenScores(table)
        self._watched: _Watched | None = None
        assert observer is not None or not self._needs.attention
        assert key_norms is not None or not self._needs.key_norms

    def start(self, row: int, prompt: Sequence[int] | None, prefix_hit: int = 0) -> None:
        """A request begins in this row of the table; so many of its tokens come from the prefix cache."""
        self._scores.start(row, prompt_hash(prompt), prefix_hit)

    def follow(self, rows: Ints, tokens: Ints) -> None:
        """These tokens have a slot from now on, shape [N] each, whether computed or taken from the prefix cache."""
        self._scores.follow(rows, tokens)

    def watch(
        self,
        rows: Ints,
        decodes: NDArray[np.bool_],
        ends_part: NDArray[np.bool_],
        queries: QueryRuns,
    ) -> None:
        """The next forward's observed queries, of requests in these rows; the flags are those of ``StepCounts``."""
        self._watched = _Watched(rows, decodes, ends_part, queries) if len(rows) else None

    def absorb_keys(self, rows: Ints, tokens: Ints, slots: Ints) -> None:
        """The keys of these tokens lie in their slots now, shape [N] each."""
        if self._needs.key_norms and len(slots):
            assert self._key_norms is not None
            self._scores.key_norm[rows, tokens] = self._ranks.sum(self._key_norms(slots))

    def absorb_attention(self) -> Ints:
        """Let the policy look at the forward that has just ended; rows whose attention is no probability."""
        watched, self._watched = self._watched, None
        if watched is None:
            return np.empty(0, dtype=np.int64)
        assert self._observer is not None
        queries = watched.queries
        mass = self._of_live(watched, self._ranks.sum(self._observer.take()))
        if not self._needs.each_query:
            return self._absorb_sum(watched, mass)
        live = self._table.num_live[watched.rows]
        lines = np.repeat(live, queries.count)
        starts, first_line = offsets_of(lines)[:-1], offsets_of(queries.count)[:-1]
        wrong = []
        for turn in range(int(queries.count.max())):
            some = np.flatnonzero(queries.count > turn)
            later = queries.count[some] - 1 - turn
            line = mass[ranges(starts[first_line[some] + turn], live[some])]
            wrong.append(self._blank_wrong(watched.rows[some], line, np.ones_like(some)))
            self._show(watched.rows[some], line, np.ones_like(some), later, ~watched.decodes[some])
        return np.unique(np.concatenate(wrong))

    def priorities(self, rows: Ints) -> tuple[PolicyBatch, NDArray[np.floating] | Ints]:
        """The live tokens of these requests, and the priority of each.

        Raises:
            ValueError: one sentence, for a policy that does not return one number per token.
        """
        batch = _read_only(self._batch(rows))
        priority = np.asarray(self._policy.priority(batch))
        self._require(priority, len(batch.tokens), "priority")
        return batch, priority

    def _batch(self, rows: Ints) -> PolicyBatch:
        owner, tokens, live = self._live(rows)
        return PolicyBatch(
            np,
            tokens,
            live,
            self._table.length[rows],
            self._scores.prompt_hash[rows],
            *self._remembered(owner, tokens),
            first_query=self._scores.first_query[rows],
        )

    def _absorb_sum(self, watched: "_Watched", mass: Floats) -> Ints:
        """Add a prompt's queries to those before them, and show what is complete."""
        rows, count = watched.rows, watched.queries.count
        wrong = self._blank_wrong(rows, mass, count)
        scores, prompts = self._scores, ~watched.decodes
        if prompts.any():
            owner, tokens, live = self._live(rows)
            of_prompt = np.repeat(prompts, live)
            place = owner[of_prompt], tokens[of_prompt]
            fading = np.repeat(self._needs.query_decay ** count[prompts].astype(np.float64), live[prompts])
            total = scores.pending[place] * fading.astype(np.float32) + mass[of_prompt]
            scores.pending[place] = mass[of_prompt] = total
            count = np.where(prompts, count + scores.pending_queries[rows], count)
            scores.pending_queries[rows[prompts]] = count[prompts]
        whole = watched.decodes | watched.ends_part
        if not whole.all():
            mass = mass[np.repeat(whole, self._table.num_live[rows])]
        rows, prompts, count = rows[whole], prompts[whole], count[whole]
        if len(rows):
            self._show(rows, mass, count, np.zeros_like(count), prompts)
        if prompts.any():
            owner, tokens, _ = self._live(rows[prompts])
            scores.pending[owner, tokens] = 0
            scores.pending_queries[rows[prompts]] = 0
        return wrong

    def _show(self, rows: Ints, mass: Floats, count: Ints, later: Ints, of_prompt: NDArray[np.bool_]) -> None:
        """Let the policy observe ``count`` queries of each request, the last of which has ``later`` tokens after it."""
        owner, tokens, live = self._live(rows)
        stands_for = np.where(of_prompt, 1, self._score_interval)
        length = self._table.length[rows]
        seen = Observation(
            np,
            tokens,
            live,
            length,
            self._scores.prompt_hash[rows],
            *self._remembered(owner, tokens),
            first_query=self._scores.first_query[rows],
            mass=mass if self._score_interval == 1 else mass * np.repeat(stands_for, live).astype(np.float32),
            queries=count * stands_for,
            position=length - 1 - later,
            attended=live - later,
            of_prompt=of_prompt,
        )
        state = np.asarray(self._policy.observe(_read_only(seen)))
        self._require(state, len(tokens), "observe")
        # A token that comes after the query has seen nothing of it, whether or not it is in the same forward.
        self._scores.state[owner, tokens] = np.where(tokens <= np.repeat(seen.position, live), state, seen.state)

    def _require(self, values: NDArray[Any], tokens: int, method: str) -> None:
        """Whatever else a policy returned would end up in the table, or as an error far from its cause."""
        name = type(self._policy).__name__
        if values.shape != (tokens,) or values.dtype.kind not in "fiub":
            raise ValueError(
                f"vtoken: {name}.{method} returned {values.dtype} of shape {list(values.shape)}; return one real "
                f"number per token, shape [{tokens}]."
            )
        if np.isnan(values).any() or (method == "observe" and not np.isfinite(values).all()):
            raise ValueError(
                f"vtoken: {name}.{method} returned NaN or infinity; return numbers that can be compared and kept."
            )

    def _blank_wrong(self, rows: Ints, mass: Floats, count: Ints) -> Ints:
        """Set to zero what is not the mass of ``count`` queries, and return the rows; written so that NaN is wrong."""
        assert self._observer is not None
        live = self._table.num_live[rows]
        sums = np.add.reduceat(mass, offsets_of(live)[:-1], dtype=np.float64)
        decay = self._needs.query_decay
        weights = count if decay == 1 else (1 - decay ** count.astype(np.float64)) / (1 - decay)
        expected = self._observer.heads * self._ranks.size * weights
        wrong = ~(np.abs(sums - expected) <= 1e-3 * expected)
        if wrong.any():
            mass[wrong[segment_ids(live)]] = 0
        return rows[wrong]

    def _live(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """(row, logical id) of every live token, along its request's blocks, and the number per request."""
        table, live = self._table, self._table.num_live[rows]
        if self._dense(rows):  # they come first
            owner = np.repeat(rows, live)
            return owner, table.logical_at[owner, ranges(np.zeros_like(live), live)].astype(np.int64), live
        at = table.logical_at[rows, : int(table.end[rows].max(initial=0))]
        request, position = np.nonzero(at != HOLE)
        return rows[request], at[request, position].astype(np.int64), live

    def _of_live(self, watched: _Watched, mass: Floats) -> Floats:
        """The masses without those of holes."""
        table, queries = self._table, watched.queries
        if self._dense(watched.rows):
            return mass
        lines = queries.count if self._needs.each_query else np.ones_like(queries.count)
        owner, attended = np.repeat(watched.rows, lines), np.repeat(queries.attended, lines)
        positions = ranges(np.zeros_like(attended), attended)
        return mass[table.logical_at[np.repeat(owner, attended), positions] != HOLE]

    def _dense(self, rows: Ints) -> bool:
        """Whether none of these requests can have a hole. One that recycles has them in its read-only blocks alone."""
        return self._table.recycling and not self._table.read_only[rows].any()

    def _remembered(self, owner: Ints, tokens: Ints) -> tuple[Floats, Floats]:
        """State and key norm of each token; zeros for a policy that needs neither."""
        if not self.remembers:
            nothing = np.zeros(len(tokens), dtype=np.float32)
            return nothing, nothing
        return self._scores.state[owner, tokens], self._scores.key_norm[owner, tokens]
