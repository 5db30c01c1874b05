"""One worker's part: which tokens die, where the survivors lie, and where the next token is written."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger

from vtoken.config import VTokenConfig
from vtoken.core.observed import NO_QUERIES
from vtoken.core.ragged import Ints, ranges
from vtoken.core.reclamation import (
    CopyOut,
    Due,
    FillReclamation,
    NaiveReclamation,
    PackReclamation,
    Reclamation,
)
from vtoken.core.selection import select_victims
from vtoken.core.token_table import TokenTable
from vtoken.core.trace import Trace, TraceRecorder
from vtoken.kernels.copy_engine import CopyEngine, CopyFailed
from vtoken.policies import load_policies
from vtoken.vllm_plugin.attended import attended_queries
from vtoken.vllm_plugin.monitor import Monitor
from vtoken.vllm_plugin.protocol import StepPlan, StepReport
from vtoken.vllm_plugin.ranks import Ranks
from vtoken.vllm_plugin.scores import KeyNorms, Observer, ScoreKeeper
from vtoken.vllm_plugin.verification import Digests, Verifier

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class Start:
    """How a request begins: its prompt, how many leading tokens of it are in the cache already, and its policy."""

    prompt: Sequence[int] | None
    hit: int = 0
    policy: int = 0


@dataclass(frozen=True)
class Placement:
    """Where the tokens of a forward go, if not where vLLM would put them.

    ``index`` [R] are the requests' places in the batch, ``length`` [R] the positions that attention reads, the new
    tokens' included, for those requests that passed the step's checks. ``tokens`` and ``slots`` [N] are the new tokens'
    places in the batch's flat arrays and their slots; tokens of the other requests go to vLLM's null block, which
    nobody reads.
    """

    index: Ints
    length: Ints
    tokens: Ints
    slots: Ints


class EvictionWorker:
    """Token table, policies and relocation of one worker, driven by one plan per step.

    Args:
        config: the engine's settings.
        block_size: slots per block.
        copies: copies K/V between slots, in all layers.
        observer: attends queries of requests with holes, and measures attention, if there can be either.
        key_norms: measures keys, for policies that look at them.
        ranks: the other workers of the same model.
        digests: reads the cache for ``verify``.
        bytes_per_token: K and V of one token, in all layers.

    Attributes:
        monitor: what the worker tells whoever watches.
    """

    def __init__(
        self,
        config: VTokenConfig,
        block_size: int,
        copies: CopyEngine,
        observer: Observer | None = None,
        key_norms: KeyNorms | None = None,
        ranks: Ranks | None = None,
        digests: Digests | None = None,
        bytes_per_token: int = 0,
    ) -> None:
        self.table = TokenTable(block_size, recycling=config.reclaim == "fill")
        self.monitor = Monitor(self.table, bytes_per_token, config.history, config.summary())
        self._config = config
        policies = list(load_policies(config).values())
        self._scores = ScoreKeeper(self.table, policies, config.score_interval, observer, key_norms, ranks)
        self._ranks = ranks or Ranks()
        self._observer = observer
        self._reclamation = _reclamation(config, self.table)
        self._copies = copies
        self._verifier = Verifier(self.table, digests) if digests is not None else None
        self._faults: dict[str, str] = {}
        self._traces = TraceRecorder() if config.record_trace else None
        self._plan: StepPlan | None = None
        self._report: StepReport | None = None
        self._healthy = np.empty(0, dtype=np.int64)
        self._rows = np.empty(0, dtype=np.int64)
        self._new_tokens = (self._rows, self._rows, self._rows)
        self._hits: dict[str, int] = {}
        self._interrupted = self._broken = False
        self._unsettled: deque[tuple[int, dict[str, int]]] = deque()

    @property
    def copies(self) -> CopyEngine:
        """What copies."""
        return self._copies

    def use_copies(self, copies: CopyEngine) -> None:
        """Copy with this engine from now on. Between two steps, when everything launched is complete."""
        self._copies = copies

    def wait_for_copies(self) -> None:
        """Nothing may touch the cache in a step, not even to clear a block, before the last one's copies are done."""
        try:
            self._copies.wait()
        except CopyFailed as failure:
            self._distrust(failure)
        if self._verifier is not None:
            self._faults = self._verifier.faults() | self._faults

    def begin_step(self, plan: StepPlan, ended: Iterable[str], started: Mapping[str, Start]) -> None:
        """Take up a plan. ``ended`` requests lost their cache; ``started`` ones begin with what the prefix cache has.

        An id may be in both: a request was preempted and resumed at once, or the id was used again.
        """
        # An exception leaves this set. On the answering rank it ends the engine; of one elsewhere vLLM tells nobody.
        self._broken |= self._interrupted
        self._interrupted = True
        while self._unsettled and self._unsettled[0][0] <= plan.settled:
            self._unsettled.popleft()
        ended = sorted(ended)  # rows that become free are given out again in this order, the same on all ranks
        for _, growth in self._unsettled:  # a new life begins with what the scheduler knows
            for req_id in (*ended, *started):
                growth.pop(req_id, None)
        for req_id in ended:
            self.table.drop_request(req_id)
            self._faults.pop(req_id, None)
        for req_id, start in started.items():
            self.table.drop_request(req_id)
            row = self.table.add_request(req_id, start.hit)
            self._scores.start(row, start.prompt, start.hit, start.policy)
            if self._traces is not None:
                self._traces.begin(req_id, start.hit)
        self._hits = {req_id: start.hit for req_id, start in started.items() if start.hit}
        self._plan, self._report = plan, StepReport(plan.step, errors=dict(self._faults))
        self._interrupted = False

    def place_tokens(
        self, index: Ints, batch_blocks: NDArray[np.int32], batch_num_blocks: Ints, starts: Ints
    ) -> Placement | None:
        """Register the step's tokens and say where they are written; None if that is where vLLM puts them all.

        Args:
            index: place in the batch of each request of the plan, shape [R].
            batch_blocks: the batch's block table, shape [batch, width].
            batch_num_blocks: valid entries per row of it, shape [batch].
            starts: first place of each request of the batch in its flat token arrays, shape [batch].
        """
        assert self._plan is not None
        self._interrupted = True
        plan, counts = self._plan, self._plan.counts
        self._rows = rows = self.table.find_rows(plan.req_ids)
        num_blocks = batch_num_blocks[index].astype(np.int64)
        wrong = self._check(rows, num_blocks)
        if self._ranks.size > 1:
            wrong = self._heed_other_ranks()
        ok, failed = np.flatnonzero(~wrong), index[wrong]
        self._healthy, rows, index = ok, rows[ok], index[ok]
        new_tokens = counts.new_tokens[ok]
        slots = self.table.sync_new_tokens(rows, batch_blocks, num_blocks[ok], new_tokens, index)
        length = self.table.end[rows]
        if self._scores.remembers:
            owner, logical = np.repeat(rows, new_tokens), ranges(self.table.length[rows] - new_tokens, new_tokens)
            self._new_tokens = self._with_hits(owner, logical, slots)
            self._scores.follow(*self._new_tokens[:2])
        reduced = self.table.epoch[rows] > 0
        as_stock = not len(failed) and not reduced.any()
        if self._observer is not None:
            if as_stock and not counts.observes:
                self._observer.begin(NO_QUERIES, batch_blocks)
            else:
                self._attend(index, starts, batch_blocks, reduced)
        if as_stock:
            return None
        tokens = ranges(starts[index], new_tokens)
        if len(failed):
            stray = ranges(starts[failed], counts.new_tokens[wrong])
            tokens, slots = np.concatenate([tokens, stray]), np.concatenate([slots, np.zeros_like(stray)])
        return Placement(index, length, tokens, slots)

    def evict(self) -> dict[str, list[int]]:
        """After the forward: choose victims, reclaim blocks, order the copies that this takes.

        Returns:
            the blocks of every request whose blocks have changed.
        """
        assert self._plan is not None and self._report is not None
        healthy, plan, counts = self._healthy, self._plan, self._plan.counts
        self._scores.absorb_keys(*self._new_tokens)
        for row in self._scores.absorb_attention().tolist():
            self._refuse_attention(row)
        dying = victims = np.empty(0, dtype=np.int64)
        if counts.evicts:
            dying = healthy[counts.evict[healthy] > 0]
            victims = self._choose_victims(dying) if len(dying) else victims
            self.table.evict_tokens(np.repeat(self._rows[dying], counts.evict[dying]), victims)
            self._report.evicted += len(victims)
        due = dying
        if plan.read_only:
            leaving = np.array([req_id in plan.read_only for req_id in plan.req_ids])
            due = healthy[(counts.evict[healthy] > 0) | leaving[healthy]]
        changed = self._reclaim(due) if len(due) or plan.granted else {}
        if self._traces is not None:
            self._traces.note(plan.req_ids, counts, healthy, dying, victims)
        self._interrupted = False
        return changed

    def take_report(self) -> StepReport:
        """The report of the step under way; the next step needs a new plan."""
        assert self._plan is not None and self._report is not None
        plan, report, self._report, self._plan = self._plan, self._report, None, None
        self.monitor.note(plan, report)
        return report

    def take_traces(self) -> dict[str, Trace]:
        """Traces of all requests recorded so far. Those of requests that are over are forgotten here."""
        return self._traces.take(set(self.table.req_ids)) if self._traces is not None else {}

    # -- inside -----------------------------------------------------------------------------------------------

    def _check(self, rows: Ints, num_blocks: Ints) -> NDArray[np.bool_]:
        """Compare (tokens, epoch, blocks) with the plan; which requests differ, shape [R].

        What has become of blocks in steps that were not settled when the plan was made is not in it yet.
        """
        assert self._plan is not None and self._report is not None
        plan, counts, table = self._plan, self._plan.counts, self.table
        live, epoch = table.num_live[rows], table.epoch[rows]  # of somebody else, where there is no row
        planned = counts.num_blocks + self._unsettled_growth(plan.req_ids)
        wrong = (rows < 0) | (live != counts.length) | (epoch != counts.epoch) | (num_blocks != planned)
        damaged = np.array([req_id in self._faults for req_id in plan.req_ids]) if self._faults else wrong
        for i in np.flatnonzero(wrong).tolist():
            tokens, evictions = (live[i], epoch[i]) if rows[i] >= 0 else (0, 0)
            self._report.errors.setdefault(
                plan.req_ids[i],
                f"vtoken: request {plan.req_ids[i]} was scheduled with {counts.length[i]} tokens, "
                f"{planned[i]} blocks and epoch {counts.epoch[i]}, but the worker holds "
                f"{tokens} tokens, {num_blocks[i]} blocks and epoch {evictions}.",
            )
        return wrong | damaged

    def _heed_other_ranks(self) -> NDArray[np.bool_]:
        """Refuse on every rank what one of them refuses or, with ``verify``, holds differently, shape [R].

        From here on the ranks treat the same requests alike, and so enter the same collectives.

        Raises:
            RuntimeError: an exception has interrupted a rank in an earlier step.
        """
        assert self._plan is not None and self._report is not None
        errors = self._report.errors
        held = self._verifier.marks() if self._verifier is not None else {}
        mine = crc32(repr((self._broken, sorted(errors), held)).encode(), crc32(self.table.end.tobytes()))
        if self._ranks.differ(np.array([mine])).any():
            said = self._ranks.gather((self._broken, errors, held or self._ends()))
            broken = [rank for rank, (is_broken, _, _) in enumerate(said) if is_broken]
            if broken:
                raise RuntimeError(
                    f"vtoken: rank {broken[0]} of the model failed in the step before, and its K/V can no longer be "
                    "trusted; look into its log."
                )
            for _, theirs, _ in said:
                for req_id, sentence in theirs.items():
                    errors.setdefault(req_id, sentence)
            for req_id in {req_id: None for *_, theirs in said for req_id in theirs}:
                if len({theirs.get(req_id) for *_, theirs in said}) > 1:
                    errors.setdefault(
                        req_id,
                        f"vtoken: the ranks of the model do not agree about request {req_id}: its live tokens, their "
                        "slots or its epoch differ.",
                    )
        return np.array([req_id in errors for req_id in self._plan.req_ids], dtype=np.bool_)

    def _ends(self) -> dict[str, int]:
        """How many physical positions each request takes: what the shape of its scores depends on."""
        names = list(self.table.req_ids)
        return dict(zip(names, self.table.end[self.table.rows(names)].tolist(), strict=True))

    def _unsettled_growth(self, req_ids: Sequence[str]) -> Ints:
        """By how many blocks each request has grown that the scheduler does not know of, less those it lost; [R]."""
        total = np.zeros(len(req_ids), dtype=np.int64)
        place = {req_id: i for i, req_id in enumerate(req_ids)} if any(g for _, g in self._unsettled) else {}
        for _, growth in self._unsettled:
            for req_id in growth.keys() & place.keys():
                total[place[req_id]] += growth[req_id]
        return total

    def _with_hits(self, rows: Ints, tokens: Ints, slots: Ints) -> tuple[Ints, Ints, Ints]:
        """The new tokens of a step, and those that requests which begin with it found in the cache."""
        hits = {req_id: hit for req_id, hit in self._hits.items() if req_id in self.table}
        if not hits:
            return rows, tokens, slots
        count = np.array(list(hits.values()))
        owner, found = np.repeat(self.table.rows(hits), count), ranges(np.zeros_like(count), count)
        return (
            np.concatenate([owner, rows]),
            np.concatenate([found, tokens]),
            np.concatenate([self.table.slots(owner, found), slots]),
        )

    def _attend(self, index: Ints, starts: Ints, batch_blocks: NDArray[np.int32], reduced: NDArray[np.bool_]) -> None:
        """Tell our kernels what to attend and observe; ``index`` and ``reduced`` are of the healthy requests."""
        assert self._plan is not None and self._observer is not None
        counts, ok = self._plan.counts, self._healthy
        rows = self._rows[ok]
        queries, seen = attended_queries(self.table, counts, ok, rows, index, starts, reduced, self._scores.manner)
        self._observer.begin(queries, batch_blocks)
        here = ok[seen]
        self._scores.watch(rows[seen], counts.decodes[here], counts.ends_part[here], queries.observed)

    def _refuse_attention(self, row: int) -> None:
        assert self._plan is not None and self._report is not None
        req_id = self._plan.req_ids[int(np.flatnonzero(self._rows == row)[0])]
        self._report.errors[req_id] = (
            f"vtoken: the attention of request {req_id} does not sum to one per head and layer, so the model's "
            "numbers are not finite; use a dtype with a larger range."
        )

    def _choose_victims(self, dying: Ints) -> Ints:
        """Logical ids to evict, request by request, in the order of ``dying`` (indices into the plan)."""
        assert self._plan is not None
        counts = self._plan.counts
        batch, priority = self._scores.priorities(self._rows[dying])
        victims = select_victims(
            priority,
            batch.tokens,
            batch.counts,
            batch.length,
            counts.evict[dying],
            counts.head[dying],
            counts.protect[dying],
        )
        return self._ranks.agree(victims)

    def _reclaim(self, due: Ints) -> dict[str, list[int]]:
        """Get blocks back from these requests of the plan, indices into it, and whoever else can be packed."""
        assert self._plan is not None and self._report is not None
        plan, counts, report, table = self._plan, self._plan.counts, self._report, self.table
        if self._verifier is not None:
            self._verifier.note()
        copy_outs = {}
        for index in due.tolist() if plan.read_only else ():
            req_id, row = plan.req_ids[index], int(self._rows[index])
            if req_id in plan.read_only:
                table.keep_read_only(row, plan.read_only[req_id])
                copy_outs[row] = plan.copy_out.get(req_id, CopyOut(plan.read_only[req_id], []))
        failed, by_report = table.find_rows(report.errors), counts.by_report[due]
        # The scheduler may schedule the next forward before it hears of this one's victims, and counts on that much.
        unheard = -(-(table.end[self._rows[due]] + counts.next_tokens[due]) // table.block_size)
        reclaimed = self._reclamation.reclaim(
            Due(
                self._rows[due],
                counts.evict[due],
                counts.next_tokens[due],
                plan.granted,
                failed[failed >= 0],
                copy_outs,
                np.where(by_report, unheard, counts.keep_blocks[due]),
                self._rows[due[by_report]],
            )
        )
        if self._verifier is not None:
            self._verifier.capture()
        self._copy(reclaimed.sources, reclaimed.destinations)
        report.moved, report.packed = reclaimed.moved, reclaimed.packed
        name_of = dict(zip(reclaimed.rows.tolist(), table.req_ids_of(reclaimed.rows), strict=True))
        report.changes = {name_of[row]: change for row, change in reclaimed.changes.items()}
        if report.changes:
            growth = {name: len(change.adopted) - len(change.freed) for name, change in report.changes.items()}
            self._unsettled.append((plan.step, growth))
        reported = table.req_ids_of(reclaimed.reported)
        report.returned = dict(zip(reported, reclaimed.returned.tolist(), strict=True))
        return {name: table.block_ids(name) for name in name_of.values()}

    def _copy(self, sources: Ints, destinations: Ints) -> None:
        try:
            self._copies.launch(sources, destinations)
        except CopyFailed as failure:
            self._distrust(failure)

    def _distrust(self, failure: CopyFailed) -> None:
        """Requests of which tokens have not arrived end with the next report, whether that step computes them or not.

        Not with this one: up to here they were computed from what is right, and one that is over by then has lost
        nothing. Nobody else is harmed by a copy that fails: no block is written into by relocation that more than one
        request holds, and a block that a failed request gives back is read by nobody before it is written anew.
        """
        logger.error("vtoken: a copy of tokens to other slots failed.", exc_info=failure)
        blocks = failure.destinations // self.table.block_size
        for req_id in self.table.req_ids:
            if np.isin(self.table.block_ids(req_id), blocks).any():
                self._faults.setdefault(
                    req_id,
                    f"vtoken: the K/V of request {req_id} can no longer be trusted, since a copy of its tokens to "
                    f"other slots failed ({failure.__cause__!r}).",
                )


def _reclamation(config: VTokenConfig, table: TokenTable) -> Reclamation:
    if config.reclaim == "pack":
        return PackReclamation(table, config.pack_blocks)
    return NaiveReclamation(table) if config.reclaim == "none" else FillReclamation(table)
