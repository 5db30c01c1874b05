"""The scheduler's part of prefix caching in ``fill``: which blocks a reduced request keeps as they are, and which not.

A block with a hash, or held by more than one request, is never written. A request that loses tokens has three ways out:

- *cached, held by it alone*: the survivors are copied into blocks granted in the same step, and the block goes back
  with its hash, so that later requests still hit it;
- the same without a free block: its hash is dropped, and it is filled in place like any other;
- *shared*: it stays, with its dead tokens masked, until all who hold it gain by leaving it, or nobody else holds it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from vtoken.core.ledger import LengthLedger, StepCounts
from vtoken.core.ragged import Ints
from vtoken.core.reclamation import BlockChange, CopyOut
from vtoken.core.sharing import worth_leaving

LOOK_EVERY, LOOK_AGAIN = 16, 4
"""Steps from one look at who may leave shared blocks to the next, and how many at least where somebody has left some.

Copies take fewer blocks as a request's own part grows, and not everybody is there in every step, so it is looked even
when nobody has left; and in a busy server somebody leaves in nearly every step, while a look walks along block lists.
"""


class Pool(Protocol):
    """What is needed of vLLM's block pool; its blocks have ``block_id`` and ``ref_cnt``."""

    def get_num_free_blocks(self) -> int: ...
    def get_new_blocks(self, num_blocks: int) -> list[Any]: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...
    def is_block_writable(self, block: Any) -> bool: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


class BlockLists(Protocol):
    """What is needed of vLLM's KV-cache manager: the requests' lists of blocks."""

    def blocks_of(self, request_id: str) -> list[Any]: ...
    def holders_of(self, blocks: Sequence[Any]) -> list[str]: ...
    def truncate(self, request_id: str, keep: int) -> list[Any]: ...
    def exchange(self, request_id: str, change: BlockChange, adopted: list[Any]) -> list[Any]: ...


@dataclass
class Decisions:
    """What a step is to do about read-only blocks.

    Attributes:
        read_only, copy_out: for the plan.
        released: blocks that requests have left, and that the worker still reads in this step.
        granted: blocks that the worker may take, or not.
        taken: blocks that requests have been given in place of those that they left.
    """

    read_only: dict[str, int] = field(default_factory=dict)
    copy_out: dict[str, CopyOut] = field(default_factory=dict)
    released: list[Any] = field(default_factory=list)
    granted: list[Any] = field(default_factory=list)
    taken: int = 0


class ReadOnlyBlocks:
    """Decides, step by step, what becomes of the blocks that must not be written.

    Args:
        ledger: counts per request.
        pool: where blocks come from.
        lists: who holds which.
        leave_shared: whether requests may leave blocks that they share.
    """

    def __init__(self, ledger: LengthLedger, pool: Pool, lists: BlockLists, *, leave_shared: bool) -> None:
        self._ledger = ledger
        self._pool = pool
        self._lists = lists
        self._leave_shared = leave_shared
        self._tried: dict[str, int] = {}  # by request, from which of its read-only blocks on it has been told to leave
        self._references_changed = False
        self._since_look = LOOK_EVERY

    def references_changed(self) -> None:
        """Somebody has left blocks that others may hold as well."""
        self._references_changed = True

    def forget(self, req_id: str) -> None:
        """The request has no blocks any more."""
        self._tried.pop(req_id, None)
        self._references_changed = True

    def decide(self, req_ids: Sequence[str], counts: StepCounts, logical_length: Ints) -> Decisions:
        """Once per step, after vLLM has scheduled it: whoever is hit or shared in it shows in the reference counts.

        Args:
            req_ids, counts: the scheduled requests; ``counts`` is corrected for those that keep read-only blocks.
            logical_length: tokens of their sequences after the step, [R].
        """
        decisions = Decisions()
        self._since_look += 1
        look = self._since_look >= (LOOK_AGAIN if self._references_changed else LOOK_EVERY)
        if look:
            self._references_changed, self._since_look = False, 0
        for index in np.flatnonzero((counts.evict > 0) & (counts.epoch == 0)).tolist():
            self._reduce_first(req_ids[index], index, counts, decisions)
        if not look:
            return decisions
        kept = self._ledger.read_only_blocks(req_ids) > 0
        candidates = {req_ids[i]: i for i in np.flatnonzero(kept & counts.decodes & (counts.epoch > 0)).tolist()}
        self._leave_private(candidates, counts, logical_length, decisions)
        if self._leave_shared:
            self._leave_together(candidates, counts, logical_length, decisions)
        return decisions

    # -- inside -----------------------------------------------------------------------------------------------

    def _reduce_first(self, req_id: str, index: int, counts: StepCounts, decisions: Decisions) -> None:
        blocks = self._lists.blocks_of(req_id)
        read_only = _last(not self._pool.is_block_writable(block) for block in blocks)
        shared = _last(block.ref_cnt > 1 for block in blocks)
        if not read_only:
            return
        if shared:
            self._ledger.share(req_id, counts, index, shared)
            self._references_changed = True
        decisions.read_only[req_id] = read_only
        if shared == read_only:
            return
        needed = self._ledger.dense_blocks(req_id) if shared else int(counts.keep_blocks[index])
        most = min(needed, len(blocks) - shared + 1) - (len(blocks) - read_only)
        if most > self._pool.get_num_free_blocks():
            self._make_writable(req_id, blocks[shared:read_only], shared, decisions)
        elif shared:
            self._grant(req_id, shared, most, decisions)
        else:
            self._replace(req_id, read_only, int(counts.keep_blocks[index]), decisions)

    def _leave_private(
        self, candidates: dict[str, int], counts: StepCounts, logical_length: Ints, decisions: Decisions
    ) -> None:
        """Requests that are the last ones to hold their read-only blocks, or the last of them."""
        for req_id, index in list(candidates.items()):
            read_only = int(self._ledger.read_only_blocks([req_id])[0])
            blocks = self._lists.blocks_of(req_id)
            shared = _last(block.ref_cnt > 1 for block in blocks[:read_only])
            if shared >= self._tried.get(req_id, read_only):
                continue
            if shared:
                # What the copy takes at most, and what it may take to be worth it: the worker knows, and declines.
                most = min(self._copy_blocks(req_id, read_only), read_only - shared - 1)
                if most <= self._pool.get_num_free_blocks():
                    self._tried[req_id] = shared
                    decisions.read_only[req_id] = read_only
                    self._grant(req_id, shared, most, decisions)
                    del candidates[req_id]
            else:
                self._leave(req_id, index, counts, int(logical_length[index]), decisions)
                del candidates[req_id]

    def _leave_together(
        self, candidates: dict[str, int], counts: StepCounts, logical_length: Ints, decisions: Decisions
    ) -> None:
        shared: dict[str, list[int]] = {}
        references: dict[int, int] = {}
        copies: dict[str, int] = {}
        for req_id in candidates:
            blocks, read_only = self._lists.blocks_of(req_id), int(self._ledger.read_only_blocks([req_id])[0])
            shared[req_id] = [block.block_id for block in blocks[:read_only]]
            references |= {block.block_id: block.ref_cnt for block in blocks[:read_only]}
            copies[req_id] = self._copy_blocks(req_id, read_only)
        for group in worth_leaving(shared, references, copies):
            if sum(copies[req_id] for req_id in group) > self._pool.get_num_free_blocks():
                continue  # another time
            for req_id in group:
                index = candidates[req_id]
                self._leave(req_id, index, counts, int(logical_length[index]), decisions)

    def _leave(self, req_id: str, index: int, counts: StepCounts, logical_length: int, decisions: Decisions) -> None:
        """Let a request leave all of its read-only blocks."""
        read_only = int(self._ledger.read_only_blocks([req_id])[0])
        wanted = self._copy_blocks(req_id, read_only)
        self._ledger.unshare(req_id, counts, index, logical_length)
        self._tried.pop(req_id, None)
        decisions.read_only[req_id] = read_only
        if wanted > self._pool.get_num_free_blocks():
            self._make_writable(req_id, self._lists.blocks_of(req_id)[:read_only], 0, decisions)
        else:
            self._replace(req_id, read_only, int(counts.keep_blocks[index]), decisions)

    def _copy_blocks(self, req_id: str, read_only: int) -> int:
        writable = len(self._lists.blocks_of(req_id)) - read_only
        return max(self._ledger.dense_blocks(req_id) - writable, 0)

    def _make_writable(self, req_id: str, blocks: list[Any], keep: int, decisions: Decisions) -> None:
        """No room for a copy: better to forget what is cached than to have no room."""
        self._pool.evict_blocks({block.block_id for block in blocks})
        decisions.read_only[req_id] = keep

    def _grant(self, req_id: str, keep: int, most: int, decisions: Decisions) -> None:
        """The worker knows how many of these blocks it takes."""
        granted = self._pool.get_new_blocks(most) if most > 0 else []
        decisions.granted += granted
        decisions.copy_out[req_id] = CopyOut(keep, [block.block_id for block in granted])

    def _replace(self, req_id: str, read_only: int, keep_blocks: int, decisions: Decisions) -> None:
        """The counts say how many blocks the worker takes, and in which place: the request holds them from now on."""
        blocks = self._lists.blocks_of(req_id)
        wanted = max(keep_blocks - (len(blocks) - read_only), 0)
        granted = self._pool.get_new_blocks(wanted) if wanted else []
        decisions.copy_out[req_id] = CopyOut(0, [block.block_id for block in granted])
        decisions.released += blocks[:read_only]
        decisions.taken += len(granted)
        blocks[:read_only] = granted


def _last(flags: Iterable[bool]) -> int:
    """How many there are up to the last one that is set."""
    return max((n for n, flag in enumerate(flags, 1) if flag), default=0)
