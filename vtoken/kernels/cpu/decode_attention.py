"""``decode_attention_reference`` for vLLM's CPU backend, compiled.

Flash decoding: the requests' KV heads, laid end to end, are cut into as many equal runs of blocks as there are
threads. A softmax that a cut goes through is computed by two threads or more, each over its own tokens with the
largest logit that it met there, and put together once all of them are done.

Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtoken.kernels import openmp
from vtoken.kernels.cpu.decode_plan import PIECE, divide
from vtoken.kernels.cpu.parts import (
    LOG2_E,
    Shape,
    add_mass,
    align,
    check_mass,
    exponentials,
    float_rows,
    live_exponentials,
    live_maximum,
    live_rows,
    load_queries,
    maximum,
    part_logits,
    part_values,
    view_keys,
    view_values,
)
from vtoken.kernels.cpu.vectors import array_at, exp2, floats_at, record_of
from vtoken.kernels.jit import carray, cfunc, njit

_LAYER = (
    "query query_row query_head keys keys_block keys_head values values_block values_head output output_row "
    "output_head mass mass_lane"
)
_STEP = "table table_row live live_row mass_offsets pieces lane_pieces lanes divided scratch scratch_lane states"
_ARGUMENTS = record_of(f"{_LAYER} {_STEP}", floats="factor")
"""Addresses, and distances in bytes. ``mass`` is 0 if there is none to add to; ``live`` is read by masked kernels."""

_NO_MASS = 2**62
"""Numbers of mass that a plan without offsets asks for: more than there ever are."""


@dataclass(frozen=True)
class _Scratch:
    """Where things lie, in float32 numbers: in a thread's scratch its queries [rows, D] and then parts, in a part
    its exponentials [rows, tokens] and the largest logits [rows] that these are relative to, in a state the sums of
    the values [rows, D], the largest logits [rows] and the totals [rows]."""

    shape: Shape

    @property
    def parts(self) -> int:
        return align(self.shape.rows * self.shape.head_size)

    @property
    def part_largest(self) -> int:
        return self.shape.rows * self.shape.part

    @property
    def part(self) -> int:
        return align(self.part_largest + self.shape.rows)

    @property
    def largest(self) -> int:
        return self.shape.rows * self.shape.head_size

    @property
    def total(self) -> int:
        return self.largest + self.shape.rows

    @property
    def state(self) -> int:
        return align(self.total + self.shape.rows)


def _attending(shape: Shape, masked: bool) -> Any:
    """Compile ``attend(arguments, piece, scratch)``, the first half of a piece's work.

    Until a live position is met, the largest logit is that of nothing, and with it the total stays 0: parts and whole
    pieces of dead positions need no case of their own. Their blocks are read like any others, since skipping one
    would leave the next to be waited for.
    """
    places = _Scratch(shape)
    queries, head_size, part_tokens, block_size = shape.queries, shape.head_size, shape.part, shape.block_size
    parts_at, part_largest_at, part_numbers = places.parts, places.part_largest, places.part
    largest_at, total_at, state_numbers = places.largest, places.total, places.state
    load, logits, add_values = load_queries(queries, head_size), part_logits(shape), part_values(shape)
    part_blocks, nothing = shape.blocks_per_part, np.float32(-np.inf)

    @njit(error_model="numpy")
    def attend(arguments, piece, scratch):  # type: ignore[no-untyped-def]
        """Leave a piece's exponentials in scratch, and its sums in its state."""
        table = arguments.table + piece.request * arguments.table_row + 4 * piece.block
        keys = arguments.keys + piece.head * arguments.keys_head
        values = arguments.values + piece.head * arguments.values_head
        live = arguments.live + piece.request * arguments.live_row + piece.block * block_size
        first_head = piece.head * queries
        load(
            arguments.query + piece.request * arguments.query_row + first_head * arguments.query_head,
            arguments.query_head,
            np.float32(arguments.factor),
            scratch,
        )
        sums = arguments.states + 4 * piece.state * state_numbers
        state = floats_at(sums)
        for n in range(state_numbers):
            state[n] = nothing if largest_at <= n < total_at else np.float32(0)
        for first in range(0, piece.tokens, part_tokens):
            address = scratch + 4 * (parts_at + (piece.part + first // part_tokens) * part_numbers)
            part = floats_at(address)
            tokens = min(part_tokens, piece.tokens - first)
            blocks = table + 4 * (first // block_size)
            numbers = array_at(blocks, np.int32)
            first_value = values + numbers[0] * arguments.values_block
            more = first + part_tokens < piece.tokens
            next_key = keys + numbers[part_blocks if more else 0] * arguments.keys_block
            used = (tokens + block_size - 1) // block_size
            logits(scratch, keys, arguments.keys_block, blocks, used, address, first_value)
            for row in range(queries):
                before = state[largest_at + row]
                row_logits = address + 4 * row * part_tokens
                if masked:
                    largest = live_maximum(row_logits, live + first, tokens, before)
                else:
                    largest = maximum(row_logits, tokens, before)
                if largest != before:
                    shrink = exp2(before - largest)
                    state[largest_at + row] = largest
                    state[total_at + row] *= shrink
                    for d in range(row * head_size, (row + 1) * head_size):
                        state[d] *= shrink
                part[part_largest_at + row] = largest
                if masked:
                    state[total_at + row] += live_exponentials(row_logits, live + first, tokens, largest)
                else:
                    state[total_at + row] += exponentials(row_logits, tokens, largest)
            add_values(address, values, arguments.values_block, blocks, tokens, sums, next_key)

    return attend


def _finishing(shape: Shape) -> Any:
    """Compile ``finish(arguments, piece, scratch, lane)``, the second half: the softmax must be whole."""
    places = _Scratch(shape)
    queries, rows, head_size = shape.queries, shape.rows, shape.head_size
    part_tokens, block_size, nothing = shape.part, shape.block_size, np.float32(-np.inf)
    parts_at, part_largest_at, part_numbers = places.parts, places.part_largest, places.part
    largest_at, total_at, state_numbers = places.largest, places.total, places.state
    add = add_mass(queries, part_tokens)

    @njit(error_model="numpy")
    def finish(arguments, piece, scratch, lane):  # type: ignore[no-untyped-def]
        """Write a softmax's output, if the piece is its first, and add the mass of the piece's tokens."""
        states = floats_at(arguments.states + 4 * piece.first_state * state_numbers)
        end = piece.states * state_numbers
        rows_of = floats_at(scratch)  # the queries are not needed any more: per row a largest, an inverse and a share
        for row in range(queries):
            largest = nothing
            for state in range(0, end, state_numbers):
                largest = max(largest, states[state + largest_at + row])
            total = np.float32(0)
            for state in range(0, end, state_numbers):
                total += states[state + total_at + row] * exp2(states[state + largest_at + row] - largest)
            rows_of[row], rows_of[rows + row] = largest, np.float32(1) / total
            if piece.block == 0:
                head = piece.head * queries + row
                output = floats_at(
                    arguments.output + piece.request * arguments.output_row + head * arguments.output_head
                )
                for state in range(0, end, state_numbers):
                    share = exp2(states[state + largest_at + row] - largest) / total
                    for d in range(head_size):
                        term = share * states[state + row * head_size + d]
                        output[d] = term if state == 0 else output[d] + term
        if arguments.mass == 0:
            return
        offset = array_at(arguments.mass_offsets, np.int64)[piece.request]
        if offset < 0:
            return
        mass = arguments.mass + lane * arguments.mass_lane + 4 * (offset + piece.block * block_size)
        for first in range(0, piece.tokens, part_tokens):
            address = scratch + 4 * (parts_at + (piece.part + first // part_tokens) * part_numbers)
            part = floats_at(address)
            for row in range(queries):
                shrink = exp2(part[part_largest_at + row] - rows_of[row])
                rows_of[2 * rows + row] = rows_of[rows + row] * shrink
            add(address, scratch + 8 * rows, mass + 4 * first, min(part_tokens, piece.tokens - first))

    return finish


@lru_cache
def _compile(shape: Shape, masked: bool) -> Any:
    attend, finish = _attending(shape, masked), _finishing(shape)
    thread_number, team_size, barrier = openmp.thread_number, openmp.team_size, openmp.barrier

    @cfunc("void(voidptr)", error_model="numpy")
    def body(data):  # type: ignore[no-untyped-def]
        arguments = carray(data, 1, _ARGUMENTS)[0]
        lane_pieces, pieces = array_at(arguments.lane_pieces, np.int64), array_at(arguments.pieces, PIECE)
        thread, team = thread_number(), team_size()
        # Once for what a thread has to do on its own, and once more for what it had to wait for others for.
        for merging in range(1 + arguments.divided):
            if merging:
                barrier()
            for lane in range(thread, arguments.lanes, team):
                scratch = arguments.scratch + lane * arguments.scratch_lane
                for n in range(lane_pieces[lane], lane_pieces[lane + 1]):
                    if not merging:
                        attend(arguments, pieces[n], scratch)
                    if merging == (pieces[n].states > 1):
                        finish(arguments, pieces[n], scratch, lane)

    return body


class DecodeAttention:
    """``decode_attention_reference`` over the layers of one KV cache, which share their shape, strides and dtype.

    Call ``plan`` once per step, then the object itself for each layer. Results depend on how the work is divided,
    that is on the lengths in the batch and on the number of threads, in the last bits only, and on nothing else.

    Args:
        key_cache, value_cache: a layer's cache, [blocks, S, H, D] each, float32 or bfloat16: per block and head K as
            [D, S] and V as [S, D], blocks and heads at any distance.
        num_query_heads: Hq, a multiple of H.
        masked: ``plan`` may be given a mask. What is compiled then reads one always, so that a process compiles one
            kernel, and those that never see a mask do not pay for it.

    Attributes:
        lanes: lanes of ``mass`` that are added to, one per thread.

    Raises:
        ValueError: the cache's layout, dtype or sizes are not those of vLLM's CPU backend.
    """

    def __init__(self, key_cache: Tensor, value_cache: Tensor, num_query_heads: int, *, masked: bool = False) -> None:
        view_keys(key_cache), view_values(value_cache)
        _, size, self._heads, head_size = key_cache.shape
        self._shape = Shape(size, head_size, num_query_heads // self._heads, key_cache.dtype == torch.bfloat16)
        self._places = _Scratch(self._shape)
        self._masked = masked
        self._body = _compile(self._shape, masked)
        self.lanes = openmp.num_threads()
        self._arguments = np.zeros(1, dtype=_ARGUMENTS)
        self._address = self._arguments.ctypes.data
        numbers, layer = self._arguments.view(np.int64), len(_LAYER.split())
        self._layer, self._step = numbers[:layer], numbers[layer:-1]
        self._planned, self._mass_end = 0, 0
        self._scratch = self._states = torch.empty(0)
        self._kept: tuple[Any, ...] = ()

    def plan(self, lengths: Any, block_table: Any, mass_offsets: Any = None, live: Any = None) -> None:
        """Divide a step's work among the threads; the tensors are read again by each call.

        Args:
            lengths: positions of each request, [R], at least 1 each.
            block_table: [R, W], int32.
            mass_offsets: where each request's position 0 lies in ``mass``, [R], or -1 if its mass is not wanted;
                None if no mass is wanted.
            live: bool [R, P], P >= the largest length, True where a position takes part; None: all do. The keys of
                the others may be anything, their values anything finite.

        Raises:
            ValueError: the mask is too small, or the object was built without ``masked``.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        table = np.asarray(block_table, dtype=np.int32)
        plan = divide(lengths, self._heads, self.lanes, self._shape.block_size, self._shape.blocks_per_part)
        scratch_lane = self._places.parts + plan.parts * self._places.part
        if self._scratch.numel() < self.lanes * scratch_lane:
            self._scratch = torch.empty(self.lanes * scratch_lane * 5 // 4)
        if self._states.numel() < plan.states * self._places.state:
            self._states = torch.empty(plan.states * self._places.state)
        offsets = np.asarray(() if mass_offsets is None else mass_offsets, dtype=np.int64)
        mask = live_rows(live, len(lengths), int(lengths.max(initial=0)), self._masked)
        self._step[:] = (
            *(table.ctypes.data, table.strides[0], mask.ctypes.data, mask.strides[0], offsets.ctypes.data),
            *(plan.pieces.ctypes.data, plan.lane_pieces.ctypes.data, self.lanes, plan.divided),
            *(self._scratch.data_ptr(), 4 * scratch_lane, self._states.data_ptr()),
        )
        self._planned = len(lengths)
        ends = np.where(offsets < 0, 0, offsets + lengths) if len(offsets) else np.array([_NO_MASS])
        self._mass_end = int(ends.max())
        self._kept = (plan, table, mask, offsets)

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        output: Tensor,
        mass: Tensor | None = None,
    ) -> None:
        """Attend, with the arguments of ``decode_attention_reference``; ``mass`` may be None.

        Args:
            query, output: [R, Hq, D]; not copied if float32 with the numbers of a head contiguous.
            mass: float32 [lanes or more, N], the numbers of a lane contiguous.

        Raises:
            ValueError: the tensors are not of the planned size; compiled code would reach beyond them.
        """
        wanted = (self._planned, self._heads * self._shape.queries, self._shape.head_size)
        if query.shape != wanted or output.shape != wanted:
            raise ValueError(
                f"vtoken: attention of {wanted} queries was planned, not of {tuple(query.shape)} to "
                f"{tuple(output.shape)}; call plan for each step."
            )
        if mass is not None:
            check_mass(mass, self.lanes, self._mass_end)
        if not self._planned:
            return
        queries = float_rows(query)
        as_is = output.dtype == torch.float32 and output.stride(2) == 1
        target = output if as_is else torch.empty(output.shape)
        (query_row, query_head, _), (output_row, output_head, _) = queries.stride(), target.stride()
        self._layer[:] = (
            *(queries.data_ptr(), 4 * query_row, 4 * query_head),
            *view_keys(key_cache),
            *view_values(value_cache),
            *(target.data_ptr(), 4 * output_row, 4 * output_head),
            *((0, 0) if mass is None else (mass.data_ptr(), 4 * mass.stride(0))),
        )
        self._arguments["factor"] = scale * LOG2_E
        openmp.run_team(self._body, self._address, self.lanes)
        if target is not output:
            output.copy_(target)
