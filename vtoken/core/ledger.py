"""What the scheduler knows of each request: how many tokens and blocks, never which.

The budget fixes how many tokens die. `fill` always keeps a request's first blocks, so there the length and the blocks
after a step are known when the step is scheduled, and no report from the worker is needed to free a block. Where new
tokens are appended, and behind read-only blocks that a request keeps, that depends on which tokens died: the worker
reports it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.core.budget import eviction_counts
from vtoken.core.cadence import OWN, Cadence
from vtoken.core.ragged import Ints
from vtoken.core.row_index import RowIndex

_OF_A_LIFE = ("length", "returned", "blocks", "read_only", "epoch", "peak_blocks", "evicted", "by_report", "awaits")
_COLUMNS = (*_OF_A_LIFE, "prefilling", "prefill_end", "budget", "prompt_length", "policy", "most_held")


@dataclass(frozen=True)
class StepCounts:
    """One step, per scheduled request, shape [R] each.

    ``length`` and ``epoch`` are those before the forward, ``num_blocks`` the blocks at the forward; ``evict``
    tokens die after it, none of them among the first ``head`` or the newest ``protect``; ``keep_blocks`` blocks stay
    (all of them, where it is for the worker to say which), and the forward after that computes ``next_tokens`` tokens
    that may recycle holes. The queries of the new tokens from ``observe_from`` on are observed; ``decodes`` says that
    the forward is a decode step, ``ends_part`` that it is the last one before a prompt is reduced.
    What those ``by_report`` hold afterwards only the worker can say; of the ``late`` ones it has yet to say what they
    held before, so that ``num_blocks`` may be too many.
    """

    new_tokens: Ints
    length: Ints
    epoch: Ints
    num_blocks: Ints
    evict: Ints
    keep_blocks: Ints
    next_tokens: Ints
    head: Ints
    protect: Ints
    observe_from: Ints
    decodes: NDArray[np.bool_]
    ends_part: NDArray[np.bool_]
    by_report: NDArray[np.bool_]
    late: NDArray[np.bool_]

    @property
    def evicts(self) -> bool:
        """Somebody is reduced after the forward."""
        return bool(self.evict.any())

    @property
    def observes(self) -> bool:
        """Some query of the forward is observed."""
        return bool((self.observe_from < self.new_tokens).any())


@dataclass(frozen=True)
class Outcome:
    """What became of a request: ``evicted`` tokens in the life that ended, ``most_held`` blocks in any forward."""

    evicted: int
    most_held: int


class LengthLedger:
    """(tokens, blocks, epoch) per request, with the limits that were fixed at its first admission.

    Args:
        block_size: slots per block.
        cadence: when requests are reduced and observed, unless they come with a cadence of their own.
        dense: requests have no holes at a forward; if not, new tokens are appended.
    """

    def __init__(self, block_size: int, cadence: Cadence, *, dense: bool = True, requests: int = 64) -> None:
        self.block_size = block_size
        self.cadence = cadence
        self.dense = dense
        self.length = np.zeros(requests, dtype=np.int64)
        self.returned = np.zeros(requests, dtype=np.int64)
        self.prefilling = np.zeros(requests, dtype=np.bool_)
        self.prefill_end = np.zeros(requests, dtype=np.int64)
        self.blocks = np.zeros(requests, dtype=np.int64)
        self.read_only = np.zeros(requests, dtype=np.int64)
        self.epoch = np.zeros(requests, dtype=np.int64)
        self.budget = np.zeros(requests, dtype=np.int64)
        self.prompt_length = np.zeros(requests, dtype=np.int64)
        self.peak_blocks = np.zeros(requests, dtype=np.int64)
        self.policy = np.zeros(requests, dtype=np.int64)
        self.evicted = np.zeros(requests, dtype=np.int64)
        self.most_held = np.zeros(requests, dtype=np.int64)
        self.by_report = np.zeros(requests, dtype=np.bool_)
        self.awaits = np.zeros(requests, dtype=np.int64)
        self._own = {name: np.full(requests, getattr(cadence, name)) for name in OWN}
        self._differing: set[int] = set()  # rows whose cadence is not the engine's
        self._row_of = RowIndex(requests)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._row_of

    def open(
        self,
        req_id: str,
        prompt_length: int,
        budget: int,
        final_length: int,
        cadence: Cadence | None = None,
        policy: int = 0,
    ) -> None:
        """Register a request with its limits, in tokens; ``budget`` 0 means that it is never reduced.

        A request whose ``final_length`` (prompt and all outputs) is within the budget is treated as such.

        Args:
            cadence: its own, which differs from the engine's in ``OWN`` alone.
            policy: its place among those on offer.
        """
        if self._row_of.full:
            self._grow()
        row = self._row_of.take(req_id)
        self.budget[row] = budget if 0 < budget < final_length else 0
        self.prompt_length[row] = prompt_length
        self.policy[row], self.most_held[row] = policy, 0
        cadence = cadence or self.cadence
        for name, column in self._own.items():
            column[row] = getattr(cadence, name)
        if cadence != self.cadence:
            self._differing.add(row)
        self.reset(req_id)

    def reset(self, req_id: str) -> None:
        """The request lost its cache (preemption) and keeps its limits."""
        row = self._row_of[req_id]
        for name in _OF_A_LIFE:
            getattr(self, name)[row] = 0
        self.prefilling[row] = True

    def close(self, req_id: str) -> None:
        """Forget a request; unknown ids are ignored, since a request may end before it is admitted."""
        if req_id in self._row_of:
            self.reset(req_id)
            row = self._row_of.give_back(req_id)
            self._differing.discard(row)
            self.policy[row] = 0

    def outcome(self, req_id: str) -> Outcome:
        """What became of a request so far; to be asked before its blocks are taken."""
        if req_id not in self._row_of:
            return Outcome(0, 0)
        row = self._row_of[req_id]
        return Outcome(int(self.evicted[row]), int(self.most_held[row]))

    def other_policies(self, req_ids: Collection[str]) -> dict[str, int]:
        """Who of these has not the engine's policy, and which of those on offer instead."""
        if not req_ids:
            return {}
        policies = self.policy[self._row_of.rows(req_ids)].tolist()
        return {req_id: policy for req_id, policy in zip(req_ids, policies, strict=True) if policy}

    def live_tokens(self) -> int:
        """Tokens with a slot, over all requests; finished and waiting ones have none."""
        return int(self.length.sum())

    def held_blocks(self) -> int:
        """Blocks that requests hold, over all of them."""
        return int(self.blocks.sum())

    def returned_positions(self, req_id: str) -> int:
        """By how much the slots that the request's tokens take, holes included, are fewer than its tokens."""
        return int(self.returned.item(self._row_of[req_id]))

    def is_whole(self, req_id: str) -> bool:
        """No token of the request has been evicted since it lies in the cache."""
        return self.epoch.item(self._row_of[req_id]) == 0

    def longest_hit(self, req_id: str, tokens: int) -> int:
        """The most tokens of a prefill of this many that the request may take from the prefix cache."""
        row = self._row_of[req_id]
        budget = int(self.budget[row])
        return self._cadence_of(row).longest_hit(tokens, budget) if budget else tokens

    def hold_blocks(self, req_id: str, blocks: int) -> None:
        """The request now holds this many blocks."""
        self.blocks[self._row_of[req_id]] = blocks

    def read_only_blocks(self, req_ids: Sequence[str]) -> Ints:
        """Leading blocks that each request keeps as they are, shape [R]."""
        return self.read_only[self._row_of.rows(req_ids)]

    def keep_read_only(self, req_id: str, blocks: int) -> None:
        """Of the blocks that the request holds, the first so many stay as they are, beside what it may grow to."""
        row = self._row_of[req_id]
        self.read_only[row] = blocks
        own = int(self.budget[row])
        if self.prefilling[row]:  # parts of the prompt are still to come
            own = self.cadence.peak_length(int(self.prefill_end[row]), own)
        self.peak_blocks[row] = blocks + self._blocks_for(own)

    def follow(self, returned: Mapping[str, int]) -> None:
        """By how much these requests' positions are fewer than the tokens of their sequences."""
        if returned:
            self.returned[self._row_of.rows(returned)] = list(returned.values())

    def await_report(self, req_id: str, step: int) -> None:
        """Only the report of this step will say what the request holds after it."""
        self.awaits[self._row_of[req_id]] = step

    def is_prefilled_blindly(self, req_id: str, settled: int) -> bool:
        """More of the prompt would be computed before it is known what an earlier part of it has left behind."""
        row = self._row_of[req_id]
        return bool(self.by_report[row] and self.prefilling[row] and self.awaits[row] > settled)

    def expect_prefill(self, req_id: str, tokens: int, shared: int = 0) -> int:
        """The request is about to have a prefill of this many tokens before it can be reduced.

        Args:
            shared: leading blocks of it that others hold already.

        Returns:
            the most blocks that it will ever hold; 0 if nobody can know, for want of a budget or because of holes.
        """
        row = self._row_of[req_id]
        budget = int(self.budget[row])
        if budget and self.dense:
            peak = self.cadence.peak_length(tokens, budget)
            in_parts = int(self.cadence.next_reduction(1, tokens, budget)) < tokens
            beside_shared = shared + self._blocks_for(peak if in_parts else budget) if shared else 0
            self.peak_blocks[row] = max(self._blocks_for(peak), beside_shared)
        return int(self.peak_blocks[row])

    def most_blocks(self, req_id: str, final_length: int) -> int:
        """The most blocks that the request can hold in its life, preempted or not."""
        budget = int(self.budget[self._row_of[req_id]])
        bounded = budget and self.dense
        return self._blocks_for(self.cadence.peak_length(final_length, budget) if bounded else final_length)

    def clamp(self, req_id: str, computed: int, new_tokens: int) -> int:
        """Cut a forward of a request so that it ends, at the latest, where its prompt has to be reduced."""
        if not self.cadence.chunk or not self.budget[self._row_of[req_id]]:
            return new_tokens
        return min(new_tokens, self.cadence.chunk - computed % self.cadence.chunk)

    def committed_growth(self) -> int:
        """Blocks that admitted requests with a budget will still take before they are full-grown.

        A request without an effective budget is not counted: vLLM admits it on its own terms.
        """
        return int(np.where(self.blocks > 0, np.maximum(self.peak_blocks - self.blocks, 0), 0).sum())

    def schedule(
        self,
        req_ids: list[str],
        new_tokens: Ints,
        logical_length: Ints,
        known_length: Ints,
        step: int = 0,
        settled: int = 0,
    ) -> StepCounts:
        """Advance every scheduled request past this step; shapes [R].

        Args:
            new_tokens: tokens that the step computes.
            logical_length: tokens of the sequence after the step, evicted ones included.
            known_length: tokens of the sequence that were known before it; while a request is being prefilled, all
                that it has to compute before it decodes.
            step, settled: number of this step, and of the last one whose report is in.
        """
        rows = self._row_of.rows(req_ids)
        cadence = self._cadence_of(rows) if self._differing else self.cadence
        epoch = self.epoch[rows]
        # Whoever is whole may have begun with tokens from the prefix cache, which no step computed.
        length = np.where(epoch == 0, logical_length - new_tokens, self.length[rows])
        attended = length + new_tokens
        num_blocks = self._blocks_for(logical_length - self.returned[rows])
        by_report, late = self.by_report[rows], self.awaits[rows] > settled
        if by_report.any():
            # While a report is late, positions are taken for more than they are, and so may be the blocks they need.
            num_blocks = np.where(by_report, np.maximum(num_blocks, self.blocks[rows]), num_blocks)
        decodes, budget = ~self.prefilling[rows], self.budget[rows]
        ends_prefill = ends_part = np.zeros_like(decodes)
        prefill_end = self.prefill_end[rows]
        some_prefill = not decodes.all()
        if some_prefill:
            prefill_end = self.prefill_end[rows] = np.where(decodes, prefill_end, known_length)
            ends_prefill = ~decodes & (logical_length >= known_length)
            ends_part = ~decodes & (logical_length == cadence.next_reduction(logical_length, prefill_end, budget))
        prompt_length = self.prompt_length[rows]
        evict = eviction_counts(attended, logical_length, prompt_length, budget, ends_part, decodes, cadence.interval)
        next_tokens, keep_blocks = np.zeros_like(evict), num_blocks.copy()
        head = protect = np.zeros_like(evict)
        reduced = evict > 0
        if reduced.any():
            # A forward that decodes computes one token: its slot is kept, so that steady decoding allocates nothing.
            next_tokens = (reduced & (decodes | ends_prefill)).astype(np.int64)
            if self.dense:
                # Without read-only blocks the counts are enough again, once the worker has told the last they miss.
                known = ~by_report | ((self.read_only[rows] == 0) & ~late & reduced)
                by_report = ~known
                keep_blocks[known & reduced] = self._blocks_for(attended - evict + next_tokens)[known & reduced]
                self.returned[rows] += np.where(known, evict, 0)
            head, protect = cadence.protected_head(prompt_length), cadence.protected_tail(logical_length, prefill_end)
            self.evicted[rows] += evict
            self.epoch[rows] = epoch + reduced
            self.by_report[rows] = by_report
            self.awaits[rows] = np.where(reduced, step, self.awaits[rows])
        self.length[rows] = attended - evict
        self.most_held[rows] = np.maximum(self.most_held[rows], num_blocks)
        self.blocks[rows] = keep_blocks
        observe_from = cadence.observed_from(logical_length, new_tokens, prefill_end, prompt_length, budget, decodes)
        if some_prefill:
            self.prefilling[rows] = ~(decodes | ends_prefill)
            full_grown = rows[ends_prefill & (budget > 0) & self.dense]
            self.peak_blocks[full_grown] = self.read_only[full_grown] + self._blocks_for(self.budget[full_grown])
        return StepCounts(
            new_tokens,
            length,
            epoch,
            num_blocks,
            evict,
            keep_blocks,
            next_tokens,
            head=head,
            protect=protect,
            observe_from=observe_from,
            decodes=decodes,
            ends_part=ends_part,
            by_report=by_report,
            late=late,
        )

    def share(self, req_id: str, counts: StepCounts, index: int, blocks: int) -> None:
        """A request that this step reduces keeps read-only blocks, so that only the worker knows what else it keeps."""
        row = self._row_of[req_id]
        self.returned[row] -= counts.evict[index]
        self.blocks[row] = counts.keep_blocks[index] = counts.num_blocks[index]
        self.by_report[row] = counts.by_report[index] = True
        self.keep_read_only(req_id, blocks)

    def unshare(self, req_id: str, counts: StepCounts, index: int, logical_length: int) -> None:
        """A request that decodes in this step leaves its read-only blocks after it, and is dense again."""
        row = self._row_of[req_id]
        self.returned[row] = logical_length - self.length[row]
        counts.next_tokens[index] = 1
        self.by_report[row] = counts.by_report[index] = False
        self.blocks[row] = counts.keep_blocks[index] = self.dense_blocks(req_id)
        self.keep_read_only(req_id, 0)

    def dense_blocks(self, req_id: str) -> int:
        """Blocks that a request without holes takes when it decodes its next token."""
        return int(self._blocks_for(self.length[self._row_of[req_id]] + 1))

    def _cadence_of(self, rows: Any) -> Cadence:
        """That of one request, or of several."""
        return replace(self.cadence, **{name: column[rows] for name, column in self._own.items()})

    def _blocks_for(self, tokens: Any) -> Any:
        return -(-tokens // self.block_size)

    def _grow(self) -> None:
        old = len(self.length)
        for name in _COLUMNS:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        for name, array in self._own.items():
            self._own[name] = np.concatenate([array, np.zeros_like(array)])
        self._row_of.grow(2 * old)
