"""The scheduler's part: state counts with each step, and hand emptied blocks back when its result arrives.

With asynchronous scheduling that is after the next step has been scheduled. Counts are exact all the same; what the
worker alone knows of a request is not, and what depends on it waits for the report.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.ledger import LengthLedger, Outcome
from vtoken.core.phase import Phase
from vtoken.core.reclamation import BlockChange
from vtoken.core.reclamation_manager import ReclamationManager
from vtoken.vllm_plugin.protocol import EngineCounts, StepPlan, StepReport
from vtoken.vllm_plugin.read_only import BlockLists, Decisions, Pool, ReadOnlyBlocks
from vtoken.vllm_plugin.request_settings import RequestSettings


@dataclass
class ReclamationStats:
    """Totals since start-up, over all requests."""

    tokens_evicted: int = 0
    tokens_moved: int = 0
    blocks_reclaimed: int = 0
    requests_failed: int = 0


@dataclass(frozen=True)
class ScheduledStep:
    """What vLLM's scheduler decided for one step; sequences run over the scheduled requests.

    ``hits`` has the requests that start in it, and how many tokens each found in the prefix cache. ``running`` and
    ``waiting`` are how many requests there are, scheduled or not.
    """

    req_ids: list[str]
    new_tokens: Iterable[int]
    logical_length: Iterable[int]
    known_length: Iterable[int]
    hits: Mapping[str, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0


@dataclass
class StepUnderWay:
    """A step whose result is not in yet, and the blocks that depend on it.

    Attributes:
        plan: what the worker was told.
        found: the blocks that requests which start in it found in the prefix cache.
        left: the leading blocks that requests have left with their hashes; others may find them already.
        released: blocks that the worker still reads in this step; the pool's again when its result is in.
        granted: blocks that it may move tokens into.
        taken: blocks that requests have been given to move tokens into.
        lost: requests whose blocks vLLM has taken meanwhile, and which; what the worker did to them is void.
        known_bad: requests that an earlier step's report has ended; that this one refuses them too is no news.
    """

    plan: StepPlan
    found: dict[str, list[Any]]
    left: dict[str, list[Any]]
    released: list[Any]
    granted: list[Any]
    taken: int = 0
    lost: dict[str, list[Any]] = field(default_factory=dict)
    known_bad: set[str] = field(default_factory=set)

    @property
    def number(self) -> int:
        return self.plan.step


class EvictionScheduler:
    """Beside vLLM's scheduler: turns its steps into plans and keeps account of blocks in flight.

    Args:
        config: the engine's settings.
        ledger: counts per request, shared with the KV-cache manager.
        pool_blocks: blocks that requests can hold.
        pool: where blocks come from and go to.
        lists: who holds which.

    Attributes:
        spoilt: requests whose results of the step settled last nobody must see; some may have been preempted since, and
            compute them anew.
        planning, settling: the time that is spent in `plan` and `settle`, which callers measure.
    """

    def __init__(
        self, config: VTokenConfig, ledger: LengthLedger, pool_blocks: int, pool: Pool, lists: BlockLists
    ) -> None:
        self.stats = ReclamationStats()
        self.spoilt: set[str] = set()
        self.planning, self.settling = Phase(), Phase()
        self._requests = RequestSettings(config)
        self._ledger = ledger
        self._pool_blocks = pool_blocks
        self._pool = pool
        self._lists = lists
        self._read_only: ReadOnlyBlocks | None = None
        if config.reclaim == "fill":
            self._read_only = ReadOnlyBlocks(ledger, pool, lists, leave_shared=config.shared_blocks == "smaller")
        self._packing: ReclamationManager | None = None
        if config.reclaim == "pack":
            self._packing = ReclamationManager(config, pool_blocks, ledger.block_size)
        self._step = 0
        self._under_way: deque[StepUnderWay] = deque()
        self._wait_for: int | None = None  # the step whose blocks somebody waits for, instead of preempting
        self._waits = False  # somebody does in the step that is being scheduled

    @property
    def frees_pending(self) -> bool:
        """Blocks will come back from a step under way."""
        return any(step.released or step.granted for step in self._under_way)

    @property
    def settled(self) -> int:
        """Number of the last step whose report has been taken in."""
        return self._under_way[0].number - 1 if self._under_way else self._step

    def waits_for_frees(self) -> bool:
        """Nobody needs to be preempted now, since blocks will come back.

        What is under way when a block is first missing is waited for, and nothing that comes later: with a step always
        under way that could take for ever.
        """
        if not self.frees_pending:
            return False
        if self._wait_for is None:
            self._wait_for = self._step
        self._waits = self.settled < self._wait_for
        return self._waits

    def live_tokens(self) -> int:
        """Tokens with a slot, over all requests."""
        return self._ledger.live_tokens()

    def admit(self, req_id: str, prompt_length: int, max_tokens: int, extra_args: Mapping[str, Any] | None) -> None:
        """Fix the limits of a request on arrival.

        Raises:
            ValueError: one sentence, for bad settings or for a request that the pool could never hold.
        """
        terms = self._requests.terms(extra_args)
        budget = terms.budget(prompt_length)
        self._ledger.open(req_id, prompt_length, budget, prompt_length + max_tokens, terms.cadence, terms.policy)
        peak = self._ledger.most_blocks(req_id, prompt_length + max_tokens - 1)  # the last token is never computed
        if peak > self._pool_blocks:
            self._ledger.close(req_id)
            kept = f"with a budget of {budget} tokens" if budget else "without compression"
            remedy = "ask for fewer tokens"
            if self._ledger.dense:
                remedy = "give it a smaller 'vtoken.budget'" if budget else f"{remedy}, let it be compressed,"
            raise ValueError(
                f"vtoken: request {req_id} {kept} needs up to {peak} blocks, and the pool has {self._pool_blocks}; "
                f"{remedy} or make the pool larger."
            )

    def clamp(self, req_id: str, computed: int, new_tokens: int) -> int:
        """Cut a chunk of a prompt so that it ends where the prompt has to be reduced; 0 to leave a request out once."""
        if self._under_way and self._read_only is not None and self._read_only.waits(req_id, self.settled):
            return 0
        return self._ledger.clamp(req_id, computed, new_tokens)

    def admit_unreduced(self, req_id: str, prompt_length: int) -> None:
        """Register a request that will be refused: it needs a row, and no budget."""
        self._ledger.open(req_id, prompt_length, 0, prompt_length)

    def outcome(self, req_id: str) -> Outcome:
        """What became of a request that is about to be forgotten."""
        return self._ledger.outcome(req_id)

    def forget(self, req_id: str) -> None:
        """The request is over."""
        self._ledger.close(req_id)

    def lose(self, req_id: str) -> None:
        """vLLM has taken the request's blocks: it is over, or preempted."""
        for step in self._under_way:
            step.lost.setdefault(req_id, list(self._lists.blocks_of(req_id)))
        if self._read_only is not None:
            self._read_only.forget(req_id)

    def longest_hit(self, req_id: str, tokens: int) -> int:
        """The most tokens of a prefill of this many that the request may take from the prefix cache: whole blocks."""
        return self._ledger.longest_hit(req_id, tokens) // self._ledger.block_size * self._ledger.block_size

    def reserve(self, wanted: int) -> int:
        """Blocks that an admission which wants so many must leave free."""
        if self._packing is None:
            return 0
        return self._packing.reserve(wanted, self._ledger.held_blocks(), self._pool.get_num_free_blocks())

    def plan(self, scheduled: ScheduledStep) -> StepPlan:
        """State what each request computes and forgets in this step, and cut its block list to what it keeps."""
        logical_length = np.fromiter(scheduled.logical_length, dtype=np.int64)
        policies = self._ledger.other_policies(scheduled.hits)
        step, settled = self._step + 1, self.settled
        found = {
            req_id: self._lists.blocks_of(req_id)[: hit // self._ledger.block_size]
            for req_id, hit in scheduled.hits.items()
        }
        counts = self._ledger.schedule(
            scheduled.req_ids,
            np.fromiter(scheduled.new_tokens, dtype=np.int64),
            logical_length,
            np.fromiter(scheduled.known_length, dtype=np.int64),
            step,
            settled,
        )
        decided = Decisions()
        if self._read_only is not None:
            decided = self._read_only.decide(scheduled.req_ids, counts, logical_length, step)
        released = decided.released
        for index in np.flatnonzero(counts.keep_blocks < counts.num_blocks).tolist():
            released += self._lists.truncate(scheduled.req_ids[index], int(counts.keep_blocks[index]))
        granted = self._grant() if scheduled.req_ids else []
        plan = StepPlan(
            step,
            scheduled.req_ids,
            counts,
            [block.block_id for block in granted],
            decided.read_only,
            decided.copy_out,
            policies,
            settled,
            self._engine_counts(scheduled),
        )
        self._step = step
        self._under_way.append(
            StepUnderWay(plan, found, decided.left, released, granted + decided.granted, decided.taken)
        )
        if not self._waits:
            self._wait_for = None
        self._waits = False
        return plan

    def _engine_counts(self, scheduled: ScheduledStep) -> EngineCounts:
        return EngineCounts(
            self._pool_blocks,
            self._pool.get_num_free_blocks(),
            scheduled.running,
            scheduled.waiting,
            self.stats.blocks_reclaimed,
            self.stats.requests_failed,
            self.planning.seconds,
            self.settling.seconds,
        )

    def _grant(self) -> list[Any]:
        if self._packing is None:
            return []
        free = self._pool.get_num_free_blocks()
        wanted = self._packing.grant(self._ledger.live_tokens(), self._ledger.held_blocks(), free)
        return self._pool.get_new_blocks(wanted) if wanted else []

    def settle(self, plan: StepPlan, report: StepReport | None) -> dict[str, str]:
        """Free the blocks of a finished step; return the requests that must end, with the reason.

        Raises:
            RuntimeError: a step's report is missing, late or doubled, so that no count can be trusted.
        """
        if not self._under_way:
            raise RuntimeError(f"vtoken: a result of step {plan.step} arrived when no step was under way")
        step = self._under_way[0]
        if step.number != plan.step or (report is not None and report.step != step.number):
            reported = report.step if report is not None else None
            raise RuntimeError(f"vtoken: step {step.number} was settled with plan {plan.step} and report {reported}")
        if report is None and plan.req_ids:
            raise RuntimeError(f"vtoken: the worker's report for step {step.number} is missing")
        self._under_way.popleft()
        self.spoilt = set()
        if report is None:
            return {}
        freed = step.released + self._change_lists(step, report.changes)
        returned = report.returned
        if step.lost:
            returned = {req_id: positions for req_id, positions in returned.items() if req_id not in step.lost}
        self._ledger.follow(returned)
        if self._packing is not None and plan.granted:
            self._packing.settle(report.packed)
        self._give_back(freed, len(step.granted) + step.taken)
        self.stats.tokens_evicted += report.evicted
        self.stats.tokens_moved += report.moved
        if not report.errors:
            return {}
        errors = {req_id: sentence for req_id, sentence in report.errors.items() if req_id not in step.lost}
        misled = self._never_written(step, report.errors, freed)
        self.spoilt = report.errors.keys() | misled.keys()
        return errors | {req_id: sentence for req_id, sentence in misled.items() if req_id in self._ledger}

    def let_go(self) -> None:
        """Everybody is about to lose all blocks: those of steps under way go back at once.

        Steps are executed in order, so whoever takes one of these blocks writes into it after that.
        """
        for step in self._under_way:
            self._give_back(step.released + step.granted, len(step.granted))
            step.released, step.granted = [], []

    def _give_back(self, blocks: list[Any], taken: int) -> None:
        """These go back to the pool, ``taken`` of which (or others) had been taken out of it for their sake."""
        if not blocks and not taken:
            return
        free_blocks = self._pool.get_num_free_blocks()
        self._pool.free_blocks(blocks[::-1])
        gained = self._pool.get_num_free_blocks() - free_blocks  # not all of them, where others hold some as well
        self.stats.blocks_reclaimed += gained - taken
        if self._read_only is not None and gained < len(blocks):
            self._read_only.references_changed()

    def _never_written(self, step: StepUnderWay, errors: Mapping[str, str], freed: list[Any]) -> dict[str, str]:
        """What a refused request was to compute in this step has been registered, and is not there.

        Nobody may find it, and whoever has found it already, in this step or in one under way, has read what is not
        there. Blocks that have left their requests may be among them: better to lose some that are right.
        """
        misled: dict[str, str] = {}
        steps = [step, *self._under_way]
        left = {block.block_id for one in self._under_way for block in one.released}
        left |= {block.block_id for block in freed}
        refused = [req_id for req_id in errors if req_id in step.plan.req_ids and req_id not in step.known_bad]
        while refused:
            req_id = refused.pop()
            first = next(one for one in steps if req_id in one.plan.req_ids)
            index, counts = first.plan.req_ids.index(req_id), first.plan.counts
            if counts.epoch[index]:
                continue  # it registers nothing any more
            full = int(counts.length[index]) // self._ledger.block_size
            held = first.lost.get(req_id) or self._lists.blocks_of(req_id)
            absent = {block.block_id for block in held[full:] + first.left.get(req_id, [])[full:]}
            self._pool.evict_blocks(left | absent)
            for other, found in ((other, found) for one in steps for other, found in one.found.items()):
                if other in errors or other in misled or not absent & {block.block_id for block in found}:
                    continue
                misled[other] = f"vtoken: request {other} began with tokens that request {req_id} did not compute."
                refused.append(other)
        for later in self._under_way:
            later.known_bad |= errors.keys() | misled.keys()
        return misled

    def _change_lists(self, step: StepUnderWay, changes: Mapping[str, BlockChange]) -> list[Any]:
        """Follow what the worker did to the requests' blocks; what nobody holds any more, grants included."""
        granted = {block.block_id: block for block in step.granted}
        freed: list[Any] = []
        for req_id, change in changes.items():
            if req_id not in step.lost:
                if not granted.keys() >= set(change.adopted):
                    stray = sorted(set(change.adopted) - granted.keys())
                    raise RuntimeError(f"vtoken: the worker gave request {req_id} blocks {stray}, which nobody granted")
                adopted = [granted.pop(block_id) for block_id in change.adopted]
                freed += self._lists.exchange(req_id, change, adopted)
        freed += granted.values()
        return freed
