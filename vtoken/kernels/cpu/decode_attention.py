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

from vtoken.core.ragged import Ints
from vtoken.kernels import openmp
from vtoken.kernels.cpu.parts import (
    LOG2_E,
    Shape,
    add_mass,
    align,
    exponentials,
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
_STEP = "table table_row mass_offsets pieces lane_pieces lanes divided scratch scratch_lane states"
_ARGUMENTS = record_of(f"{_LAYER} {_STEP}", floats="factor")
"""Addresses, and distances in bytes. ``mass`` is 0 if there is none to add to."""

_PIECE = record_of("request head block tokens part state first_state states")
"""A run of a request's tokens for one KV head, worked on by one thread.

``block`` is the first one's place in the request's row, ``part`` where its logits start in the thread's scratch,
``state`` where its sums lie; its softmax consists of ``states`` of them from ``first_state`` on.
"""

_SHORTEST = 4
"""Blocks from a softmax's end within which no cut is made: two threads' merging costs more than they save."""


@dataclass(frozen=True)
class _Plan:
    """How a step's work is divided; the arrays are kept alive because compiled code has their addresses."""

    pieces: Any
    lane_pieces: Ints
    divided: bool
    parts: int
    states: int


def _divide(blocks: Ints, lengths: Ints, heads: int, lanes: int, shape: Shape) -> _Plan:
    """Cut the work into pieces, in order of request and KV head, and deal them out.

    Args:
        blocks, lengths: blocks and tokens of each request, [R].
    """
    size, per_part = shape.block_size, shape.blocks_per_part
    ends = np.cumsum(np.repeat(blocks, heads))
    starts = ends - np.repeat(blocks, heads)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(1, lanes) * total // lanes
    following = np.searchsorted(ends, cuts, side="right")
    for bound in (starts, ends):
        near = np.minimum(following, len(bound) - 1)
        cuts = np.where(np.abs(cuts - bound[near]) < _SHORTEST, bound[near], cuts) if total else cuts
    edges = np.unique(np.concatenate([starts, cuts, [total]]))
    first, last = edges[:-1], edges[1:]
    softmax = np.searchsorted(ends, first, side="right")

    pieces = np.zeros(len(first), dtype=_PIECE)
    request = softmax // heads
    block = first - starts[softmax]
    pieces["request"], pieces["head"], pieces["block"] = request, softmax % heads, block
    pieces["tokens"] = np.minimum((last - first) * size, lengths[request] - block * size)
    lane_pieces = np.searchsorted(first, np.concatenate([[0], cuts, [total]]))

    # Whole softmaxes take turns in one place of a thread's scratch; what waits for others has places of its own.
    parts = -(-(last - first) // per_part)
    whole = (first == starts[softmax]) & (last == ends[softmax])
    lane = np.searchsorted(lane_pieces, np.arange(len(first)), side="right") - 1
    pieces["state"] = pieces["first_state"] = lane
    pieces["states"] = 1
    after = np.full(lanes, parts[whole].max(initial=0))
    for state, piece in enumerate(np.flatnonzero(~whole), start=lanes):
        pieces["part"][piece] = after[lane[piece]]
        after[lane[piece]] += parts[piece]
        pieces["state"][piece] = state
        same = (softmax == softmax[piece]).nonzero()[0]
        pieces["first_state"][piece] = state - (piece - same[0])
        pieces["states"][piece] = len(same)
    return _Plan(pieces, lane_pieces, not whole.all(), int(after.max(initial=0)), lanes + int((~whole).sum()))


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


@lru_cache
def _compile(shape: Shape) -> Any:
    places = _Scratch(shape)
    queries, rows, head_size, part_tokens, block_size = (
        shape.queries,
        shape.rows,
        shape.head_size,
        shape.part,
        shape.block_size,
    )
    parts_at, part_largest_at, part_numbers = places.parts, places.part_largest, places.part
    largest_at, total_at, state_numbers = places.largest, places.total, places.state
    load, logits, add_values = load_queries(queries, head_size), part_logits(shape), part_values(shape)
    add = add_mass(queries, part_tokens)
    thread_number, team_size, barrier = openmp.thread_number, openmp.team_size, openmp.barrier
    nothing = np.float32(-np.inf)

    @njit(error_model="numpy")
    def attend(arguments, piece, scratch):  # type: ignore[no-untyped-def]
        """Leave a piece's exponentials in scratch, and its sums in its state."""
        table = arguments.table + piece.request * arguments.table_row + 4 * piece.block
        keys = arguments.keys + piece.head * arguments.keys_head
        values = arguments.values + piece.head * arguments.values_head
        first_head = piece.head * queries
        load(
            arguments.query + piece.request * arguments.query_row + first_head * arguments.query_head,
            arguments.query_head,
            np.float32(arguments.factor),
            scratch,
        )
        sums = arguments.states + 4 * piece.state * state_numbers
        state = floats_at(sums, state_numbers)
        state[:largest_at] = np.float32(0)
        state[largest_at:total_at] = nothing
        state[total_at:] = np.float32(0)
        for first in range(0, piece.tokens, part_tokens):
            address = scratch + 4 * (parts_at + (piece.part + first // part_tokens) * part_numbers)
            part = floats_at(address, part_numbers)
            tokens = min(part_tokens, piece.tokens - first)
            blocks = table + 4 * (first // block_size)
            logits(scratch, keys, arguments.keys_block, blocks, (tokens + block_size - 1) // block_size, address)
            for row in range(queries):
                before = state[largest_at + row]
                row_logits = address + 4 * row * part_tokens
                largest = maximum(row_logits, tokens, before)
                if largest != before:
                    shrink = exp2(before - largest)
                    state[largest_at + row] = largest
                    state[total_at + row] *= shrink
                    for d in range(row * head_size, (row + 1) * head_size):
                        state[d] *= shrink
                part[part_largest_at + row] = largest
                state[total_at + row] += exponentials(row_logits, tokens, largest)
            add_values(address, values, arguments.values_block, blocks, tokens, sums)

    @njit(error_model="numpy")
    def finish(arguments, piece, scratch, lane):  # type: ignore[no-untyped-def]
        """Write a softmax's output, if the piece is its first, and add the mass of the piece's tokens."""
        states = floats_at(arguments.states + 4 * piece.first_state * state_numbers, piece.states * state_numbers)
        queries_place = floats_at(scratch, 3 * rows)  # the queries themselves are not needed any more
        overall, inverse, shares = queries_place[:rows], queries_place[rows : 2 * rows], queries_place[2 * rows :]
        for row in range(queries):
            overall[row] = nothing
            for state in range(0, piece.states * state_numbers, state_numbers):
                overall[row] = max(overall[row], states[state + largest_at + row])
            total = np.float32(0)
            for state in range(0, piece.states * state_numbers, state_numbers):
                total += states[state + total_at + row] * exp2(states[state + largest_at + row] - overall[row])
            inverse[row] = np.float32(1) / total
            if piece.block == 0:
                head = piece.head * queries + row
                output = floats_at(
                    arguments.output + piece.request * arguments.output_row + head * arguments.output_head, head_size
                )
                output[:] = np.float32(0)
                for state in range(0, piece.states * state_numbers, state_numbers):
                    share = inverse[row] * exp2(states[state + largest_at + row] - overall[row])
                    for d in range(head_size):
                        output[d] += share * states[state + row * head_size + d]
        if arguments.mass == 0:
            return
        offset = array_at(arguments.mass_offsets + 8 * piece.request, 1, np.int64)[0] + piece.block * block_size
        mass = arguments.mass + lane * arguments.mass_lane + 4 * offset
        for first in range(0, piece.tokens, part_tokens):
            address = scratch + 4 * (parts_at + (piece.part + first // part_tokens) * part_numbers)
            part = floats_at(address, part_numbers)
            for row in range(queries):
                shares[row] = inverse[row] * exp2(part[part_largest_at + row] - overall[row])
            add(address, scratch + 8 * rows, mass + 4 * first, min(part_tokens, piece.tokens - first))

    @cfunc("void(voidptr)", error_model="numpy")
    def body(data):  # type: ignore[no-untyped-def]
        arguments = carray(data, 1, _ARGUMENTS)[0]
        lane_pieces = array_at(arguments.lane_pieces, arguments.lanes + 1, np.int64)
        pieces = array_at(arguments.pieces, lane_pieces[arguments.lanes], _PIECE)
        thread, team = thread_number(), team_size()
        for lane in range(thread, arguments.lanes, team):
            scratch = arguments.scratch + lane * arguments.scratch_lane
            for n in range(lane_pieces[lane], lane_pieces[lane + 1]):
                attend(arguments, pieces[n], scratch)
                if pieces[n].states == 1:
                    finish(arguments, pieces[n], scratch, lane)
        if arguments.divided:
            barrier()
            for lane in range(thread, arguments.lanes, team):
                scratch = arguments.scratch + lane * arguments.scratch_lane
                for n in range(lane_pieces[lane], lane_pieces[lane + 1]):
                    if pieces[n].states > 1:
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

    Attributes:
        lanes: lanes of ``mass`` that are added to, one per thread.

    Raises:
        ValueError: the cache's layout, dtype or sizes are not those of vLLM's CPU backend.
    """

    def __init__(self, key_cache: Tensor, value_cache: Tensor, num_query_heads: int) -> None:
        view_keys(key_cache), view_values(value_cache)
        _, size, self._heads, head_size = key_cache.shape
        self._shape = Shape(size, head_size, num_query_heads // self._heads, key_cache.dtype == torch.bfloat16)
        self._places = _Scratch(self._shape)
        self._body = _compile(self._shape)
        self.lanes = openmp.num_threads()
        self._arguments = np.zeros(1, dtype=_ARGUMENTS)
        self._address = self._arguments.ctypes.data
        numbers, layer = self._arguments.view(np.int64), len(_LAYER.split())
        self._layer, self._step = numbers[:layer], numbers[layer:-1]
        self._planned = 0
        self._scratch = self._states = torch.empty(0)
        self._kept: tuple[Any, ...] = ()

    def plan(self, lengths: Any, block_table: Any, mass_offsets: Any = None) -> None:
        """Divide a step's work among the threads; the tensors are read again by each call.

        Args:
            lengths: positions of each request, [R], at least 1 each.
            block_table: [R, W], int32.
            mass_offsets: where each request's position 0 lies in ``mass``, [R]; None if no mass is wanted.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        table = np.asarray(block_table)
        plan = _divide(-(-lengths // self._shape.block_size), lengths, self._heads, self.lanes, self._shape)
        scratch_lane = self._places.parts + plan.parts * self._places.part
        if self._scratch.numel() < self.lanes * scratch_lane:
            self._scratch = torch.empty(self.lanes * scratch_lane * 5 // 4)
        if self._states.numel() < plan.states * self._places.state:
            self._states = torch.empty(plan.states * self._places.state)
        offsets = np.asarray(() if mass_offsets is None else mass_offsets, dtype=np.int64)
        self._step[:] = (
            *(table.ctypes.data, table.strides[0], offsets.ctypes.data),
            *(plan.pieces.ctypes.data, plan.lane_pieces.ctypes.data, self.lanes, plan.divided),
            *(self._scratch.data_ptr(), 4 * scratch_lane, self._states.data_ptr()),
        )
        self._planned = len(lengths)
        self._kept = (plan, table, offsets)

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
            query, output: [R, Hq, D], of any strides as long as the numbers of a head are contiguous.
            mass: float32 [lanes or more, N], the numbers of a lane contiguous.
        """
        if not self._planned:
            return
        queries = query.float()
        target = output if output.dtype == torch.float32 else torch.empty(output.shape)
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
