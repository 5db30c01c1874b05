"""What travels between scheduler and worker: one plan down with each step, one report up with its result.

The scheduler owns counts, the worker owns which. In ``fill`` no block id has to travel upwards: both sides know
that a request keeps its first ``keep_blocks`` blocks. In ``pack`` and ``none`` the worker alone knows which blocks
became empty, and reports them. ``read_only`` and ``copy_out`` stay empty until cached blocks are supported.
"""

from dataclasses import dataclass, field

from vtoken.core.ledger import StepCounts
from vtoken.core.reclamation import BlockChange


@dataclass(frozen=True)
class StepPlan:
    """Scheduler to worker, for one step.

    Attributes:
        step: number of the step; the report carries it back.
        req_ids: scheduled requests, in the order of the arrays in ``counts``.
        counts: what each request computes and what it forgets afterwards, with the (tokens, blocks, epoch) that
            the worker must find before the forward.
        read_only: leading blocks per request that are shared or cached and must not be written.
        granted: empty blocks that the worker may pack tokens into; those that it does not adopt come back.
        copy_out: blocks granted to a request, in this schedule, for survivors of read-only blocks.
    """

    step: int
    req_ids: list[str]
    counts: StepCounts
    read_only: dict[str, int] = field(default_factory=dict)
    granted: list[int] = field(default_factory=list)
    copy_out: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class StepReport:
    """Worker to scheduler, for the same step.

    Attributes:
        step: the step that this is the result of.
        evicted, moved: tokens, over all requests.
        packed: blocks that packing has emptied, less those that it took.
        errors: one sentence per request that must end; all others go on.
        changes: what became of a request's blocks, in modes where the worker alone knows it.
    """

    step: int
    evicted: int = 0
    moved: int = 0
    packed: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    changes: dict[str, BlockChange] = field(default_factory=dict)
