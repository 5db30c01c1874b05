"""A runner without a model and without a token table: for simulations that ask for blocks alone, and for many steps.

It tells the scheduler what our worker would, block for block, in ``fill`` and ``none``, for policies that rank a token
once and for all. What it leaves out is where in its request a token lies, so it does not know how many tokens move.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heappop, heappushpop
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.reclamation import BlockChange, CopyOut
from vtoken.core.token_scores import prompt_hash
from vtoken.policies import Policy, PolicyBatch, load_policy
from vtoken.policies.random import Random
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.vllm_plugin.compat import beginning_in, plan_of
from vtoken.vllm_plugin.protocol import StepReport
from vtoken.vllm_plugin.simulated_runner import SimulatedRunner

FIXED = (Random, StreamingLLM)
"""Policies that rank a token by its position and its request's prompt alone."""
AHEAD = 128
"""Tokens of which the ranks are computed at once."""
TOKEN = (1 << 32) - 1


def counts_suffice(config: VTokenConfig) -> bool:
    """Whether ``CountingRunner`` knows these settings; all others need our worker."""
    return config.reclaim != "pack" and not config.record_trace and isinstance(load_policy(config), FIXED)


class _Ranked:
    """The live tokens of one request that may be evicted, lowest rank first, and how many are dead in each block.

    Args:
        policy: ranks tokens.
        prompt: of the request.
        block_size: slots per block.

    Attributes:
        evicted: tokens so far.
        read_only: the request's leading blocks that stay as they are. A block is named by its place among all blocks
            that the request has ever filled.
        holes: dead tokens in these.
        gone: blocks that have left the request, in order.
    """

    def __init__(self, policy: Policy, prompt: Sequence[int] | None, block_size: int) -> None:
        self.evicted = self.holes = 0
        self.read_only: list[int] = []
        self._kept: set[int] = set()
        self.gone: list[int] = []
        self._dead: dict[int, int] = {}
        self._policy = policy
        self._hash = np.array([prompt_hash(prompt)])
        self._block_size = block_size
        self._ranks: list[int] = []  # (rank << 32 | token) of each token
        self._heap: list[int] = []
        self._entered = 0

    def keep(self, blocks: list[int]) -> None:
        """These are the read-only blocks from now on."""
        self.read_only, self._kept = blocks, set(blocks)
        self.holes = len(blocks) * self._block_size - self.live_in(blocks)

    def live_in(self, blocks: Iterable[int]) -> int:
        """Live tokens in full blocks."""
        return sum(self._block_size - self._dead.get(block, 0) for block in blocks)

    def evict(self, length: int, head: int, protect: int, count: int) -> list[int]:
        """Let the lowest ``count`` die; returns the blocks of which the last token went, in order.

        Args:
            length: tokens of the sequence.
            head, protect: leading and newest tokens that are never evicted.
        """
        first, self._entered = max(self._entered, head), max(self._entered, length - protect)
        if len(self._ranks) < length:
            self._rank(length + AHEAD)
        entering = self._ranks[first : self._entered]
        self.evicted += count
        if count == 1 and len(entering) <= 1:
            lowest = heappushpop(self._heap, entering[0]) if entering else heappop(self._heap)
            return self._bury(((lowest & TOKEN) // self._block_size, 1))
        ranked = np.array(self._heap + entering)
        ranked.sort()  # a sorted list is a heap
        self._heap = ranked[count:].tolist()
        blocks, dead = np.unique((ranked[:count] & TOKEN) // self._block_size, return_counts=True)
        return self._bury(*zip(blocks.tolist(), dead.tolist(), strict=True))

    def _bury(self, *deaths: tuple[int, int]) -> list[int]:
        empty = []
        for block, count in deaths:
            dead = self._dead[block] = self._dead.get(block, 0) + count
            if dead == self._block_size:
                empty.append(block)
            if block in self._kept:
                self.holes += count
        return empty

    def _rank(self, until: int) -> None:
        tokens = np.arange(len(self._ranks), until)
        one, zero = np.array([len(tokens)]), np.zeros(len(tokens), dtype=np.float32)
        rank = self._policy.priority(PolicyBatch(np, tokens, one, np.array([until]), self._hash, zero))
        self._ranks += ((rank << 32) | tokens).tolist()


class CountingRunner(SimulatedRunner):
    """Follows vLLM's scheduler and reports to ours; see ``SimulatedRunner``.

    Args:
        config: the engine's settings; ``counts_suffice`` is true for them.
    """

    def __init__(self, config: VTokenConfig, requests: int, blocks: int, tokens: int, block_size: int) -> None:
        super().__init__(requests, blocks, tokens, block_size)
        self._block_size = block_size
        self._policy = load_policy(config)
        self._naive = config.reclaim == "none"
        self._ranked: dict[str, _Ranked] = {}

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        """As vLLM's runner does, under its name.

        Raises:
            RuntimeError: a request does not hold as many blocks as the scheduler says.
        """
        self._computed += self.follow(scheduler_output)
        self._plan = plan_of(scheduler_output)
        self._report = StepReport(self._plan.step, evicted=int(self._plan.counts.evict.sum()))
        preempted = scheduler_output.preempted_req_ids or ()
        for req_id in (*scheduler_output.finished_req_ids, *preempted, *beginning_in(scheduler_output)):
            self._ranked.pop(req_id, None)
        held = [len(self._blocks_of(req_id)) for req_id in self._plan.req_ids]
        if held != self._plan.counts.num_blocks.tolist():
            raise RuntimeError("vtoken: scheduler and worker do not count the same blocks")
        if self._naive:
            self._evict_naively()
        else:
            self._fill()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Likewise: a token for whom it is due, and the report."""
        output: Any = self.answer()
        output.vtoken_report = self._report
        return output

    # -- inside -----------------------------------------------------------------------------------------------

    def _append(self, row: int, blocks: list[int]) -> None:
        """Nobody reads the table of blocks."""

    def _evict_naively(self) -> None:
        counts = self._plan.counts
        for i in np.flatnonzero(counts.evict).tolist():
            req_id = self._plan.req_ids[i]
            ranked = self._ranked_of(req_id)
            empty = self._let_die(ranked, i)
            if empty:
                blocks = self._blocks_of(req_id)
                columns = [block - bisect_left(ranked.gone, block) for block in empty]
                self._report.changes[req_id] = BlockChange([blocks[column] for column in columns])
                for column in reversed(columns):
                    del blocks[column]
                ranked.gone = sorted(ranked.gone + empty)
                self._report.returned[req_id] = len(ranked.gone) * self._block_size

    def _fill(self) -> None:
        plan, counts = self._plan, self._plan.counts
        by_report = counts.by_report & (counts.evict > 0)
        apart = {plan.req_ids[i]: i for i in np.flatnonzero(by_report).tolist()}
        if plan.read_only:
            apart |= {req_id: i for i, req_id in enumerate(plan.req_ids) if req_id in plan.read_only}
        for i in np.flatnonzero(counts.keep_blocks < counts.num_blocks).tolist():
            if plan.req_ids[i] not in apart:
                del self._blocks_of(plan.req_ids[i])[counts.keep_blocks[i] :]
        for req_id, i in apart.items():
            blocks = self._blocks_of(req_id)
            blocks[:] = self._fill_beside_read_only(req_id, i, list(blocks))

    def _fill_beside_read_only(self, req_id: str, i: int, blocks: list[int]) -> list[int]:
        """The blocks of a request that has read-only ones, or leaves them, after the step."""
        counts, plan, report = self._plan.counts, self._plan, self._report
        ranked, next_token = self._ranked_of(req_id), int(counts.next_tokens[i])
        live, dying = int(counts.length[i] + counts.new_tokens[i]), int(counts.evict[i])
        if dying and not ranked.evicted:
            ranked.keep(list(range(plan.read_only[req_id])))
        end, empty = live + ranked.holes, set[int]()
        reported = bool(counts.by_report[i])
        length, live = live + ranked.evicted, live - dying
        if dying and (ranked.read_only or not ranked.evicted):
            empty = set(self._let_die(ranked, i))
        else:
            ranked.evicted += dying
        keep = self._blocks_for(end + next_token) if reported else int(counts.keep_blocks[i])
        moving = dying > next_token or keep < len(blocks)
        before = None
        if req_id in plan.read_only:
            ranked.keep(ranked.read_only[: plan.read_only[req_id]])
            copy = plan.copy_out.get(req_id, CopyOut(len(ranked.read_only), []))
            left = self._leave(ranked, blocks, copy, live + next_token)
            if left is not None:
                before, blocks, moving = blocks[copy.keep :] + blocks[: copy.keep], left, True
        held = list(blocks)
        if moving:
            del blocks[self._blocks_for(live + ranked.holes + next_token) :]
        if reported:
            columns = [n for n, block in enumerate(ranked.read_only) if block in empty] if empty else []
            for column in reversed(columns):
                del blocks[column]
            if columns:
                ranked.keep([block for block in ranked.read_only if block not in empty])
            report.returned[req_id] = length - live - ranked.holes
            change = _change(held if before is None else before, blocks)
            if change.freed:
                report.changes[req_id] = change
        return blocks

    def _leave(self, ranked: _Ranked, blocks: list[int], copy: CopyOut, tokens: int) -> list[int] | None:
        """A request's blocks when it leaves read-only ones, those that it leaves last; None if it stays."""
        read_only = len(ranked.read_only)
        if copy.keep == read_only:
            return list(blocks)
        wanted = self._blocks_for(tokens - ranked.live_in(ranked.read_only[: copy.keep]))
        taken = max(wanted - (len(blocks) - read_only), 0)
        if taken > len(copy.blocks):
            return None
        ranked.keep(ranked.read_only[: copy.keep])
        return blocks[: copy.keep] + copy.blocks[:taken] + blocks[read_only:] + blocks[copy.keep : read_only]

    def _let_die(self, ranked: _Ranked, i: int) -> list[int]:
        counts = self._plan.counts
        length = int(counts.length[i] + counts.new_tokens[i]) + ranked.evicted
        return ranked.evict(length, int(counts.head[i]), int(counts.protect[i]), int(counts.evict[i]))

    def _ranked_of(self, req_id: str) -> _Ranked:
        ranked = self._ranked.get(req_id)
        if ranked is None:
            prompt = self.requests[req_id].prompt_token_ids
            ranked = self._ranked[req_id] = _Ranked(self._policy, prompt, self._block_size)
        return ranked

    def _blocks_of(self, req_id: str) -> list[int]:
        return self.requests[req_id].block_ids[0]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def _change(before: list[int], after: list[int]) -> BlockChange:
    if before == after:
        return BlockChange([])
    stayed, held = set(after), set(before)
    return BlockChange([b for b in before if b not in stayed], [b for b in after if b not in held])
