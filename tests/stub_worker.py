"""vLLM's real scheduler over a runner without a model: what attention would read is checked slot by slot.

``StubRunner`` is our runner mixin on top of the few parts of vLLM's V1 runner that it hooks into. Its KV cache
holds marks instead of K/V: which request's cache a slot belongs to, and which token of it. ``ReferenceCache`` says,
by a second and simpler way, where every token must lie; blocks that nobody holds are poisoned after each step.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.block_table import BlockTable

from vtoken.config import VTokenConfig
from vtoken.core import audit
from vtoken.vllm_plugin.compat import EvictingRunner, VTokenScheduler, plan_of
from vtoken.vllm_plugin.kv_cache import EvictableAttentionSpec
from vtoken.vllm_plugin.plugin import AdditionalConfig
from vtoken.vllm_plugin.protocol import StepReport

S = 16
LAYERS = ("layer.0", "layer.1")
HOLE = -1
POISON = -1.0


def blocks_for(tokens: int) -> int:
    return -(-tokens // S)


class ReferenceCache:
    """Where the tokens of one request lie, one Python list, by the rules in their plainest form.

    ``cells[p]`` is the token at physical position p, HOLE where one has died; the list ends with the last position
    that the next forward may use.
    """

    def __init__(self, mark: int, prompt_length: int, budget: int, config: VTokenConfig) -> None:
        self.mark, self.prompt_length, self.budget, self.config = mark, prompt_length, budget, config
        self.cells: list[int] = []
        self.length = 0
        self.computed = 0
        self.prefilled = False
        self.evictions = 0

    @property
    def steady(self) -> bool:
        """Reduced when its prefill ended, or later."""
        return self.prefilled and self.evictions > 0

    def append(self, count: int) -> list[int]:
        """Positions of the next tokens: the lowest hole for one, the end for several."""
        positions = []
        for token in range(self.length, self.length + count):
            if HOLE in self.cells:
                assert count == 1, "several tokens were written into holes"
                positions.append(self.cells.index(HOLE))
                self.cells[positions[-1]] = token
            else:
                positions.append(len(self.cells))
                self.cells.append(token)
        self.length += count
        self.computed = count
        return positions

    def forget(self, complete: bool) -> tuple[int, int]:
        """What happens after a forward; (tokens evicted, tokens moved)."""
        chunk = self.config.prefill_chunk if self.config.prefill_evict == "chunked" else 10**9
        if self.prefilled:
            due, decodes_next = (self.length - self.prompt_length) % self.config.interval == 0, True
        else:
            due, decodes_next = complete or self.length % chunk == 0, complete
            self.prefill_end = self.length
            start = self.length - self.computed
            assert self.budget == 10**9 or start // chunk == (self.length - 1) // chunk, "computed beyond an eviction"
        self.prefilled |= complete
        surplus = len(self.cells) - (self.budget - self.config.interval)
        if not due or surplus <= 0:
            return 0, 0
        live = sorted(self.cells)
        kept = max(self.config.recent, min(self.config.grace, self.length - self.prefill_end))
        free = [t for t in live if self.config.sinks <= t < self.length - kept]
        victims = set(free[:surplus])
        assert len(victims) == surplus
        self.cells = [HOLE if t in victims else t for t in self.cells]
        extent, moved = len(live) - surplus + decodes_next, 0
        for position in range(extent, len(self.cells)):
            if self.cells[position] != HOLE:
                self.cells[self.cells.index(HOLE)] = self.cells[position]
                moved += 1
        del self.cells[extent:]
        self.evictions += 1
        return surplus, moved


def reference_budget(config: VTokenConfig, params: SamplingParams, prompt_length: int) -> int:
    """The request's budget in tokens; one that its whole sequence never reaches is as good as infinite."""
    budget = (params.extra_args or {}).get("vtoken.budget", config.budget)
    if isinstance(budget, float):
        floor = config.sinks + config.recent + config.interval
        budget = max(math.ceil(Fraction(str(budget)) * prompt_length), floor)
    return budget if budget < prompt_length + params.max_tokens else 10**9


@dataclass
class RequestState:
    """What vLLM's runner keeps of a request."""

    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens[: self.prompt_length]


@dataclass
class Forward:
    """One request's part of one forward: logical positions and physical length, and what it forgot afterwards."""

    req_id: str
    positions: range
    length: int
    blocks: list[int]
    slots: list[int]
    evicted: int = 0


class Batch:
    """vLLM's persistent batch, as far as block tables go: rows without gaps, in an order of their own."""

    def __init__(self, rows: int, width: int, tokens: int) -> None:
        table = BlockTable(S, rows, width, tokens, False, torch.device("cpu"), 1)
        for buffer in (table.block_table, table.slot_mapping):
            buffer.gpu = buffer.cpu  # as vLLM's CPU runner has it
        self.block_table = [table]
        self.req_id_to_index: dict[str, int] = {}

    @property
    def req_ids(self) -> list[str]:
        return sorted(self.req_id_to_index, key=self.req_id_to_index.__getitem__)

    def add(self, req_id: str, block_ids: list[int]) -> None:
        row = self.req_id_to_index[req_id] = len(self.req_id_to_index)
        self.block_table[0].add_row(block_ids, row)

    def remove(self, req_id: str) -> None:
        if req_id not in self.req_id_to_index:
            return
        last = self.req_ids[-1]
        row = self.req_id_to_index.pop(req_id)
        self.block_table[0].clear_row(row)
        if last != req_id:
            self.block_table[0].move_row(self.req_id_to_index[last], row)
            self.req_id_to_index[last] = row

    def swap(self, one: str, other: str) -> None:
        index = self.req_id_to_index
        self.block_table[0].swap_row(index[one], index[other])
        index[one], index[other] = index[other], index[one]


class BareRunner:
    """The parts of vLLM's V1 runner that ours hooks into."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        scheduler = vllm_config.scheduler_config
        rows, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        self.vllm_config, self.device = vllm_config, torch.device("cpu")
        self.requests: dict[str, RequestState] = {}
        self.references: dict[str, ReferenceCache] = {}
        self.input_batch = Batch(rows, blocks_for(vllm_config.model_config.max_model_len), tokens)
        self.query_start_loc = CpuGpuBuffer(rows + 1, dtype=torch.int32, device=self.device, pin_memory=False)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32)
        self.optimistic_seq_lens_cpu = torch.zeros(rows, dtype=torch.int32)
        self.forwards: list[list[Forward]] = []
        self.broken: set[str] = set()
        self.sabotage_report: Callable[[StepReport], StepReport | None] = lambda report: report
        self._rng = np.random.default_rng(7)
        self._marks = 0

    # -- what vLLM's runner does ------------------------------------------------------------------------------

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        self.kv_cache_config = kv_cache_config
        self.cache = torch.full((len(LAYERS), kv_cache_config.num_blocks, 1, S, 2), POISON)

        def write(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
            cache[slots // S, 0, slots % S] = torch.cat([key, value], dim=-1)[:, 0]

        impl = SimpleNamespace(do_kv_cache_update=write)
        layers = {name: SimpleNamespace(kv_cache=self.cache[n], impl=impl) for n, name in enumerate(LAYERS)}
        self.compilation_config = SimpleNamespace(static_forward_context=layers)

    def execute_model(self, output: Any, intermediate_tensors: Any = None) -> Any:
        self._update_states(output)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        counts = [output.num_scheduled_tokens[r] for r in self.input_batch.req_ids]
        self._prepare_inputs(output, np.array(counts, dtype=np.int32))
        self._forward(output)
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        sampled = []
        for req_id in self.input_batch.req_ids:
            state = self.requests[req_id]
            complete = state.num_computed_tokens == len(state.tokens)
            token = (31 * len(state.tokens) + len(req_id)) % 61
            sampled.append([token] if complete else [])
            state.tokens += sampled[-1]
        return ModelRunnerOutput(
            req_ids=self.input_batch.req_ids,
            req_id_to_index=dict(self.input_batch.req_id_to_index),
            sampled_token_ids=sampled,
        )

    def _update_states(self, output: Any) -> None:
        cached, batch = output.scheduled_cached_reqs, self.input_batch
        for req_id in output.finished_req_ids:
            self.requests.pop(req_id, None)
            self.references.pop(req_id, None)
            batch.remove(req_id)
        for req_id in output.preempted_req_ids or ():
            self.references.pop(req_id, None)
        staying = output.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for req_id in batch.req_id_to_index.keys() - staying:
            batch.remove(req_id)

        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.requests
            prompt = list(new.prompt_token_ids)
            self.requests[new.req_id] = RequestState(prompt, len(prompt), new.sampling_params, new.block_ids)
            self._start(new.req_id)
            batch.add(new.req_id, new.block_ids[0])
        for n, req_id in enumerate(cached.req_ids):
            state, new_blocks = self.requests[req_id], cached.new_block_ids[n]
            state.num_computed_tokens = cached.num_computed_tokens[n]
            del state.tokens[state.prompt_length + cached.num_output_tokens[n] :]
            if req_id in cached.resumed_req_ids:
                state.block_ids = new_blocks
                self._start(req_id)
            elif new_blocks is not None:
                state.block_ids[0].extend(new_blocks[0])
            if req_id not in batch.req_id_to_index:
                batch.add(req_id, state.block_ids[0])
            elif new_blocks is not None:
                batch.block_table[0].append_row(new_blocks[0], batch.req_id_to_index[req_id])
        # The order of the batch is vLLM's own affair, and need not be that of the plan.
        order = self._rng.permutation(batch.req_ids)
        for one, other in zip(order[::2], order[1::2], strict=False):
            batch.swap(one, other)

    def _prepare_inputs(self, output: Any, num_scheduled_tokens: np.ndarray) -> None:
        batch, table = self.input_batch, self.input_batch.block_table[0]
        self.query_start_loc.np[0] = 0
        np.cumsum(num_scheduled_tokens, out=self.query_start_loc.np[1 : len(num_scheduled_tokens) + 1])
        self.optimistic_seq_lens_cpu.fill_(0)
        table.slot_mapping.np.fill(-1)
        for row, req_id in enumerate(batch.req_ids):
            first = self.requests[req_id].num_computed_tokens
            positions = np.arange(first, first + num_scheduled_tokens[row])
            part = slice(self.query_start_loc.np[row], self.query_start_loc.np[row + 1])
            table.slot_mapping.np[part] = table.block_table.np[row, positions // S] * S + positions % S
            self.optimistic_seq_lens_cpu[row] = first + int(num_scheduled_tokens[row])
        self.seq_lens.copy_(self.optimistic_seq_lens_cpu)

    # -- what attention would see -----------------------------------------------------------------------------

    def _forward(self, output: Any) -> None:
        """All new tokens are written, then everything that attention would read is looked at."""
        seen = []
        for row, req_id in enumerate(self.input_batch.req_ids):
            state, count = self.requests[req_id], output.num_scheduled_tokens[req_id]
            first = state.num_computed_tokens
            state.num_computed_tokens += count
            if req_id not in self.broken:
                seen.append(self._write(req_id, row, range(first, first + count)))
        for req_id in self.broken & self.input_batch.req_id_to_index.keys():
            self._write_broken(self.input_batch.req_id_to_index[req_id])
        self.check_contents({forward.req_id: forward.blocks for forward in seen})
        for forward in seen:
            state = self.requests[forward.req_id]
            complete = state.num_computed_tokens == len(state.tokens)
            forward.evicted, moved = self.references[forward.req_id].forget(complete)
            self.expected = (self.expected[0] + forward.evicted, self.expected[1] + moved)
        self.forwards.append(seen)

    def _write(self, req_id: str, row: int, positions: range) -> Forward:
        reference, table = self.references[req_id], self.input_batch.block_table[0]
        assert reference.length == positions.start, "the query's position is not its place in the sequence"
        places = reference.append(len(positions))
        length, held = len(reference.cells), int(table.num_blocks_per_row[row])
        assert HOLE not in reference.cells
        assert int(self.seq_lens[row]) == int(self.optimistic_seq_lens_cpu[row]) == length
        assert held == blocks_for(length), f"{req_id}: {held} blocks for {length} tokens"
        blocks = table.block_table.np[row, :held].tolist()
        assert not table.block_table.np[row, held:].any(), "the tail of a block-table row must be null"
        assert all(blocks) and blocks == self.requests[req_id].block_ids[0]
        part = slice(self.query_start_loc.np[row], self.query_start_loc.np[row + 1])
        slots = table.slot_mapping.np[part].tolist()
        assert slots == [blocks[p // S] * S + p % S for p in places], f"{req_id}: a token in a wrong slot"
        self.marks[:, slots, 0] = reference.mark
        self.marks[:, slots, 1] = positions
        return Forward(req_id, positions, length, blocks, slots)

    def _write_broken(self, row: int) -> None:
        """What a failed request computes is nobody's K/V, wherever vLLM's slot mapping sends it."""
        part = slice(self.query_start_loc.np[row], self.query_start_loc.np[row + 1])
        slots = self.input_batch.block_table[0].slot_mapping.np[part]
        self.marks[:, slots[slots >= 0]] = POISON

    @property
    def marks(self) -> np.ndarray:
        """The cache, slot by slot: shape [layers, slots, 2]."""
        return self.cache.numpy().reshape(len(LAYERS), -1, 2)

    def check_contents(self, blocks_of: dict[str, list[int]]) -> None:
        """Every live token of these requests lies where the reference says, in every layer."""
        if not blocks_of:
            return
        references = [self.references[req_id] for req_id in blocks_of]
        sizes = [len(reference.cells) for reference in references]
        slots = np.concatenate(
            [
                (np.array(blocks)[:, None] * S + np.arange(S)).ravel()[:size]
                for blocks, size in zip(blocks_of.values(), sizes, strict=True)
            ]
        )
        tokens = np.concatenate([reference.cells for reference in references])
        owners = np.repeat([reference.mark for reference in references], sizes)
        wrong = (self.marks[:, slots] != np.stack([owners, tokens], axis=-1)).any(axis=(0, 2)) & (tokens != HOLE)
        where = [(int(owners[n]), int(tokens[n])) for n in np.flatnonzero(wrong)]
        assert not where, f"wrong K/V of {sorted(blocks_of)}: (mark, token) {where}"

    def _start(self, req_id: str) -> None:
        if req_id in self.broken:
            return
        state, config = self.requests[req_id], self.vllm_config.additional_config.vtoken
        self._marks += 1
        budget = reference_budget(config, state.params, state.prompt_length)
        self.references[req_id] = ReferenceCache(self._marks, state.prompt_length, budget, config)

    expected = (0, 0)


class StubRunner(EvictingRunner, BareRunner):  # type: ignore[misc]
    """Our mixin where it belongs."""

    def run(self, output: Any) -> ModelRunnerOutput:
        """A step of the worker, as vLLM's engine core has it."""
        self.expected = (0, 0)
        result = self.execute_model(output)
        if result is None:
            result = self.sample_tokens(None)
        report = result.vtoken_report
        if not self.broken:
            assert (report.evicted, report.moved) == self.expected
        result.vtoken_report = self.sabotage_report(report)
        return result


@dataclass
class Step:
    """What happened in one step: the scheduler's output, the worker's report, the requests that ended, and why."""

    output: Any
    report: StepReport
    finished: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)


class StubEngine:
    """Scheduler and stub worker, one step at a time; everything that can be compared is compared after each."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: VTokenConfig,
        num_blocks: int = 1000,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 65536,
    ) -> None:
        cache_config = CacheConfig(block_size=S, enable_prefix_caching=False)
        cache_config.num_gpu_blocks = num_blocks
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=model_config.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        )
        vllm_config = VllmConfig(
            model_config=model_config,
            cache_config=cache_config,
            scheduler_config=scheduler_config,
            additional_config=AdditionalConfig(config, {}),
        )
        spec = EvictableAttentionSpec(block_size=S, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(list(LAYERS), spec)]
        kv_cache_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.config = config
        self.scheduler = VTokenScheduler(
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

    def add(self, req_id: str, prompt: int, outputs: int, budget: int | float | None = None) -> None:
        extra = None if budget is None else {"vtoken.budget": budget}
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=0.0, extra_args=extra)
        tokens = [(7 * n + len(req_id)) % 61 for n in range(prompt)]
        self.scheduler.add_request(
            Request(request_id=req_id, prompt_token_ids=tokens, sampling_params=params, pooling_params=None)
        )

    def abort(self, *req_ids: str) -> None:
        self.scheduler.finish_requests(list(req_ids), RequestStatus.FINISHED_ABORTED)

    def step(self, before_update: Callable[[], None] = lambda: None) -> Step:
        """One step; ``before_update`` runs where vLLM processes aborts."""
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self._check_steady_growth(output)
        result = self.runner.run(output)
        report = result.vtoken_report
        before_update()
        outputs = self.scheduler.update_from_output(output, result)
        step = Step(output, report)
        for one in (o for group in outputs.values() for o in group.outputs):
            step.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
            if one.finish_reason is not None:
                step.finished[one.request_id] = str(one.finish_reason)
        assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "vtoken_report")
        self.check()
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
        runner, table, ledger = self.runner, self.runner.vtoken.table, self.manager.ledger
        stats = self.scheduler.vtoken.stats
        assert stats.tokens_moved <= stats.tokens_evicted
        assert not self.scheduler.vtoken.frees_pending
        held = {r: [b.block_id for b in blocks] for r, blocks in self.manager.req_to_blocks.items() if blocks}
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        assert len(free) == self.pool.get_num_free_blocks()
        owned = [block for blocks in held.values() for block in blocks]
        assert sorted(owned + free) == list(range(1, self.pool.num_gpu_blocks)), "a block was lost or doubled"
        assert all(b.ref_cnt == 1 for blocks in self.manager.req_to_blocks.values() for b in blocks)
        assert not any(block.ref_cnt for block in self.pool.free_block_queue.get_all_free_blocks())
        if len(held) <= 32:  # the audit itself is slow
            audit.check_mapping(table)
        pending, live, blocks_of = dict(runner._vtoken_truncations), 0, {}
        for request in self.scheduler.running:
            req_id = request.request_id
            if req_id in runner.broken or req_id not in runner.references:
                continue
            reference, blocks = runner.references[req_id], held[req_id]
            blocks_of[req_id] = blocks
            assert blocks == runner.requests[req_id].block_ids[0][: pending.get(req_id)]
            assert blocks == table.block_ids(req_id) and len(blocks) == blocks_for(len(reference.cells))
            row, counted = int(table.rows([req_id])[0]), ledger._row_of[req_id]
            assert table.logical_at[row, : len(reference.cells)].tolist() == reference.cells
            tokens = len(reference.cells) - reference.cells.count(HOLE)
            live += tokens
            assert ledger.length[counted] == table.num_live[row] == tokens
            assert ledger.epoch[counted] == table.epoch[row] == reference.evictions
            assert ledger.blocks[counted] == table.num_blocks[row] == len(blocks)
            assert table.length[row] == reference.length == request.num_computed_tokens
            assert ledger.returned[counted] == reference.length - tokens
            if reference.steady:
                assert len(reference.cells) <= reference.budget
        runner.check_contents(blocks_of)
        if not runner.broken:
            assert self.scheduler.vtoken.live_tokens() == live
        runner.cache[:, [0, *free]] = POISON

    def check_empty(self) -> None:
        assert self.pool.get_num_free_blocks() == self.empty_pool
        assert self.scheduler.vtoken.live_tokens() == 0 and not list(self.runner.vtoken.table.req_ids)
        assert not self.manager.ledger._row_of and not self.runner.requests

    def _check_steady_growth(self, output: Any) -> None:
        """With interval 1, whoever has once been reduced is given no block ever again."""
        cached = output.scheduled_cached_reqs
        if self.config.interval > 1:
            return
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            reference = self.runner.references.get(req_id)
            if req_id not in cached.resumed_req_ids and reference is not None and reference.steady:
                assert blocks is None, f"{req_id} allocates in steady state"


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
