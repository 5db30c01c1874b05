"""What one worker can tell whoever watches: counts since start-up, and what the block pool has looked like.

The front end has no way to the scheduler's counts, and one to the worker: ``collective_rpc``. So what the scheduler
alone knows rides on each plan (``EngineCounts``), and the worker answers for both. When the last request is over, vLLM
sends one more step, without tokens, so that the answer is true of an engine at rest as well.
"""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from vtoken.core.history import Frame, History, Recording
from vtoken.core.holdings import holdings, pool_use
from vtoken.core.phase import Phase
from vtoken.core.token_table import TokenTable
from vtoken.vllm_plugin.protocol import EngineCounts, StepPlan, StepReport

MOST_BLOCKS_AT_ONCE = 200_000
"""In one answer about the past: naming them keeps the engine from its next step, 10 ms for so many."""


@dataclass(frozen=True)
class Counts:
    """What the metrics are made of; all but the first nine count from start-up.

    Attributes:
        num_blocks: blocks that requests can hold; ``free_blocks`` are in vLLM's pool, as of the last step's beginning.
        held_blocks, held_tokens: blocks that requests hold, and the slots of these.
        live_tokens, dead_tokens: slots whose token is attended, and whose token was evicted.
        running, waiting: requests.
        relocations: steps after which tokens were moved.
        copied_bytes: K and V moved, over the layers and heads of this worker.
        requests_failed: ended by vtoken with an error.
        phase_seconds: of the host, by phase: "plan" and "settle" in the scheduler, "wait", "begin", "place" and "evict"
            in the worker.
    """

    block_size: int
    num_blocks: int
    free_blocks: int
    held_blocks: int
    held_tokens: int
    live_tokens: int
    dead_tokens: int
    running: int
    waiting: int
    tokens_evicted: int
    tokens_moved: int
    blocks_reclaimed: int
    relocations: int
    copied_bytes: int
    requests_failed: int
    phase_seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Monitor:
    """Counts, phases and history of one worker.

    Args:
        table: the worker's.
        bytes_per_token: K and V of one token, in all layers.
        history: frames to keep, one a second.
        settings: one line about what is evicted, for a recording.

    Attributes:
        engine: what the scheduler said last; before the first step, what is known without it.
    """

    def __init__(self, table: TokenTable, bytes_per_token: int, history: int, settings: str) -> None:
        self.waiting_for_copies, self.beginning, self.placing, self.evicting = (Phase() for _ in range(4))
        self._table = table
        self._bytes_per_token = bytes_per_token
        self._settings = settings
        self._history = History(history)
        self.engine = EngineCounts()
        self._evicted = self._moved = self._relocations = 0

    def note(self, plan: StepPlan, report: StepReport) -> None:
        """Take a finished step into account."""
        self.engine = plan.engine
        self._evicted += report.evicted
        self._moved += report.moved
        self._relocations += report.moved > 0
        now = time.monotonic()
        if self._history.due(now) or (self._history.keeps and not plan.req_ids):
            self._history.append(now, self._frame(), holdings(self._table))

    def counts(self) -> Counts:
        engine, use = self.engine, pool_use(self._table)
        return Counts(
            block_size=self._table.block_size,
            num_blocks=engine.num_blocks,
            free_blocks=engine.free_blocks,
            held_blocks=use.blocks,
            held_tokens=use.slots,
            live_tokens=use.live,
            dead_tokens=use.dead,
            running=engine.running,
            waiting=engine.waiting,
            tokens_evicted=self._evicted,
            tokens_moved=self._moved,
            blocks_reclaimed=engine.blocks_reclaimed,
            relocations=self._relocations,
            copied_bytes=self._moved * self._bytes_per_token,
            requests_failed=engine.requests_failed,
            phase_seconds={
                "plan": engine.plan_seconds,
                "settle": engine.settle_seconds,
                "wait": self.waiting_for_copies.seconds,
                "begin": self.beginning.seconds,
                "place": self.placing.seconds,
                "evict": self.evicting.seconds,
            },
        )

    def recording(self, since: int) -> Recording:
        """What has been recorded after the frame of this number; if that is very much, the rest comes next time."""
        return Recording(
            name="",
            settings=self._settings,
            block_size=self._table.block_size,
            num_blocks=self.engine.num_blocks,
            frames=self._history.since(since, MOST_BLOCKS_AT_ONCE),
        )

    def frame(self, number: int, at: float) -> Frame:
        """The pool as it is now."""
        return replace(self._frame(), number=number, time=at, holdings=holdings(self._table).listed())

    def _frame(self) -> Frame:
        use = pool_use(self._table)
        return Frame(
            number=0,
            time=time.time(),
            running=self.engine.running,
            waiting=self.engine.waiting,
            held_blocks=use.blocks,
            live_tokens=use.live,
            dead_tokens=use.dead,
            tokens_evicted=self._evicted,
            tokens_moved=self._moved,
            blocks_reclaimed=self.engine.blocks_reclaimed,
        )
