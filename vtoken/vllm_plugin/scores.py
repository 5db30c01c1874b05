"""What the policies are told: the attention of observed queries and the norms of keys, token by token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vtoken.core.observed import AttendedQueries, ObservedRuns
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
        or one such row per query, oldest first, as its ``ObservedRuns`` asks for it. Holes have none.
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


def _part(batch: PolicyBatch, requests: Ints, tokens: Ints) -> PolicyBatch:
    """Some requests of a batch, and the places of their tokens in it."""
    names = ("counts", "length", "prompt_hash", "first_query")
    return replace(
        batch,
        **{name: getattr(batch, name)[tokens] for name in ("tokens", "state", "key_norm")},
        **{name: getattr(batch, name)[requests] for name in names},
    )


@dataclass(frozen=True)
class _Watched:
    """The requests whose queries a forward observes, shape [R] each; see ``StepCounts`` for the flags."""

    rows: Ints
    decodes: NDArray[np.bool_]
    ends_part: NDArray[np.bool_]
    queries: ObservedRuns


@dataclass(frozen=True)
class _Look:
    """What requests with the same policy were given by ``count`` queries each; shape [R], ``mass`` of live tokens."""

    policy: int
    rows: Ints
    decodes: NDArray[np.bool_]
    ends_part: NDArray[np.bool_]
    count: Ints
    mass: Floats


class ScoreKeeper:
    """Feeds policies with what their needs say, and keeps what they make of it.

    Each policy is called once for all of its requests.

    Args:
        table: where the tokens lie.
        policies: those that requests can have.
        score_interval: decode queries that an observed one stands for.
        observer: for policies that look at attention.
        key_norms: for policies that look at keys.
        ranks: those who measure the other heads.
    """

    def __init__(
        self,
        table: TokenTable,
        policies: Sequence[Policy],
        score_interval: int = 1,
        observer: Observer | None = None,
        key_norms: KeyNorms | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._table = table
        self._policies = list(policies)
        self._needs = [policy.needs for policy in policies]
        self._each_query = np.array([needs.each_query for needs in self._needs])
        self._query_decay = np.array([needs.query_decay for needs in self._needs])
        self._wants_norms = np.array([needs.key_norms for needs in self._needs])
        self._score_interval = score_interval
        self._observer = observer
        self._key_norms = key_norms
        self._ranks = ranks or Ranks()
        self.attention = any(needs.attention for needs in self._needs)
        self._measures_keys = bool(self._wants_norms.any())
        self.remembers = self.attention or self._measures_keys
        self._scores = TokenScores(table)
        self._watched: _Watched | None = None
        assert observer is not None or not self.attention
        assert key_norms is not None or not self._measures_keys

    def start(self, row: int, prompt: Sequence[int] | None, prefix_hit: int = 0, policy: int = 0) -> None:
        """A request begins in this row of the table; so many of its tokens come from the prefix cache.

        Args:
            policy: its place among the policies.
        """
        self._scores.start(row, prompt_hash(prompt), prefix_hit, policy)

    def follow(self, rows: Ints, tokens: Ints) -> None:
        """These tokens have a slot from now on, shape [N] each, whether computed or taken from the prefix cache."""
        self._scores.follow(rows, tokens)

    def manner(self, rows: Ints) -> tuple[Any, Any]:
        """How queries of these requests are to be observed: the last two fields of ``ObservedRuns``."""
        if len(self._policies) == 1:
            return self._needs[0].each_query, self._needs[0].query_decay
        policy = self._scores.policy[rows]
        return self._each_query[policy], self._query_decay[policy]

    def watch(
        self,
        rows: Ints,
        decodes: NDArray[np.bool_],
        ends_part: NDArray[np.bool_],
        queries: ObservedRuns,
    ) -> None:
        """The next forward's observed queries, of requests in these rows; the flags are those of ``StepCounts``."""
        self._watched = _Watched(rows, decodes, ends_part, queries) if len(rows) else None

    def absorb_keys(self, rows: Ints, tokens: Ints, slots: Ints) -> None:
        """The keys of these tokens lie in their slots now, shape [N] each."""
        if not self._measures_keys:
            return
        if not self._wants_norms.all():
            wanted = self._wants_norms[self._scores.policy[rows]]
            rows, tokens, slots = rows[wanted], tokens[wanted], slots[wanted]
        if len(slots):
            assert self._key_norms is not None
            self._scores.key_norm[rows, tokens] = self._ranks.sum(self._key_norms(slots))

    def absorb_attention(self) -> Ints:
        """Let the policies look at the forward that has just ended; rows whose attention is no probability."""
        watched, self._watched = self._watched, None
        if watched is None:
            return np.empty(0, dtype=np.int64)
        assert self._observer is not None
        mass = self._of_live(watched, self._ranks.sum(self._observer.take()))
        wrong = []
        for look in self._by_policy(watched, mass):
            absorb = self._absorb_lines if self._needs[look.policy].each_query else self._absorb_sum
            wrong.append(absorb(look))
        return np.unique(np.concatenate(wrong))

    def priorities(self, rows: Ints) -> tuple[PolicyBatch, NDArray[np.floating] | Ints]:
        """The live tokens of these requests, and the priority of each.

        Raises:
            ValueError: one sentence, for a policy that does not return one number per token.
        """
        batch, policy = self._batch(rows), self._scores.policy[rows]
        if (policy == policy[0]).all():
            return batch, self._ask(int(policy[0]), batch)
        priority, starts = np.empty(len(batch.tokens)), offsets_of(batch.counts)[:-1]
        for one in np.unique(policy).tolist():
            some = np.flatnonzero(policy == one)
            place = ranges(starts[some], batch.counts[some])
            priority[place] = self._ask(one, _part(batch, some, place))
        return batch, priority

    # -- inside -----------------------------------------------------------------------------------------------

    def _ask(self, policy: int, batch: PolicyBatch) -> NDArray[np.floating] | Ints:
        priority = np.asarray(self._policies[policy].priority(_read_only(batch)))
        self._require(policy, priority, len(batch.tokens), "priority")
        return priority

    def _by_policy(self, watched: _Watched, mass: Floats) -> Iterator[_Look]:
        policy, count = self._scores.policy[watched.rows], watched.queries.count
        if (policy == policy[0]).all():
            yield _Look(int(policy[0]), watched.rows, watched.decodes, watched.ends_part, count, mass)
            return
        sizes = watched.queries.lines * self._table.num_live[watched.rows]
        starts = offsets_of(sizes)[:-1]
        for one in np.unique(policy).tolist():
            some = np.flatnonzero(policy == one)
            flags = watched.decodes[some], watched.ends_part[some]
            yield _Look(one, watched.rows[some], *flags, count[some], mass[ranges(starts[some], sizes[some])])

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

    def _absorb_lines(self, look: _Look) -> Ints:
        """Show each query alone, the oldest of every request first."""
        live = self._table.num_live[look.rows]
        lines = np.repeat(live, look.count)
        starts, first_line = offsets_of(lines)[:-1], offsets_of(look.count)[:-1]
        wrong = []
        for turn in range(int(look.count.max())):
            some = np.flatnonzero(look.count > turn)
            later = look.count[some] - 1 - turn
            line = look.mass[ranges(starts[first_line[some] + turn], live[some])]
            rows, one = look.rows[some], np.ones_like(some)
            wrong.append(self._blank_wrong(look.policy, rows, line, one))
            self._show(look.policy, rows, line, one, later, ~look.decodes[some])
        return np.concatenate(wrong)

    def _absorb_sum(self, look: _Look) -> Ints:
        """Add a prompt's queries to those before them, and show what is complete."""
        rows, count, mass = look.rows, look.count, look.mass
        wrong = self._blank_wrong(look.policy, rows, mass, count)
        scores, prompts = self._scores, ~look.decodes
        if prompts.any():
            owner, tokens, live = self._live(rows)
            of_prompt = np.repeat(prompts, live)
            place = owner[of_prompt], tokens[of_prompt]
            fading = np.repeat(self._query_decay[look.policy] ** count[prompts].astype(np.float64), live[prompts])
            total = scores.pending[place] * fading.astype(np.float32) + mass[of_prompt]
            scores.pending[place] = mass[of_prompt] = total
            count = np.where(prompts, count + scores.pending_queries[rows], count)
            scores.pending_queries[rows[prompts]] = count[prompts]
        whole = look.decodes | look.ends_part
        if not whole.all():
            mass = mass[np.repeat(whole, self._table.num_live[rows])]
        rows, prompts, count = rows[whole], prompts[whole], count[whole]
        if len(rows):
            self._show(look.policy, rows, mass, count, np.zeros_like(count), prompts)
        if prompts.any():
            owner, tokens, _ = self._live(rows[prompts])
            scores.pending[owner, tokens] = 0
            scores.pending_queries[rows[prompts]] = 0
        return wrong

    def _show(
        self, policy: int, rows: Ints, mass: Floats, count: Ints, later: Ints, of_prompt: NDArray[np.bool_]
    ) -> None:
        """Let a policy observe ``count`` queries of each request, the last of which has ``later`` tokens after it."""
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
        state = np.asarray(self._policies[policy].observe(_read_only(seen)))
        self._require(policy, state, len(tokens), "observe")
        # A token that comes after the query has seen nothing of it, whether or not it is in the same forward.
        self._scores.state[owner, tokens] = np.where(tokens <= np.repeat(seen.position, live), state, seen.state)

    def _require(self, policy: int, values: NDArray[Any], tokens: int, method: str) -> None:
        """Whatever else a policy returned would end up in the table, or as an error far from its cause."""
        name = type(self._policies[policy]).__name__
        if values.shape != (tokens,) or values.dtype.kind not in "fiub":
            raise ValueError(
                f"vtoken: {name}.{method} returned {values.dtype} of shape {list(values.shape)}; return one real "
                f"number per token, shape [{tokens}]."
            )
        if np.isnan(values).any() or (method == "observe" and not np.isfinite(values).all()):
            raise ValueError(
                f"vtoken: {name}.{method} returned NaN or infinity; return numbers that can be compared and kept."
            )

    def _blank_wrong(self, policy: int, rows: Ints, mass: Floats, count: Ints) -> Ints:
        """Set to zero what is not the mass of ``count`` queries, and return the rows; written so that NaN is wrong."""
        assert self._observer is not None
        live = self._table.num_live[rows]
        sums = np.add.reduceat(mass, offsets_of(live)[:-1], dtype=np.float64)
        decay = self._needs[policy].query_decay
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
        lines = queries.lines
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
