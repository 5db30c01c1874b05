"""The stub engine one step late: each result is taken in after the next step has been scheduled, as in vLLM's engine.

Steps are executed in order, each as early as an engine may (when it has been scheduled) or as late (when its result is
about to be taken in, and the next one has been scheduled). What the scheduler thinks is noted when it has scheduled a
step. When that step has been executed, the worker must have come to the same; and when its result is in, so must the
scheduler's own lists, by what the report says.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bare_runner import POISON
from reference_cache import S
from stub_worker import Step, StubEngine

from vtoken.core import audit
from vtoken.core.reclamation import BlockChange
from vtoken.vllm_plugin.compat import plan_of
from vtoken.vllm_plugin.protocol import StepReport


@dataclass(frozen=True)
class View:
    """What the scheduler thinks of a running request when it has scheduled a step; ``began`` is that of its life."""

    blocks: list[int]
    length: int
    epoch: int
    returned: int
    computed: int
    began: int


@dataclass
class Pending:
    """A step that has been scheduled, with what the scheduler thought then, and its result once it is executed."""

    number: int
    output: Any
    views: dict[str, View]
    writable: list[bool]
    registered: set[tuple[int, Any]]
    earlier: list["Pending"]
    result: Any = None
    report: StepReport | None = None


class LaggingEngine(StubEngine):
    """``early``: steps are executed as soon as they are scheduled."""

    asynchronous = True

    def __init__(self, *args: Any, early: bool = True, **scheduling: Any) -> None:
        super().__init__(*args, **scheduling)
        self.early = early
        self.queue: deque[Pending] = deque()
        self.longest_wait = 0
        self.runner.told_late = self.config.reclaim == "fill" and self.content is not None
        self._began: dict[str, int] = {}

    def in_flight(self, req_id: str) -> bool:
        return any(req_id in pending.output.num_scheduled_tokens for pending in self.queue)

    def step(self, before_update: Callable[[], None] = lambda: None) -> Step | None:
        """Schedule a step and take in the result of the one before it, if there is one."""
        if self.scheduler.has_requests():
            pending = self._schedule()
            if self.early:
                self._execute(pending)
            elif len(self.queue) > 1:
                self._execute(self.queue[0])
            scheduled = pending.output.total_num_scheduled_tokens > 0
            if len(self.queue) == 1 and (scheduled or self.scheduler.has_requests()):
                return None
        if not self.queue:
            return None
        pending = self.queue.popleft()
        if pending.result is None:
            self._execute(pending)
        before_update()
        self.check_pool()
        step = self._update(pending.output, pending.result)
        self._check_settled(pending)
        self.check()
        self._check_nobody_lingers(pending.output)
        return step

    def run(self, limit: int = 2000) -> list[Step]:
        steps = []
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.queue:
                self.check_empty()
                return steps
            if step := self.step():
                steps.append(step)
        raise AssertionError("the requests do not come to an end")

    def _schedule(self) -> Pending:
        hashed = {(block.block_id, block.block_hash) for block in self.pool.blocks if block.block_hash is not None}
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self.check_pool()
        number, cached = plan_of(output).step, output.scheduled_cached_reqs
        self._began |= {new.req_id: number for new in output.scheduled_new_reqs}
        self._began |= dict.fromkeys(cached.resumed_req_ids, number)
        views, ledger = {}, self.manager.ledger
        for request in self.scheduler.running:
            req_id, row = request.request_id, ledger._row_of[request.request_id]
            blocks = self.block_ids(req_id)
            assert ledger.blocks[row] == len(blocks)
            views[req_id] = View(
                blocks,
                int(ledger.length[row]),
                int(ledger.epoch[row]),
                int(ledger.returned[row]),
                request.num_computed_tokens,
                self._began[req_id],
            )
        assert self.scheduler.vtoken.live_tokens() == sum(view.length for view in views.values())
        pending = Pending(
            number,
            output,
            views,
            [self.pool.is_block_writable(block) for block in self.pool.blocks],
            {(b.block_id, b.block_hash) for b in self.pool.blocks if b.block_hash is not None} - hashed,
            list(self.queue),
        )
        assert plan_of(output).settled == number - 1 - len(self.queue)
        self.queue.append(pending)
        return pending

    def _execute(self, pending: Pending) -> None:
        self._check_steady_growth(pending.output)
        self.runner.is_writable = pending.writable.__getitem__
        pending.result = self.runner.run(pending.output)
        pending.report = pending.result.vtoken_report
        self._check_worker(pending)

    # -- what must be true ------------------------------------------------------------------------------------

    def _check_worker(self, pending: Pending) -> None:
        """The worker has come to what the scheduler thought, and to what neither could have told the other before."""
        runner, table = self.runner, self.runner.vtoken.table
        for req_id, view in pending.views.items():
            if req_id in runner.broken:
                continue
            reference, row = runner.references[req_id], int(table.rows([req_id])[0])
            blocks, returned = view.blocks, view.returned
            for one in (*pending.earlier, pending):
                if one.number >= view.began:
                    assert one.report is not None
                    blocks = followed(blocks, one.report.changes.get(req_id))
                    returned = one.report.returned.get(req_id, returned)
            assert blocks == table.block_ids(req_id), f"{req_id} holds other blocks than the scheduler thought"
            assert blocks == runner._vtoken_blocks.get(req_id, runner.requests[req_id].block_ids[0])
            assert view.length == table.num_live[row] == len(reference.live)
            assert view.epoch == table.epoch[row] == reference.evictions
            assert view.computed == table.length[row] == reference.length
            assert not reference.steady or view.length <= reference.budget
            cells, positions = runner.cells_of(req_id), int(table.end[row])
            if table.recycling:
                first = int(table.read_only[row]) * S
                positions = first + sum(token >= 0 for token in cells[first:])
            assert returned == reference.length - positions, f"{req_id} takes other positions than reported"

    def _check_settled(self, pending: Pending) -> None:
        """With the result of a step the scheduler's lists have become what the report makes of them."""
        last, ledger = self.queue[-1] if self.queue else pending, self.manager.ledger
        assert pending.report is not None
        for request in self.scheduler.running:
            req_id, row = request.request_id, ledger._row_of[request.request_id]
            view = last.views[req_id]
            report = pending.report if pending.number >= view.began else StepReport(0)
            if req_id not in self.runner.broken:
                blocks = followed(view.blocks, report.changes.get(req_id))
                assert self.block_ids(req_id) == blocks, f"{req_id}'s list is not what the report makes of it"
                returned = report.returned.get(req_id, view.returned)
                assert ledger.returned[row] == returned, f"{req_id}'s positions are not those of the report"
                assert ledger.blocks[row] == len(self.block_ids(req_id))

    def check(self) -> None:
        runner, table, vtoken = self.runner, self.runner.vtoken.table, self.scheduler.vtoken
        assert [step.number for step in vtoken._under_way] == [pending.number for pending in self.queue]
        self.check_pool()
        if len(runner.references) <= 32:
            audit.check_mapping(table)
        if runner.copies_are_made:
            known = [req_id for req_id in runner.references if req_id in self.scheduler.requests]
            runner.check_contents({r: table.block_ids(r) for r in known if r not in runner.broken})
            free = {b.block_id for b in self.pool.free_block_queue.get_all_free_blocks() if b.block_hash is None}
            for pending in self.queue:
                if pending.result is None:  # it may still read what its requests held
                    free -= {block for view in pending.views.values() for block in view.blocks}
                    free -= {block for req_id in table.req_ids for block in table.block_ids(req_id)}
            runner.cache[:, [0, *free]] = POISON
        self._check_cached_blocks()

    def _unwritten(self) -> set[tuple[int, Any]]:
        """Blocks that are registered already, to be computed by a step that has not been executed, or refused to."""
        missing = [pending for pending in self.queue if pending.report is None or pending.report.errors]
        return {mark for pending in missing for mark in pending.registered}


def followed(blocks: list[int], change: BlockChange | None) -> list[int]:
    """A list of blocks once a report has been followed."""
    if change is None:
        return blocks
    assert set(change.freed) <= set(blocks)
    place = blocks.index(change.freed[0])
    return [b for b in [*blocks[:place], *change.adopted, *blocks[place:]] if b not in change.freed]
