"""The few parts of vLLM's V1 runner that our mixin hooks into, with marks instead of K/V.

A mark says whose K/V a slot holds, and of which token. Whatever attention would read is compared with a
``ReferenceCache``: each live token once, in every layer, and nothing else.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from content_marks import START, ContentMarks
from query_recorder import QueryRecorder
from reference_cache import (
    HOLE,
    AppendingReference,
    CachingReference,
    PlacedReference,
    ReferenceCache,
    S,
    blocks_for,
    reference_budget,
    reference_for,
    settings_for,
)
from stub_batch import Batch, Forward, RequestState
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.utils import CpuGpuBuffer

from vtoken.vllm_plugin.protocol import StepReport

LAYERS = ("layer.0", "layer.1")
POISON = -1.0


def sampled_token(req_id: str, length: int) -> int:
    """What the model says after so many tokens."""
    return (31 * length + len(req_id)) % 61


class BareRunner:
    """The parts of vLLM's V1 runner that ours hooks into."""

    pool: Any
    """Of the scheduler: its blocks."""
    is_writable: Callable[[int], bool]
    """Whether a block was neither shared nor cached when the step was scheduled."""
    content: ContentMarks | None = None
    """With a prefix cache, K/V is told apart by what it was computed from, else by request."""

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
        self.hits: list[tuple[str, int]] = []
        self.told_late = False
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
            sampled.append([sampled_token(req_id, len(state.tokens))] if complete else [])
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
            prompt, hit = list(new.prompt_token_ids), new.num_computed_tokens
            self.requests[new.req_id] = RequestState(prompt, len(prompt), new.sampling_params, new.block_ids, hit)
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
                self.clear_new_blocks(new_blocks[0])
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

    def _start(self, req_id: str) -> None:
        """A request begins with an empty cache, or with what it found in the prefix cache."""
        state = self.requests[req_id]
        hit = state.num_computed_tokens
        assert hit % S == 0
        self.hits.append((req_id, hit))
        self.clear_new_blocks(state.block_ids[0][hit // S :])
        if req_id in self.broken:
            return
        config = settings_for(self.vllm_config.additional_config.vtoken, state.params)
        budget = reference_budget(config, state.params, state.prompt_length)
        if self.content is not None:
            marks = self.content.after(START, state.tokens[:hit])
            mark = self.content.of_a_life()
            self.references[req_id] = CachingReference(mark, state.prompt_length, budget, config, hit, marks)
            return
        assert not hit
        self._marks += 1
        self.references[req_id] = reference_for(self._marks, state.prompt_length, budget, config)

    def clear_new_blocks(self, blocks: list[int]) -> None:
        """vLLM may clear a block for its new owner before the forward; here it is made useless."""
        self.cache[:, blocks] = POISON

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
        self.forwards.append(seen)

    def _write(self, req_id: str, row: int, positions: range) -> Forward:
        reference, table = self.references[req_id], self.input_batch.block_table[0]
        assert reference.length == positions.start, "the query's position is not its place in the sequence"
        places = reference.append(self._marks_for(req_id, positions))
        length, held = int(self.seq_lens[row]), int(table.num_blocks_per_row[row])
        assert int(self.optimistic_seq_lens_cpu[row]) == length
        assert not isinstance(reference, PlacedReference) or length == len(reference.cells)
        self._check_held_blocks(reference, held, length)
        blocks = table.block_table.np[row, :held].tolist()
        assert not table.block_table.np[row, held:].any(), "the tail of a block-table row must be null"
        assert all(blocks) and blocks == self.requests[req_id].block_ids[0]
        if isinstance(reference, AppendingReference):
            reference.blocks += blocks[len(reference.blocks) :]
            assert blocks == reference.blocks
        part = slice(self.query_start_loc.np[row], self.query_start_loc.np[row + 1])
        slots = table.slot_mapping.np[part].tolist()
        if places is None:
            self._check_new_places(req_id, positions, blocks, slots)
        else:
            assert slots == [blocks[p // S] * S + p % S for p in places], f"{req_id}: a token in a wrong slot"
        self.marks[:, slots] = reference.content(positions)
        return Forward(req_id, positions, length, blocks, slots)

    def _check_held_blocks(self, reference: ReferenceCache, held: int, length: int) -> None:
        """As many as the positions need; more only if the scheduler had yet to be told what the last eviction left.

        It counts on the positions before that, and does not know that the request may have got a block for the next.
        """
        unheard = reference.reduced_from + 1 if self.told_late else 0
        most = blocks_for(max(length, unheard)) + self.told_late * reference.grown_by
        assert blocks_for(length) <= held <= most, f"{held} blocks for {length} tokens"

    def _marks_for(self, req_id: str, positions: range) -> list[int]:
        """Of tokens that are about to be computed; what comes after a loss is like nothing else."""
        reference = self.references[req_id]
        if not isinstance(reference, CachingReference) or reference.evictions:
            return [reference.mark] * len(positions)
        assert self.content is not None
        prefix = reference.marks[-1] if reference.marks else START
        return self.content.after(prefix, self.requests[req_id].tokens[positions.start : positions.stop])

    def _check_new_places(self, req_id: str, positions: range, blocks: list[int], slots: list[int]) -> None:
        """Where nothing is missing, tokens lie in order; into a shared or cached block each is written once only."""
        reference, table = self.references[req_id], self.vtoken.table
        if not reference.evictions:
            assert slots == [blocks[p // S] * S + p % S for p in positions], f"{req_id}: a token in a wrong slot"
        else:
            own = blocks[int(table.read_only[table.rows([req_id])[0]]) :]
            assert {slot // S for slot in slots} <= set(own), f"{req_id}: a new token in a block that is not its own"
        held = [slot for slot in slots if not self.is_writable(slot // S)]
        if held:
            assert not reference.evictions, f"{req_id} writes into a cached block"
            assert (self.marks[:, held] == POISON).all(), f"{req_id} writes over a cached token"

    def _check_reads(self, output: Any, seen: list[Forward]) -> None:
        """Of the positions below its length, each request with holes is told to leave the dead ones out."""
        if self.recorder is None:
            assert self.content is None, "nobody can be told about holes in shared blocks"
            return
        queries, index_of = self.recorder.queries, self.input_batch.req_id_to_index
        attention = self.vtoken._scores.attention
        holed = {int(index): n for n, index in enumerate(queries.holed.index)}
        assert len(holed) == len(queries.holed.index) == len(queries.live)
        assert queries.total == output.total_num_scheduled_tokens or not queries
        assert attention or not len(queries.observed.index)
        self._check_spared(seen)
        for forward in seen:
            reference, index = self.references[forward.req_id], index_of[forward.req_id]
            assert self.recorder.block_table[index, : len(forward.blocks)].tolist() == forward.blocks
            slots = (np.array(forward.blocks)[:, None] * S + np.arange(S)).ravel()[: forward.length]
            live = self.recorder.live(index, forward.length)
            if isinstance(reference, PlacedReference):
                assert (index in holed) == (HOLE in reference.cells)
            else:
                self._check_density(forward, live)
            if index in holed:
                n = holed.pop(index)
                run = [int(part[n]) for part in (queries.holed.first, queries.holed.count, queries.holed.attended)]
                assert run == [self.query_start_loc.np[index], len(forward.positions), forward.length]
                assert not live.all(), f"{forward.req_id} has no holes"
            wanted = reference.content(reference.live)
            for layer in self.marks[:, slots[live]]:
                found = layer[np.argsort(layer[:, 1], kind="stable")]
                assert np.array_equal(found, wanted), f"{forward.req_id} reads other tokens than it should"
        assert not holed, "an attended request is none of this forward's"

    def _check_spared(self, seen: list[Forward]) -> None:
        """Where every query can be attended beside the backend it is, and only then those that need not be."""
        assert self.recorder is not None
        if self.broken:
            return
        queries, index_of = self.recorder.queries, self.input_batch.req_id_to_index
        observed, holed = set(queries.observed.index.tolist()), set(queries.holed.index.tolist())
        expected, everybody = set(), True
        for forward in seen:
            index, single = index_of[forward.req_id], len(forward.positions) == 1
            needed = index in holed or (single and index in observed)
            everybody &= needed or (single and self.references[forward.req_id].evictions > 0)
            if not needed:
                expected.add((index, int(self.query_start_loc.np[index]), 1, forward.length))
        spared = queries.spared
        runs = zip(
            *(part.tolist() for part in (spared.index, spared.first, spared.count, spared.attended)), strict=True
        )
        assert set(runs) == (expected if everybody else set()), "the backend is spared other queries than it could be"

    def _check_density(self, forward: Forward, live: np.ndarray) -> None:
        """No block without a live token, and in ``fill`` no hole behind the blocks that nobody may write."""
        assert np.logical_or.reduceat(live, np.arange(0, forward.length, S)).all(), "a dead block stayed"
        table = self.vtoken.table
        if table.recycling:
            private = int(table.read_only[table.rows([forward.req_id])[0]]) * S
            assert live[private:].all(), f"{forward.req_id} has a hole in a block of its own"

    def _write_broken(self, row: int) -> None:
        """What a failed request computes is nobody's K/V, wherever vLLM's slot mapping sends it."""
        part = slice(self.query_start_loc.np[row], self.query_start_loc.np[row + 1])
        slots = self.input_batch.block_table[0].slot_mapping.np[part]
        self.marks[:, slots[slots >= 0]] = POISON

    @property
    def marks(self) -> np.ndarray:
        """The cache, slot by slot: shape [layers, slots, 2]."""
        return self.cache.numpy().reshape(len(LAYERS), -1, 2)

    def cells_of(self, req_id: str) -> list[int]:
        """The token at each position of a request: foreseen, or where the worker's table has it."""
        reference, table = self.references[req_id], self.vtoken.table
        if isinstance(reference, PlacedReference):
            return reference.cells
        row = int(table.rows([req_id])[0])
        cells: list[int] = table.logical_at[row, : table.num_blocks[row] * S].tolist()
        assert sorted(token for token in cells if token != HOLE) == reference.live
        return cells

    def check_contents(self, blocks_of: dict[str, list[int]]) -> None:
        """Every live token of these requests lies where it should, in every layer."""
        if not blocks_of:
            return
        cells = [self.cells_of(req_id) for req_id in blocks_of]
        slots = np.concatenate(
            [
                (np.array(blocks, dtype=np.int64)[:, None] * S + np.arange(S)).ravel()[: len(part)]
                for blocks, part in zip(blocks_of.values(), cells, strict=True)
            ]
        )
        wanted = np.concatenate([self.references[r].content(part) for r, part in zip(blocks_of, cells, strict=True)])
        wrong = (self.marks[:, slots] != wanted).any(axis=(0, 2)) & (np.concatenate(cells) != HOLE)
        where = [tuple(wanted[n].tolist()) for n in np.flatnonzero(wrong)]
        assert not where, f"wrong K/V of {sorted(blocks_of)}: (mark, token) {where}"
