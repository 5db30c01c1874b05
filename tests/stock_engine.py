"""vLLM's own scheduler, and what a step of either scheduler did, for comparison."""

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from bare_runner import LAYERS, sampled_token
from content_marks import ContentMarks
from reference_cache import S
from stub_worker import new_request, vllm_config_for
from vllm.config import ModelConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


class StockEngine:
    """vLLM's scheduler, without any vtoken, over a worker that only answers; driven like a ``StubEngine``."""

    def __init__(
        self,
        model_config: ModelConfig,
        num_blocks: int = 1000,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 65536,
        caching: bool = False,
        asynchronous: bool = False,
        **scheduling: Any,
    ) -> None:
        vllm_config = vllm_config_for(
            model_config, num_blocks, max_num_seqs, max_num_batched_tokens, caching, asynchronous, **scheduling
        )
        spec = FullAttentionSpec(block_size=S, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(list(LAYERS), spec)]
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=S,
            log_stats=True,
        )
        self.content = ContentMarks() if caching else None
        self.hits: list[tuple[str, int]] = []
        self.most_under_way = 2 if asynchronous else 1
        self.queue: deque[tuple[Any, ModelRunnerOutput]] = deque()

    def add(
        self,
        req_id: str,
        *,
        tokens: Sequence[int],
        outputs: int,
        budget: int | float | None = None,
        priority: int = 0,
    ) -> None:
        self.scheduler.add_request(new_request(req_id, list(tokens), outputs, content=self.content, priority=priority))

    def abort(self, *req_ids: str) -> None:
        self.scheduler.finish_requests(list(req_ids), RequestStatus.FINISHED_ABORTED)

    def in_flight(self, req_id: str) -> bool:
        return any(req_id in output.num_scheduled_tokens for output, _ in self.queue)

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        if self.scheduler.has_requests() or self.most_under_way == 1:
            output = self.scheduler.schedule()
            note_hits(self.hits, output)
            self.queue.append((output, self._answer(output)))
            more = output.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
            if len(self.queue) < self.most_under_way and more:
                return
        if self.queue:
            before_update()
            self.scheduler.update_from_output(*self.queue.popleft())

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.queue:
                return
            self.step()
        raise AssertionError("the requests do not come to an end")

    def _answer(self, output: Any) -> ModelRunnerOutput:
        req_ids, sampled = list(output.num_scheduled_tokens), []
        for req_id in req_ids:
            request = self.scheduler.requests[req_id]
            complete = not request.is_prefill_chunk
            sampled.append([sampled_token(req_id, request.num_computed_tokens)] if complete else [])
        return ModelRunnerOutput(req_ids, {req_id: n for n, req_id in enumerate(req_ids)}, sampled)


def note_hits(hits: list[tuple[str, int]], output: Any) -> None:
    """Append (request, tokens found in the prefix cache) for each request that starts, or starts again."""
    cached = output.scheduled_cached_reqs
    hits += [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    hits += [(req_id, hit) for req_id, hit in computed if req_id in cached.resumed_req_ids]


def watch(scheduler: Scheduler) -> list[dict[str, Any]]:
    """From now on, what each step of a scheduler did, in terms that vLLM has."""
    steps: list[dict[str, Any]] = []
    schedule, update = scheduler.schedule, scheduler.update_from_output
    under_way: deque[dict[str, Any]] = deque()
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    pool = scheduler.kv_cache_manager.block_pool

    def state() -> dict[str, Any]:
        return {
            "blocks": {r: [b.block_id for b in blocks] for r, blocks in manager.req_to_blocks.items() if blocks},
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "references": {block.block_id: block.ref_cnt for block in pool.blocks[1:] if block.ref_cnt},
            "hashes": {block.block_id: block.block_hash for block in pool.blocks if block.block_hash is not None},
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
        }

    def watched_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        steps.append(
            {
                "scheduled": list(output.num_scheduled_tokens.items()),
                "new": deepcopy([(n.req_id, n.num_computed_tokens, n.block_ids) for n in output.scheduled_new_reqs]),
                "cached": deepcopy(
                    [*zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)]
                ),
                "resumed": sorted(cached.resumed_req_ids),
                "preempted": sorted(output.preempted_req_ids or ()),
                "finished": sorted(output.finished_req_ids),
                "after schedule": state(),
            }
        )
        under_way.append(steps[-1])
        return output

    def watched_update(output: Any, result: Any) -> Any:
        outputs = update(output, result)
        step = under_way.popleft()
        step["outputs"] = sorted(
            (
                one.request_id,
                one.new_token_ids,
                str(one.finish_reason),
                one.prefill_stats and one.prefill_stats.num_cached_tokens,
            )
            for group in outputs.values()
            for one in group.outputs
        )
        step["after update"] = state()
        return outputs

    scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update
    return steps
