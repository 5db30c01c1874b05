"""The scheduler's part: state counts with each step, and hand emptied blocks back when its result arrives."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vtoken.config import RequestOptions, VTokenConfig
from vtoken.core.budget import resolve_budget
from vtoken.core.ledger import LengthLedger
from vtoken.vllm_plugin.protocol import StepPlan, StepReport


@dataclass
class ReclamationStats:
    """Totals since start-up, over all requests."""

    tokens_evicted: int = 0
    tokens_moved: int = 0
    blocks_reclaimed: int = 0


@dataclass(frozen=True)
class ScheduledStep:
    """What vLLM's scheduler decided for one step; sequences run over the scheduled requests."""

    req_ids: list[str]
    new_tokens: Iterable[int]
    logical_length: Iterable[int]
    known_length: Iterable[int]


class EvictionScheduler:
    """Beside vLLM's scheduler: turns its steps into plans and keeps account of blocks in flight.

    Args:
        config: the engine's settings.
        ledger: counts per request, shared with the KV-cache manager.
        pool_blocks: blocks that requests can hold.
        truncate: (request id, blocks to keep) -> the blocks cut off, still owned by the request.
        free: returns blocks to vLLM's pool.
    """

    def __init__(
        self,
        config: VTokenConfig,
        ledger: LengthLedger,
        pool_blocks: int,
        truncate: Callable[[str, int], list[Any]],
        free: Callable[[list[Any]], None],
    ) -> None:
        self.stats = ReclamationStats()
        self._config = config
        self._ledger = ledger
        self._pool_blocks = pool_blocks
        self._truncate = truncate
        self._free = free
        self._step = 0
        # Blocks that the worker still reads in a step under way: theirs again when its result is in.
        self._in_flight: deque[tuple[int, list[Any]]] = deque()

    @property
    def frees_pending(self) -> bool:
        """Blocks will come back from a step under way, so nobody needs to be preempted for want of one."""
        return any(blocks for _, blocks in self._in_flight)

    def live_tokens(self) -> int:
        """Tokens with a slot, over all requests."""
        return self._ledger.live_tokens()

    def admit(self, req_id: str, prompt_length: int, max_tokens: int, extra_args: Mapping[str, Any] | None) -> None:
        """Fix the limits of a request on arrival.

        Raises:
            ValueError: one sentence, for bad settings or for a request that the pool could never hold.
        """
        options = RequestOptions.from_extra_args(extra_args, self._config)
        budget = resolve_budget(self._config, options, prompt_length)
        self._ledger.open(req_id, prompt_length, budget, prompt_length + max_tokens)
        peak = self._ledger.most_blocks(req_id, prompt_length + max_tokens)
        if peak > self._pool_blocks:
            self._ledger.close(req_id)
            raise ValueError(
                f"vtoken: request {req_id} with a budget of {budget} tokens needs {peak} blocks at its peak, and the "
                f"pool has {self._pool_blocks}; give it a smaller 'vtoken.budget' or make the pool larger."
            )

    def clamp(self, req_id: str, computed: int, new_tokens: int) -> int:
        """Cut a chunk of a prompt so that it ends where the prompt has to be reduced."""
        return self._ledger.clamp(req_id, computed, new_tokens)

    def admit_unreduced(self, req_id: str, prompt_length: int) -> None:
        """Register a request that will be refused: it needs a row, and no budget."""
        self._ledger.open(req_id, prompt_length, 0, prompt_length)

    def forget(self, req_id: str) -> None:
        """The request is over."""
        self._ledger.close(req_id)

    def plan(self, scheduled: ScheduledStep) -> StepPlan:
        """State what each request computes and forgets in this step, and cut its block list to what it keeps."""
        counts = self._ledger.schedule(
            scheduled.req_ids,
            np.fromiter(scheduled.new_tokens, dtype=np.int64),
            np.fromiter(scheduled.logical_length, dtype=np.int64),
            np.fromiter(scheduled.known_length, dtype=np.int64),
        )
        released: list[Any] = []
        for index in np.flatnonzero(counts.keep_blocks < counts.num_blocks).tolist():
            released += self._truncate(scheduled.req_ids[index], int(counts.keep_blocks[index]))
        self._step += 1
        self._in_flight.append((self._step, released))
        return StepPlan(self._step, scheduled.req_ids, counts)

    def settle(self, plan: StepPlan, report: StepReport | None) -> dict[str, str]:
        """Free the blocks of a finished step; return the requests that must end, with the reason.

        Raises:
            RuntimeError: a step's report is missing, late or doubled, so that no count can be trusted.
        """
        if not self._in_flight:
            raise RuntimeError(f"vtoken: a result of step {plan.step} arrived when no step was under way")
        step, released = self._in_flight.popleft()
        if step != plan.step or (report is not None and report.step != step):
            reported = report.step if report is not None else None
            raise RuntimeError(f"vtoken: step {step} was settled with plan {plan.step} and report {reported}")
        if report is None and plan.req_ids:
            raise RuntimeError(f"vtoken: the worker's report for step {step} is missing")
        self._free(released[::-1])
        self.stats.blocks_reclaimed += len(released)
        if report is not None:
            self.stats.tokens_evicted += report.evicted
            self.stats.tokens_moved += report.moved
        return report.errors if report is not None else {}
