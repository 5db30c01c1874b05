"""The scheduler's part of prefix caching in ``fill``: which blocks a reduced request keeps as they are, and which not.

A block with a hash, or held by more than one request, is never written. A request that loses tokens has three ways out:

- *cached, held by it alone*: the survivors are copied into blocks granted in the same step, and the block goes back
  with its hash, so that later requests still hit it;
- the same without a free block: its hash is dropped, and it is filled in place like any other;
- *shared*: it stays, with its dead tokens masked, until all who hold it gain by leaving it, or nobody else holds it.

Until its first eviction a request's list of blocks is exact. Afterwards the worker changes it, and whoever leaves
shared blocks then must not have a report under way: with asynchronous scheduling it is left out of a step for that.
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
    def truncate(self, request_id: str, keep: int) -> list[Any]: ...
    def exchange(self, request_id: str, change: BlockChange, adopted: list[Any]) -> list[Any]: ...


@dataclass
class Decisions:
    """What a step is to do about read-only blocks.

    Attributes:
        read_only, copy_out: for the plan.
        released: blocks that requests have left, and that the worker still reads in this step.
        left: by request, the leading blocks that it has left; they keep their hashes, and are among the released ones.
        granted: blocks that the worker may take, or not.
        taken: blocks that requests have been given in place of those that they left.
    """

    read_only: dict[str, int] = field(default_factory=dict)
    copy_out: dict[str, CopyOut] = field(default_factory=dict)
    released: list[Any] = field(default_factory=list)
    left: dict[str, list[Any]] = field(default_factory=dict)
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
        self._held: dict[str, int] = {}  # by request that may leave, up to which step all reports must be in
        self._references_changed = False
        self._since_look = LOOK_EVERY

    def references_changed(self) -> None:
        """Somebody has left blocks that others may hold as well."""
        self._references_changed = True

    def forget(self, req_id: str) -> None:
        """The request has no blocks any more."""
        self._tried.pop(req_id, None)
        self._held.pop(req_id, None)
        self._references_changed = True

    def waits(self, req_id: str, settled: int) -> bool:
        """A running request is not to be scheduled before a report has come that is still under way."""
        return self._held.get(req_id, 0) > settled or self._ledger.is_prefilled_blindly(req_id, settled)

    def decide(self, req_ids: Sequence[str], counts: StepCounts, logical_length: Ints, step: int) -> Decisions:
        """Once per step, after vLLM has scheduled it: whoever is hit or shared in it shows in the reference counts.

        Args:
            req_ids, counts: the scheduled requests; ``counts`` is corrected for those that keep read-only blocks.
            logical_length: tokens of their sequences after the step, [R].
            step: its number.
        """
        decisions = Decisions()
        self._since_look += 1
        look = self._since_look >= (LOOK_AGAIN if self._references_changed else LOOK_EVERY)
        if look:
            self._references_changed, self._since_look = False, 0
        for index in np.flatnonzero((counts.evict > 0) & (counts.epoch == 0)).tolist():
            self._reduce_first(req_ids[index], index, counts, decisions)
        back = {req_id for req_id in req_ids if req_id in self._held} if self._held else set()
        if not look and not back:
            return decisions
        for req_id in back:
            del self._held[req_id]
        may_leave = np.flatnonzero(counts.by_report & counts.decodes & (counts.epoch > 0)).tolist()
        late = [req_ids[i] for i in may_leave if counts.late[i]] if look else []
        candidates = {req_ids[i]: i for i in may_leave if not counts.late[i] and (look or req_ids[i] in back)}
        self._leave_private(candidates, counts, logical_length, decisions)
        if self._leave_shared:
            self._leave_together(candidates, counts, logical_length, decisions)
        for req_id in decisions.copy_out.keys() & candidates.keys():
            self._ledger.await_report(req_id, step)
        if late:
            self._hold(late, [req_id for req_id in candidates if req_id not in decisions.read_only], step)
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
        for req_id, index in candidates.items():
            read_only, shared, most = self._private_part(req_id)
            if shared == read_only or most > self._pool.get_num_free_blocks():
                continue
            if shared:
                self._tried[req_id] = shared
                decisions.read_only[req_id] = read_only
                self._grant(req_id, shared, most, decisions)
            else:
                self._leave(req_id, index, counts, int(logical_length[index]), decisions)

    def _private_part(self, req_id: str) -> tuple[int, int, int]:
        """(read-only blocks, of these up to the last that others hold, the most blocks that leaving the rest takes).

        The second is the first if there is nothing to leave, or it has been tried.
        """
        read_only = int(self._ledger.read_only_blocks([req_id])[0])
        blocks = self._lists.blocks_of(req_id)
        shared = _last(block.ref_cnt > 1 for block in blocks[:read_only])
        if shared >= self._tried.get(req_id, read_only):
            return read_only, read_only, 0
        # What the copy takes at most, and what it may take to be worth it: the worker knows, and declines. One that
        # leaves all of its blocks gets what it takes in any case.
        most = min(self._copy_blocks(req_id, read_only), read_only - shared - 1) if shared else 0
        return read_only, shared, most

    def _leave_together(
        self, candidates: dict[str, int], counts: StepCounts, logical_length: Ints, decisions: Decisions
    ) -> None:
        staying = [req_id for req_id in candidates if req_id not in decisions.read_only]
        for group, taken in self._groups_that_gain(staying):
            if taken > self._pool.get_num_free_blocks():
                continue  # another time
            for req_id in group:
                index = candidates[req_id]
                self._leave(req_id, index, counts, int(logical_length[index]), decisions)

    def _groups_that_gain(self, req_ids: Sequence[str]) -> list[tuple[list[str], int]]:
        """Those who should leave together, and how many blocks their copies take."""
        shared: dict[str, list[int]] = {}
        references: dict[int, int] = {}
        copies: dict[str, int] = {}
        for req_id in req_ids:
            blocks, read_only = self._lists.blocks_of(req_id), int(self._ledger.read_only_blocks([req_id])[0])
            shared[req_id] = [block.block_id for block in blocks[:read_only]]
            references |= {block.block_id: block.ref_cnt for block in blocks[:read_only]}
            copies[req_id] = self._copy_blocks(req_id, read_only)
        groups = worth_leaving(shared, references, copies)
        return [(group, sum(copies[req_id] for req_id in group)) for group in groups]

    def _hold(self, late: list[str], known: list[str], step: int) -> None:
        """Leave out of the next step who would leave blocks if all reports were in, and decide then.

        So do those who have none left to leave: as soon as nothing is under way, counts are enough for them.
        """
        free, going = self._pool.get_num_free_blocks(), set[str]()
        for req_id in late:
            read_only, shared, most = self._private_part(req_id)
            if not read_only or (shared < read_only and most <= free):
                going.add(req_id)
        if self._leave_shared:
            for group, taken in self._groups_that_gain([r for r in (*late, *known) if r not in going]):
                if taken <= free and not going.issuperset(group) and not set(known).issuperset(group):
                    going.update(group)
        self._held |= dict.fromkeys(going, step)

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
        decisions.left[req_id] = blocks[:read_only]
        decisions.released += blocks[:read_only]
        decisions.taken += len(granted)
        blocks[:read_only] = granted


def _last(flags: Iterable[bool]) -> int:
    """How many there are up to the last one that is set."""
    return max((n for n, flag in enumerate(flags, 1) if flag), default=0)
