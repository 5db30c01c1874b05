"""Our runner mixin over the few parts of vLLM's V1 runner that it hooks into, with marks instead of K/V.

A mark says which request's cache a slot belongs to, and which token of it. Whatever attention would read is compared
with a ``ReferenceCache``: each live token once, in every layer, and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from reference_cache import HOLE, AppendingReference, ReferenceCache, S, blocks_for, reference_budget, reference_for
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.block_table import BlockTable

from vtoken.core.observed import AttendedQueries
from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import CopyEngine, InlineCopyEngine
from vtoken.kernels.relocation import Relocate
from vtoken.vllm_plugin import compat
from vtoken.vllm_plugin.compat import EvictingRunner, plan_of
from vtoken.vllm_plugin.protocol import StepReport

LAYERS = ("layer.0", "layer.1")
POISON = -1.0


class LazyCopyEngine(CopyEngine):
    """Copies as late as an engine may: when it is waited for. Whoever writes over a source before is found out."""

    def __init__(self, relocate: Relocate) -> None:
        self._relocate = relocate
        self._launched: list[tuple[Ints, Ints]] = []

    def launch(self, sources: Ints, destinations: Ints) -> None:
        self._launched.append((sources.copy(), destinations.copy()))

    def wait(self) -> None:
        for sources, destinations in self._launched:
            self._relocate(sources, destinations)
        self._launched.clear()

    finish = wait


EagerCopyEngine = InlineCopyEngine
"""Copies as early as an engine may: when it is launched. Whoever launches before a source is written is found out."""


class QueryRecorder:
    """In the place of the attention observer: keeps what the forward is told about holes."""

    heads = 1
    queries: AttendedQueries

    def begin(self, queries: AttendedQueries, block_table: np.ndarray) -> None:
        self.queries, self.block_table = queries, block_table

    def take(self) -> np.ndarray:
        raise AssertionError("nobody's attention is observed here")


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
    victims: list[int] = field(default_factory=list)

    @property
    def evicted(self) -> int:
        return len(self.victims)


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
        self.expected = (0, 0)
        self.recorder: QueryRecorder | None = None
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
            self.clear_new_blocks(new.block_ids[0])
            self._start(new.req_id)
            batch.add(new.req_id, new.block_ids[0])
        for n, req_id in enumerate(cached.req_ids):
            state, new_blocks = self.requests[req_id], cached.new_block_ids[n]
            state.num_computed_tokens = cached.num_computed_tokens[n]
            self.clear_new_blocks(new_blocks[0] if new_blocks is not None else [])
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
        self._check_reads(output, seen)
        for forward in seen:
            state = self.requests[forward.req_id]
            complete = state.num_computed_tokens == len(state.tokens)
            forward.victims, moved = self.references[forward.req_id].forget(complete)
            self.expected = (self.expected[0] + forward.evicted, self.expected[1] + moved)
        self.forwards.append(seen)

    def _write(self, req_id: str, row: int, positions: range) -> Forward:
        reference, table = self.references[req_id], self.input_batch.block_table[0]
        assert reference.length == positions.start, "the query's position is not its place in the sequence"
        places = reference.append(len(positions))
        length, held = len(reference.cells), int(table.num_blocks_per_row[row])
        assert int(self.seq_lens[row]) == int(self.optimistic_seq_lens_cpu[row]) == length
        assert held == blocks_for(length), f"{req_id}: {held} blocks for {length} tokens"
        blocks = table.block_table.np[row, :held].tolist()
        assert not table.block_table.np[row, held:].any(), "the tail of a block-table row must be null"
        assert all(blocks) and blocks == self.requests[req_id].block_ids[0]
        if isinstance(reference, AppendingReference):
            reference.blocks += blocks[len(reference.blocks) :]
            assert blocks == reference.blocks
        part = slice(self.query_start_loc.np[row], self.query_start_loc.np[row + 1])
        slots = table.slot_mapping.np[part].tolist()
        assert slots == [blocks[p // S] * S + p % S for p in places], f"{req_id}: a token in a wrong slot"
        self.marks[:, slots, 0] = reference.mark
        self.marks[:, slots, 1] = positions
        return Forward(req_id, positions, length, blocks, slots)

    def _check_reads(self, output: Any, seen: list[Forward]) -> None:
        """Of the positions below its length, each request with holes is told to leave the dead ones out."""
        if self.recorder is None:
            return
        queries, index_of = self.recorder.queries, self.input_batch.req_id_to_index
        holed = {int(index): n for n, index in enumerate(queries.holed.index)}
        assert len(holed) == len(queries.holed.index) == len(queries.live)
        assert queries.total == output.total_num_scheduled_tokens and not len(queries.observed.index)
        for forward in seen:
            reference, index = self.references[forward.req_id], index_of[forward.req_id]
            assert self.recorder.block_table[index, : len(forward.blocks)].tolist() == forward.blocks
            slots = (np.array(forward.blocks)[:, None] * S + np.arange(S)).ravel()[: forward.length]
            assert (index in holed) == (HOLE in reference.cells)
            if index in holed:
                n = holed.pop(index)
                run = [int(part[n]) for part in (queries.holed.first, queries.holed.count, queries.holed.attended)]
                assert run == [self.query_start_loc.np[index], len(forward.positions), forward.length]
                slots = slots[queries.live[n, : forward.length]]
            wanted = [[reference.mark, token] for token in reference.live]
            for layer in self.marks[:, slots]:
                assert sorted(layer.tolist()) == wanted, f"{forward.req_id} reads other tokens than it should"
        assert not holed, "an attended request is none of this forward's"

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
                (np.array(blocks, dtype=np.int64)[:, None] * S + np.arange(S)).ravel()[:size]
                for blocks, size in zip(blocks_of.values(), sizes, strict=True)
            ]
        )
        tokens = np.concatenate([np.array(reference.cells, dtype=np.int64) for reference in references])
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
        self.references[req_id] = reference_for(self._marks, state.prompt_length, budget, config)

    def clear_new_blocks(self, blocks: list[int]) -> None:
        """vLLM may clear a block for its new owner before the forward; here it is made useless."""
        self.cache[:, blocks] = POISON


class StubRunner(EvictingRunner, BareRunner):  # type: ignore[misc]
    """Our mixin where it belongs."""

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        config = self.vllm_config.additional_config.vtoken
        self.recorder = QueryRecorder() if config.reclaim != "fill" else None

        def engine_for(device_type: str, relocate: Relocate, mode: str) -> CopyEngine:
            self.relocate = relocate
            return EagerCopyEngine(relocate)

        # There is no attention backend here to lay an observer over.
        with (
            patch.object(compat, "_observe", lambda *args: self.recorder),
            patch.object(compat, "copy_engine_for", engine_for),
        ):
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)

    def use_copies(self, kind: Callable[[Relocate], CopyEngine]) -> CopyEngine:
        """Copy tokens in another way from now on."""
        self.vtoken._copies = engine = kind(self.relocate)
        return engine

    @property
    def copies_are_made(self) -> bool:
        """Between two steps, too."""
        return isinstance(self.vtoken._copies, EagerCopyEngine)

    def run(self, output: Any) -> ModelRunnerOutput:
        """A step of the worker, as vLLM's engine core has it."""
        self.expected = (0, 0)
        result = self.execute_model(output)
        if result is None:
            result = self.sample_tokens(None)
        report = result.vtoken_report
        self._follow(plan_of(output).granted, report)
        if not self.broken:
            assert (report.evicted, report.moved) == self.expected
        result.vtoken_report = self.sabotage_report(report)
        return result

    def _follow(self, granted: list[int], report: StepReport) -> None:
        """Do to the references' blocks what the worker says that it has done, as far as that was allowed."""
        adopted = [block for change in report.changes.values() for block in change.adopted]
        assert sorted(adopted) == sorted(granted[: len(adopted)]), "a block was adopted that was not granted, or twice"
        for req_id, reference in self.references.items():
            if isinstance(reference, AppendingReference) and req_id not in self.broken:
                moved = reference.follow(report.changes.get(req_id))
                self.expected = (self.expected[0], self.expected[1] + moved)
        assert report.changes.keys() <= self.references.keys() | self.broken
        assert self.recorder is not None or not report.changes
