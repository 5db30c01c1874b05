"""vLLM's real scheduler over a runner without a model: what attention would read is checked slot by slot.

``StubEngine`` drives both, one step at a time. After every step the worker's table, the scheduler's counts, vLLM's
lists of blocks and the reference's must be the same, and every block of the pool must be in one place; blocks that
nobody holds are poisoned.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from bare_runner import LAYERS, POISON, sampled_token
from content_marks import ContentMarks
from reference_cache import AppendingReference, CachingReference, S, blocks_for
from stub_runner import StubRunner
from vllm import SamplingParams
from vllm.config import CacheConfig, KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vtoken.config import VTokenConfig
from vtoken.core import audit
from vtoken.vllm_plugin.compat import VTokenAsyncScheduler, VTokenScheduler, plan_of
from vtoken.vllm_plugin.kv_cache import EvictableAttentionSpec
from vtoken.vllm_plugin.plugin import AdditionalConfig
from vtoken.vllm_plugin.protocol import StepReport
from vtoken.vllm_plugin.read_only import LOOK_EVERY

LINGERING = 3 * LOOK_EVERY


@dataclass
class Step:
    """What happened in one step: the scheduler's output, the worker's report, the requests that ended, and why."""

    output: Any
    report: StepReport
    finished: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    told: dict[str, dict[str, int]] = field(default_factory=dict)  # of requests that have ended


class StubEngine:
    """Scheduler and stub worker, one step at a time; everything that can be compared is compared after each."""

    asynchronous = False

    def __init__(
        self,
        model_config: ModelConfig,
        config: VTokenConfig,
        num_blocks: int = 1000,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 65536,
        caching: bool = False,
        **scheduling: Any,
    ) -> None:
        vllm_config = vllm_config_for(
            model_config,
            num_blocks,
            max_num_seqs,
            max_num_batched_tokens,
            caching,
            self.asynchronous,
            **scheduling,
        )
        vllm_config.additional_config = AdditionalConfig(config, {})
        spec = EvictableAttentionSpec(block_size=S, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(list(LAYERS), spec)]
        kv_cache_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.config = config
        self.scheduler = (VTokenAsyncScheduler if self.asynchronous else VTokenScheduler)(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=S,
            log_stats=True,
        )
        self.runner = StubRunner(vllm_config)
        self.runner.initialize_kv_cache(kv_cache_config)
        (self.manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.empty_pool = self.pool.get_num_free_blocks()
        self.preemptions = 0
        self.content = ContentMarks() if caching else None
        self.runner.pool, self.runner.content = self.pool, self.content
        self.runner.is_writable = lambda block: self.pool.is_block_writable(self.pool.blocks[block])
        self._alone: Counter[str] = Counter()
        self._free_blocks = self.pool.free_blocks
        self.pool.free_blocks = self._free_once

    def add(
        self,
        req_id: str,
        prompt: int = 0,
        outputs: int = 1,
        budget: int | float | None = None,
        *,
        tokens: Sequence[int] | None = None,
        stop_after: int | None = None,
        priority: int = 0,
        **own: Any,
    ) -> None:
        """A request arrives with these tokens, or with a prompt of some length, and with settings of its own.

        ``stop_after``: it ends when it has said so many tokens, which nobody knows before.
        """
        own |= {} if budget is None else {"budget": budget}
        extra = {f"vtoken.{name}": value for name, value in own.items()} or None
        prompt_tokens = [(7 * n + len(req_id)) % 61 for n in range(prompt)] if tokens is None else list(tokens)
        request = new_request(req_id, prompt_tokens, outputs, extra, self.content, priority)
        if stop_after is not None:
            request.sampling_params.stop_token_ids = [sampled_token(req_id, len(prompt_tokens) + stop_after - 1)]
        self.scheduler.add_request(request)

    def block_ids(self, req_id: str) -> list[int]:
        """What the scheduler thinks that the request holds."""
        return [block.block_id for block in self.manager.req_to_blocks[req_id]]

    def in_flight(self, req_id: str) -> bool:
        """A step under way computes the request, so that its id cannot be used again yet."""
        return False

    def abort(self, *req_ids: str) -> None:
        self.scheduler.finish_requests(list(req_ids), RequestStatus.FINISHED_ABORTED)

    def step(self, before_update: Callable[[], None] = lambda: None) -> Step:
        """One step; ``before_update`` runs where vLLM processes aborts."""
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self._check_steady_growth(output)
        self.check_pool()
        result = self.runner.run(output)
        before_update()
        self.check_pool()
        step = self._update(output, result)
        self.check()
        self._check_nobody_lingers(output)
        return step

    def _update(self, output: Any, result: Any) -> Step:
        """The scheduler takes in a result."""
        step = Step(output, result.vtoken_report)
        outputs = self.scheduler.update_from_output(output, result)
        for one in (o for group in outputs.values() for o in group.outputs):
            step.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
            if one.finish_reason is not None:
                step.finished[one.request_id] = str(one.finish_reason)
                step.told[one.request_id] = (one.kv_transfer_params or {}).get("vtoken", {})
        assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "vtoken_report")
        return step

    def run(self, limit: int = 2000) -> list[Step]:
        """Until nothing is left to do; then the pool must be as full as at the start."""
        steps = []
        while self.scheduler.has_requests():
            steps.append(self.step())
            assert len(steps) < limit, "the requests do not come to an end"
        self.check_empty()
        return steps

    # -- what must be true ------------------------------------------------------------------------------------

    def check(self) -> None:
        runner, stats = self.runner, self.scheduler.vtoken.stats
        if self.content is None and self.config.reclaim != "pack":
            assert stats.tokens_moved <= stats.tokens_evicted
        assert not self.scheduler.vtoken.frees_pending
        self.check_pool()
        held = {r: [b.block_id for b in blocks] for r, blocks in self.manager.req_to_blocks.items() if blocks}
        if len(held) <= 32:  # the audit itself is slow
            audit.check_mapping(runner.vtoken.table)
        known = [r.request_id for r in self.scheduler.running if r.request_id in runner.references]
        known = [req_id for req_id in known if req_id not in runner.broken]
        for req_id in known:
            self._check_request(req_id, held.get(req_id, []))
        if not runner.broken:
            live = sum(len(runner.references[req_id].live) for req_id in known)
            assert self.scheduler.vtoken.live_tokens() == live
        if runner.copies_are_made:
            runner.check_contents({req_id: held.get(req_id, []) for req_id in known})
            free = self.pool.free_block_queue.get_all_free_blocks()
            runner.cache[:, [0, *(block.block_id for block in free if block.block_hash is None)]] = POISON
        self._check_cached_blocks()

    def _check_request(self, req_id: str, blocks: list[int]) -> None:
        """Worker, scheduler, vLLM and reference say the same of a running request."""
        runner, table, ledger = self.runner, self.runner.vtoken.table, self.manager.ledger
        reference, request = runner.references[req_id], self.scheduler.requests[req_id]
        row, counted = int(table.rows([req_id])[0]), ledger._row_of[req_id]
        assert blocks == runner._vtoken_blocks.get(req_id, runner.requests[req_id].block_ids[0])
        assert blocks == table.block_ids(req_id)
        cells, tokens = runner.cells_of(req_id), len(reference.live)
        assert ledger.length[counted] == table.num_live[row] == tokens
        assert ledger.epoch[counted] == table.epoch[row] == reference.evictions
        assert ledger.blocks[counted] == table.num_blocks[row] == len(blocks)
        assert table.length[row] == reference.length == request.num_computed_tokens
        assert not reference.steady or tokens <= reference.budget
        if isinstance(reference, CachingReference):
            read_only = int(table.read_only[row])
            positions = int(table.end[row])
            if table.recycling:
                positions = read_only * S + sum(token >= 0 for token in cells[read_only * S :])
            assert ledger.returned[counted] == reference.length - positions
            return
        assert len(blocks) == blocks_for(len(cells))
        assert table.logical_at[row, : len(cells)].tolist() == cells
        assert ledger.returned[counted] == reference.returned
        if isinstance(reference, AppendingReference):
            assert blocks == reference.blocks and table.end[row] == len(cells)
        elif reference.steady:
            assert len(cells) <= reference.budget

    def check_pool(self) -> None:
        """Every block is free, or held by whoever its count of references counts, steps under way among them."""
        lists = [[block.block_id for block in blocks] for blocks in self.manager.req_to_blocks.values()]
        assert all(len(set(blocks)) == len(blocks) for blocks in lists), "a request holds a block twice"
        under_way = [
            block.block_id for step in self.scheduler.vtoken._under_way for block in step.released + step.granted
        ]
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        assert len(free) == self.pool.get_num_free_blocks()
        holders = Counter([*(block for blocks in lists for block in blocks), *under_way])
        assert sorted([*holders, *free]) == list(range(1, self.pool.num_gpu_blocks)), "a block was lost or doubled"
        assert self.content is not None or set(holders.values()) <= {1}, "a block was lost or doubled"
        counted = {block.block_id: block.ref_cnt for block in self.pool.blocks[1:] if block.ref_cnt}
        assert counted == holders, "references to a block were lost or doubled"

    def _check_cached_blocks(self) -> None:
        """Whoever finds a block in the prefix cache finds what its hash promises, in every layer."""
        if self.content is None:
            return
        unwritten = self._unwritten()
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        cached = [block for block in cached if (block.block_id, block.block_hash) not in unwritten]
        wanted = {block.block_id: self.content.promised(block) for block in cached}
        marks = self.runner.marks[:, :, 0].reshape(-1, self.pool.num_gpu_blocks, S)[:, list(wanted)]
        false = (marks != np.array(list(wanted.values())).reshape(-1, S)).any(axis=(0, 2))
        assert not false.any(), f"cached blocks {np.array(list(wanted))[false]} hold what their hash does not say"

    def _unwritten(self) -> set[tuple[int, Any]]:
        """Blocks that are registered, and not computed yet."""
        return set()

    def _check_nobody_lingers(self, output: Any) -> None:
        """Who alone holds its read-only blocks leaves them, holes and all, while it decodes a few tokens."""
        table = self.runner.vtoken.table
        for req_id in output.num_scheduled_tokens:
            if req_id not in self.runner.references or not self.manager.req_to_blocks.get(req_id):
                self._alone.pop(req_id, None)
            elif self.runner.references[req_id].steady and table.recycling and req_id not in self.runner.broken:
                read_only = int(table.read_only[table.rows([req_id])[0]])
                blocks = table.block_ids(req_id)[:read_only]
                alone = read_only > 0 and all(self.pool.blocks[block].ref_cnt == 1 for block in blocks)
                self._alone[req_id] = self._alone[req_id] + 1 if alone else 0
                assert self._alone[req_id] <= LINGERING, f"{req_id} keeps holes in blocks that are its own by now"

    def _free_once(self, blocks: Iterable[Any]) -> None:
        """In the place of the pool's own method: nobody may give back a reference that is not there."""
        blocks = list(blocks)
        for block, times in Counter(block.block_id for block in blocks).items():
            assert self.pool.blocks[block].ref_cnt >= times, f"block {block} is freed once too often"
        self._free_blocks(blocks)

    def check_empty(self) -> None:
        assert self.pool.get_num_free_blocks() == self.empty_pool
        assert self.scheduler.vtoken.live_tokens() == 0 and not list(self.runner.vtoken.table.req_ids)
        assert not self.manager.ledger._row_of and not self.runner.requests

    def _check_steady_growth(self, output: Any) -> None:
        """With interval 1, whoever has once been reduced is given no block ever again, where holes are filled."""
        cached = output.scheduled_cached_reqs
        if self.config.interval > 1 or self.config.reclaim != "fill" or self.content is not None:
            return
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            reference = self.runner.references.get(req_id)
            if req_id not in cached.resumed_req_ids and reference is not None and reference.steady:
                assert blocks is None, f"{req_id} allocates in steady state"


def vllm_config_for(
    model_config: ModelConfig,
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    caching: bool,
    asynchronous: bool = False,
    policy: str = "fcfs",
    events: bool = False,
) -> VllmConfig:
    """What vLLM is told, with or without vtoken; ``policy`` is the scheduler's, ``events`` those of the cache."""
    cache_config = CacheConfig(block_size=S, enable_prefix_caching=caching)
    cache_config.num_gpu_blocks = num_blocks
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=model_config.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
        policy=policy,
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=scheduler_config,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
    )
    config.scheduler_config.async_scheduling = asynchronous  # on a CPU vLLM itself would not have it
    return config


def new_request(
    req_id: str,
    tokens: list[int],
    outputs: int,
    extra_args: dict[str, Any] | None = None,
    content: ContentMarks | None = None,
    priority: int = 0,
) -> Request:
    """As vLLM's front end hands it to the scheduler."""
    params = SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=0.0, extra_args=extra_args)
    hasher = content.block_hasher if content is not None else None
    return Request(
        request_id=req_id,
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        block_hasher=hasher,
        priority=priority,
    )


def same_but(report: StepReport, **changes: Any) -> StepReport:
    """A copy of a report with other contents."""
    changed = copy(report)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def evicted_in(runner: StubRunner, step: int = -1) -> dict[str, int]:
    """Tokens that each request forgot after a forward."""
    return {f.req_id: f.evicted for f in runner.forwards[step]}


def plan_lengths(step: Step) -> dict[str, int]:
    """Tokens that each request attended, as the plan stated it."""
    plan = plan_of(step.output)
    attended = plan.counts.length + plan.counts.new_tokens
    return dict(zip(plan.req_ids, attended.tolist(), strict=True))
