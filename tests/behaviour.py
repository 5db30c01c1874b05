"""vLLM's scheduler and ours under one driver: what vLLM promises of its own is asked of both.

``KINDS`` says of whom; to ask another class, add its line there. docs/vllm-behaviour.md is the list of the promises.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import bare_runner
import numpy as np
import pytest
import stock_engine
import stub_worker
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin.compat import VTokenAsyncScheduler, VTokenScheduler

SMALL = 40
"""A budget that the longer requests reach: three blocks, once a prompt is in."""
NEVER = 10_000
VOCABULARY = 61


@dataclass(frozen=True)
class Kind:
    """A scheduler class, and the budget in tokens that each request gets; without one vtoken is not there."""

    name: str
    scheduler: type[Scheduler]
    budget: int | None = None

    @property
    def evicts(self) -> bool:
        return self.budget == SMALL

    def sabotaged(self, fault: type) -> "Kind":
        """The same with the methods of ``fault`` in the place of its own."""
        return replace(self, scheduler=type(fault.__name__, (fault, self.scheduler), {}))


KINDS = [
    Kind("vLLM", Scheduler),
    Kind("vLLM async", AsyncScheduler),
    Kind("vtoken", VTokenScheduler, NEVER),
    Kind("evicting", VTokenScheduler, SMALL),
    Kind("vtoken async", VTokenAsyncScheduler, NEVER),
    Kind("evicting async", VTokenAsyncScheduler, SMALL),
]
ASYNC = [kind for kind in KINDS if issubclass(kind.scheduler, AsyncScheduler)]
STOCK = KINDS[0]
WHOLE = [kind for kind in KINDS if not kind.evicts]

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
whole_kinds = pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.name)
"""Where the promise is about blocks that a request has computed and still holds."""


@dataclass
class Did:
    """What one step did.

    ``scheduled`` has the tokens per request in the scheduler's order, ``hits`` the tokens that a request which
    (re)started found in the cache, ``reported`` the finished ids that the worker is told, ``ended`` the finish reasons.
    """

    output: SchedulerOutput
    scheduled: dict[str, int]
    new: list[str]
    resumed: list[str]
    preempted: list[str]
    reported: list[str]
    hits: dict[str, int]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    replies: dict[str, Any] = field(default_factory=dict)
    clients: dict[int, Any] = field(default_factory=dict)
    stats: Any = None


class Driver:
    """A scheduler of some kind over a worker without a model, one step at a time.

    Args:
        num_blocks: of the pool; one of them is vLLM's own.
        seqs, batched: ``max_num_seqs`` and ``max_num_batched_tokens``.
        options: of vLLM's ``SchedulerConfig``.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        kind: Kind,
        num_blocks: int = 200,
        *,
        seqs: int = 16,
        batched: int = 4096,
        caching: bool = False,
        **options: Any,
    ) -> None:
        def configured(*args: Any, **kwargs: Any) -> Any:
            config = make_config(*args, **kwargs)
            for name, value in options.items():
                assert hasattr(config.scheduler_config, name)
                setattr(config.scheduler_config, name, value)
            return config

        make_config = stub_worker.vllm_config_for
        limits = {"max_num_seqs": seqs, "max_num_batched_tokens": batched, "caching": caching}
        with ExitStack() as patches:
            for module in (stub_worker, stock_engine):
                patches.enter_context(patch.object(module, "vllm_config_for", configured))
            if kind.budget is None:
                patches.enter_context(patch.object(stock_engine, "Scheduler", kind.scheduler))
                self.engine: Any = stock_engine.StockEngine(model_config, num_blocks, **limits)
            else:
                patches.enter_context(patch.object(stub_worker, "VTokenScheduler", kind.scheduler))
                config = VTokenConfig(policy="streaming_llm", sinks=2, recent=6, interval=1)
                self.engine = stub_worker.StubEngine(model_config, config, num_blocks, **limits)
        self.kind, self.scheduler = kind, self.engine.scheduler
        (self.manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.answers: dict[str, Sequence[int]] = {}
        self.throttled = False
        self.steps: list[Did] = []
        self._watch()

    # -- doing ------------------------------------------------------------------------------------------------

    def add(
        self,
        req_id: str,
        tokens: Sequence[int] | int,
        outputs: int = 1,
        *,
        budget: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        eos: int | None = None,
        **request: Any,
    ) -> Request:
        """A request arrives, with these tokens or with so many that nobody else has."""
        prompt = prompt_of(req_id, tokens) if isinstance(tokens, int) else list(tokens)
        params = SamplingParams(
            max_tokens=outputs,
            temperature=0.0,
            extra_args=self.kind.budget and {"vtoken.budget": budget or self.kind.budget},
            **(sampling or {}),
        )
        if eos is not None:
            params.update_from_generation_config({}, eos)
        hasher = self.engine.content.block_hasher if self.engine.content is not None else None
        arrived = Request(req_id, prompt, params, None, block_hasher=hasher, **request)
        self.scheduler.add_request(arrived)
        return arrived

    def step(self, before_update: Callable[[], None] = lambda: None) -> Did:
        """One step; ``before_update`` runs while the worker computes."""
        with (
            patch.object(bare_runner, "sampled_token", self._answer),
            patch.object(stock_engine, "sampled_token", self._answer),
        ):
            self.engine.step(before_update)
        return self.steps[-1]

    def run(self, limit: int = 400) -> list[Did]:
        """Until nothing is left to do; the steps that it took."""
        first = len(self.steps)
        while self.scheduler.has_requests():
            self.step()
            assert len(self.steps) < first + limit, "the requests do not come to an end"
        return self.steps[first:]

    def abort(self, *req_ids: str) -> list[str]:
        """Those that were still there."""
        aborted = self.scheduler.finish_requests(list(req_ids), RequestStatus.FINISHED_ABORTED)
        return [request.request_id for request in aborted]

    # -- looking ----------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]

    @property
    def free(self) -> list[int]:
        """Free blocks, those that are taken first in front."""
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    @property
    def hashed(self) -> list[int]:
        """Blocks that can be found in the prefix cache."""
        return [block.block_id for block in self.pool.blocks if block.block_hash is not None]

    def blocks(self, req_id: str) -> list[int]:
        return [block.block_id for block in self.manager.req_to_blocks.get(req_id, [])]

    def references(self, blocks: Sequence[int]) -> list[int]:
        return [self.pool.blocks[block].ref_cnt for block in blocks]

    def delivered(self, req_id: str) -> list[int]:
        """Every token of a request that has come out so far, in order."""
        return [token for did in self.steps for token in did.tokens.get(req_id, [])]

    def expected(self, req_id: str, prompt: int, outputs: int) -> list[int]:
        """What the model says after this prompt, as often as it is asked."""
        return [self._answer(req_id, prompt + n) for n in range(outputs)]

    def said(self, what: str) -> list[Any]:
        """One attribute of every step so far."""
        return [getattr(did, what) for did in self.steps]

    # -- inside -----------------------------------------------------------------------------------------------

    def _answer(self, req_id: str, length: int) -> int:
        if req_id in self.answers:
            return self.answers[req_id][length - self._prompts[req_id]]
        return bare_runner_sampled_token(req_id, length)

    def _watch(self) -> None:
        schedule, update, add = self.scheduler.schedule, self.scheduler.update_from_output, self.scheduler.add_request
        self._prompts: dict[str, int] = {}

        def watched_add(request: Request) -> None:
            self._prompts[request.request_id] = request.num_prompt_tokens
            add(request)

        def watched_schedule() -> SchedulerOutput:
            output = schedule(self.throttled)
            self.steps.append(_did(output))
            return output

        def watched_update(output: SchedulerOutput, result: Any) -> Any:
            did = self.steps[-1]
            did.clients = update(output, result)
            for group in did.clients.values():
                did.stats = group.scheduler_stats or did.stats
                for reply in group.outputs:
                    did.replies[reply.request_id] = reply
                    if reply.new_token_ids:
                        did.tokens[reply.request_id] = list(reply.new_token_ids)
                    if reply.finish_reason is not None:
                        did.ended[reply.request_id] = str(reply.finish_reason)
            return did.clients

        self.scheduler.add_request = watched_add
        self.scheduler.schedule, self.scheduler.update_from_output = watched_schedule, watched_update


class Lagged(Driver):
    """As with async scheduling: a step is scheduled before what came of the last one is known."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.under_way: deque[tuple[SchedulerOutput, Any]] = deque()

    def step(self, before_update: Callable[[], None] = lambda: None) -> Did:
        """Schedule one step, then take in the last one; what came of that is noted with the new one."""
        with patch.object(bare_runner, "sampled_token", self._answer):
            output = self.scheduler.schedule()
            self.under_way.append((output, self._compute(output)))
            before_update()
            if len(self.under_way) > 1:
                self.scheduler.update_from_output(*self.under_way.popleft())
        return self.steps[-1]

    def run(self, limit: int = 400) -> list[Did]:
        first = len(self.steps)
        while self.scheduler.has_requests() or any(output.num_scheduled_tokens for output, _ in self.under_way):
            self.step()
            assert len(self.steps) < first + limit, "the requests do not come to an end"
        return self.steps[first:]

    def _compute(self, output: SchedulerOutput) -> Any:
        if self.kind.budget is not None:
            return self.engine.runner.run(output)
        req_ids, sampled = list(output.num_scheduled_tokens), []
        for req_id in req_ids:
            request = self.scheduler.requests[req_id]
            sampled.append([] if request.is_prefill_chunk else [self._answer(req_id, request.num_computed_tokens)])
        return ModelRunnerOutput(req_ids, {req_id: n for n, req_id in enumerate(req_ids)}, sampled)


Start = Callable[..., Driver]
"""``start(kind, num_blocks, ...)``: the fixture of that name."""

bare_runner_sampled_token = bare_runner.sampled_token


def prompt_of(req_id: str, length: int, seed: int = 0) -> list[int]:
    """Tokens that no other request's prompt begins with."""
    rng = np.random.default_rng([seed, *req_id.encode()])
    return rng.integers(0, VOCABULARY, length).tolist()


def _did(output: SchedulerOutput) -> Did:
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    new = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
    resumed = [req_id for req_id in cached.req_ids if req_id in cached.resumed_req_ids]
    return Did(
        output=output,
        scheduled=dict(output.num_scheduled_tokens),
        new=list(new),
        resumed=resumed,
        preempted=sorted(output.preempted_req_ids or ()),
        reported=sorted(output.finished_req_ids),
        hits=new | {req_id: computed[req_id] for req_id in resumed},
    )
