"""What travels between scheduler and worker: one plan down with each step, one report up with its result.

The scheduler owns counts, the worker owns which. In ``fill`` no block id has to travel upwards: both sides know
that a request keeps its first ``keep_blocks`` blocks. In ``pack`` and ``none``, and of requests that keep read-only
blocks, the worker alone knows which blocks became empty and how many positions are left, and reports it.

With asynchronous scheduling a step is scheduled before the report of the one before it is in. Each plan names the last
step that has been settled, so that the worker knows what its scheduler could not know yet.
"""

from dataclasses import dataclass, field

from vtoken.core.ledger import StepCounts
from vtoken.core.reclamation import BlockChange, CopyOut


@dataclass(frozen=True)
class EngineCounts:
    """What the scheduler alone knows, for those who ask the worker (``monitor.py``), as of when a step was scheduled.

    Attributes:
        num_blocks, free_blocks: of the pool; ``num_blocks`` is what requests can hold.
        running, waiting: requests.
        blocks_reclaimed: handed back before their request ended.
        requests_failed: ended with an error by vtoken.
        plan_seconds, settle_seconds: that planning and settling steps has taken.
    """

    num_blocks: int = 0
    free_blocks: int = 0
    running: int = 0
    waiting: int = 0
    blocks_reclaimed: int = 0
    requests_failed: int = 0
    plan_seconds: float = 0.0
    settle_seconds: float = 0.0


@dataclass(frozen=True)
class StepPlan:
    """Scheduler to worker, for one step.

    Attributes:
        step: number of the step; the report carries it back.
        req_ids: scheduled requests, in the order of the arrays in ``counts``.
        counts: what each request computes and what it forgets afterwards, with the (tokens, blocks, epoch) that
            the worker must find before the forward.
        granted: empty blocks that the worker may pack tokens into; those that it does not adopt come back.
        read_only: leading blocks that are shared or cached and must not be written from now on, for the requests of
            which that has changed.
        copy_out: what a request is to do with the last of its read-only blocks.
        policies: for requests that begin with this step, which of the policies on offer is theirs; else the engine's.
        settled: number of the last step whose report had been taken in when this one was scheduled.
        engine: what the worker is asked about and does not know.
    """

    step: int
    req_ids: list[str]
    counts: StepCounts
    granted: list[int] = field(default_factory=list)
    read_only: dict[str, int] = field(default_factory=dict)
    copy_out: dict[str, CopyOut] = field(default_factory=dict)
    policies: dict[str, int] = field(default_factory=dict)
    settled: int = 0
    engine: EngineCounts = field(default_factory=EngineCounts)


@dataclass
class StepReport:
    """Worker to scheduler, for the same step.

    Attributes:
        step: the step that this is the result of.
        evicted, moved: tokens, over all requests.
        packed: blocks that packing has emptied, less those that it took.
        errors: one sentence per request that must end; all others go on.
        changes: what became of a request's blocks, where the worker alone knows it.
        returned: by how much a request's positions are fewer than the tokens of its sequence, likewise.
    """

    step: int
    evicted: int = 0
    moved: int = 0
    packed: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    changes: dict[str, BlockChange] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)
