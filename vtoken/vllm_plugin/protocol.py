"""What travels between scheduler and worker: one plan down with each step, one report up with its result.

The scheduler owns counts, the worker owns which. In ``fill`` no block id has to travel upwards: both sides know
that a request keeps its first ``keep_blocks`` blocks. ``copy_out`` and ``freed`` belong to the same protocol and
stay empty until cached blocks (copy-out) and appending modes (reports) are supported.
"""

from dataclasses import dataclass, field

from vtoken.core.ledger import StepCounts


@dataclass(frozen=True)
class StepPlan:
    """Scheduler to worker, for one step.

    Attributes:
        step: number of the step; the report carries it back.
        req_ids: scheduled requests, in the order of the arrays in ``counts``.
        counts: what each request computes and what it forgets afterwards, with the (tokens, blocks, epoch) that
            the worker must find before the forward.
        read_only: leading blocks per request that are shared or cached and must not be written.
        copy_out: blocks granted to a request, in this schedule, for survivors of read-only blocks.
    """

    step: int
    req_ids: list[str]
    counts: StepCounts
    read_only: dict[str, int] = field(default_factory=dict)
    copy_out: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class StepReport:
    """Worker to scheduler, for the same step.

    Attributes:
        step: the step that this is the result of.
        evicted, moved: tokens, over all requests.
        errors: one sentence per request that must end; all others go on.
        freed: block ids per request together with the epoch they belong to, in modes where the worker alone
            knows which blocks became empty.
    """

    step: int
    evicted: int = 0
    moved: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    freed: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
