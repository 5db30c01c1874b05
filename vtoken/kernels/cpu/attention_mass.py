"""``attention_mass_reference`` for vLLM's CPU backend, compiled.

A few consecutive queries are taken at a time, with all query heads of one KV head: enough rows to make use of a block
of keys while it is in the first-level cache, few enough that their exponentials over the whole context stay in the
second. So every product of query and key is computed once, though a probability is known only after a row's last one.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

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
    check_mass,
    exponentials,
    float_rows,
    live_exponentials,
    live_maximum,
    live_rows,
    load_queries,
    maximum,
    part_logits,
    view_keys,
)
from vtoken.kernels.cpu.vectors import array_at, exp2, floats_at, record_of
from vtoken.kernels.jit import carray, cfunc, njit

if TYPE_CHECKING:
    from vtoken.kernels.attention_mass import QuerySegments

_LAYER = "query query_row query_head keys keys_block keys_head mass mass_lane"
_STEP = "table table_row live live_row tiles lane_tiles lanes scratch scratch_lane"
_ARGUMENTS = record_of(f"{_LAYER} {_STEP}", floats="factor")
"""Addresses, and distances in bytes; ``live`` is read by masked kernels."""

_TILE = record_of("first count context row offset stride head later", floats="decay")
"""Consecutive queries of a segment, for one KV head: the fields of ``QuerySegments`` as they are for the tile's first
query, and in ``later`` the number of queries of the segment after that one."""

_ROWS = 12
"""Query rows of a tile: two register tiles of six, or four of three."""


def _divide(segments: "QuerySegments", heads: int, lanes: int, per_tile: int, shape: Shape) -> tuple[Any, Ints]:
    """Tiles in order of segment, KV head and query, and the first tile of each lane, [lanes + 1].

    A tile's cost is the blocks that it looks at.
    """
    per_head = -(-segments.count // per_tile)
    tiles_of = per_head * heads
    ends = np.cumsum(tiles_of)
    total = int(ends[-1]) if len(ends) else 0
    segment = np.repeat(np.arange(len(ends)), tiles_of)
    number = np.arange(total) - np.repeat(ends - tiles_of, tiles_of)
    head, tile = np.divmod(number, per_head[segment])
    tiles = np.zeros(total, dtype=_TILE)
    query = tile * per_tile
    tiles["first"] = segments.first[segment] + query
    tiles["count"] = np.minimum(per_tile, segments.count[segment] - query)
    tiles["context"] = segments.context[segment] + query
    tiles["row"] = segments.row[segment]
    tiles["stride"] = segments.stride[segment]
    tiles["offset"] = segments.offset[segment] + query * tiles["stride"]
    tiles["head"] = head
    tiles["decay"] = segments.decay[segment]
    tiles["later"] = segments.count[segment] - 1 - query
    cost = np.cumsum(1 + (tiles["context"] + tiles["count"]) // shape.block_size)
    share = cost[-1] * np.arange(1, lanes) / lanes if total else np.zeros(lanes - 1)
    return tiles, np.concatenate([[0], np.searchsorted(cost, share), [total]])


@dataclass(frozen=True)
class _Scratch:
    """Where things lie in a thread's scratch, in float32 numbers: its queries [rows, D], the largest logits, totals
    and shares [rows] of each, then parts; in a part its exponentials [rows, tokens] and the largest logits [rows]
    that these are relative to."""

    shape: Shape

    @property
    def rows(self) -> int:
        return self.shape.rows * self.shape.head_size

    @property
    def parts(self) -> int:
        return align(self.rows + 3 * self.shape.rows)

    @property
    def part_largest(self) -> int:
        return self.shape.rows * self.shape.part

    @property
    def part(self) -> int:
        return align(self.part_largest + self.shape.rows)


@lru_cache
def _compile(shape: Shape, group: int, masked: bool) -> Any:
    places = _Scratch(shape)
    rows, head_size, part_tokens, block_size = shape.rows, shape.head_size, shape.part, shape.block_size
    rows_at, parts_at, part_largest_at, part_numbers = places.rows, places.parts, places.part_largest, places.part
    load, logits, add = load_queries(group, head_size), part_logits(shape), add_mass(group, part_tokens)
    thread_number, team_size = openmp.thread_number, openmp.team_size
    part_blocks, nothing = shape.blocks_per_part, np.float32(-np.inf)

    @njit(error_model="numpy")
    def observe(arguments, tile, scratch, lane):  # type: ignore[no-untyped-def]
        """Add the mass of one tile to the lane."""
        keys = arguments.keys + tile.head * arguments.keys_head
        table = arguments.table + tile.row * arguments.table_row
        live = arguments.live + tile.row * arguments.live_row
        for query in range(tile.count):
            load(
                arguments.query + (tile.first + query) * arguments.query_row + tile.head * group * arguments.query_head,
                arguments.query_head,
                np.float32(arguments.factor),
                scratch + 4 * query * group * head_size,
            )
        of_rows = floats_at(scratch + 4 * rows_at)  # per row a largest, a total, later its inverse, and a share
        for row in range(rows):
            of_rows[row], of_rows[rows + row] = nothing, np.float32(0)
        positions = tile.context + tile.count - 1
        for first in range(0, positions, part_tokens):
            address = scratch + 4 * (parts_at + first // part_tokens * part_numbers)
            part = floats_at(address)
            blocks = table + 4 * (first // block_size)
            more = first + part_tokens < positions
            next_key = keys + array_at(blocks, np.int32)[part_blocks if more else 0] * arguments.keys_block
            used = (min(part_tokens, positions - first) + block_size - 1) // block_size
            logits(scratch, keys, arguments.keys_block, blocks, used, address, next_key)
            for query in range(tile.count):
                tokens = min(part_tokens, tile.context + query - first)
                if tokens > 0:
                    for row in range(query * group, (query + 1) * group):
                        before = of_rows[row]
                        row_logits = address + 4 * row * part_tokens
                        if masked:
                            largest = live_maximum(row_logits, live + first, tokens, before)
                        else:
                            largest = maximum(row_logits, tokens, before)
                        if largest != before:
                            of_rows[row] = largest
                            of_rows[rows + row] *= exp2(before - largest)
                        part[part_largest_at + row] = largest
                        if masked:
                            of_rows[rows + row] += live_exponentials(row_logits, live + first, tokens, largest)
                        else:
                            of_rows[rows + row] += exponentials(row_logits, tokens, largest)
        for query in range(tile.count):
            weight = 1.0 if tile.stride != 0 else tile.decay ** (tile.later - query)
            for row in range(query * group, (query + 1) * group):
                of_rows[rows + row] = np.float32(weight) / of_rows[rows + row]
        for first in range(0, positions, part_tokens):
            address = scratch + 4 * (parts_at + first // part_tokens * part_numbers)
            part = floats_at(address)
            for query in range(tile.count):
                tokens = min(part_tokens, tile.context + query - first)
                if tokens > 0:
                    for row in range(query * group, (query + 1) * group):
                        shrink = exp2(part[part_largest_at + row] - of_rows[row])
                        of_rows[2 * rows + row] = of_rows[rows + row] * shrink
                    offset = tile.offset + query * tile.stride + first
                    add(
                        address + 4 * query * group * part_tokens,
                        scratch + 4 * (rows_at + 2 * rows + query * group),
                        arguments.mass + lane * arguments.mass_lane + 4 * offset,
                        tokens,
                    )

    @cfunc("void(voidptr)", error_model="numpy")
    def body(data):  # type: ignore[no-untyped-def]
        arguments = carray(data, 1, _ARGUMENTS)[0]
        lane_tiles, tiles = array_at(arguments.lane_tiles, np.int64), array_at(arguments.tiles, _TILE)
        for lane in range(thread_number(), arguments.lanes, team_size()):
            scratch = arguments.scratch + lane * arguments.scratch_lane
            for n in range(lane_tiles[lane], lane_tiles[lane + 1]):
                observe(arguments, tiles[n], scratch, lane)

    return body


class AttentionMass:
    """``attention_mass_reference`` over the layers of one KV cache, which share their shape, strides and dtype.

    Call ``plan`` once per step, then the object itself for each layer. Results depend on how the work is divided,
    that is on the segments and on the number of threads, in the last bits only, and on nothing else.

    Args:
        key_cache: a layer's keys, [blocks, S, H, D], float32 or bfloat16: [D, S] per block and head, blocks and
            heads at any distance.
        num_query_heads: Hq, a multiple of H.
        masked: ``plan`` may be given a mask, and what is compiled always reads one.

    Attributes:
        lanes: lanes of ``mass`` that are added to, one per thread.

    Raises:
        ValueError: the cache's layout, dtype or sizes are not those of vLLM's CPU backend.
    """

    def __init__(self, key_cache: Tensor, num_query_heads: int, *, masked: bool = False) -> None:
        view_keys(key_cache)
        _, size, self._heads, head_size = key_cache.shape
        group = num_query_heads // self._heads
        self._per_tile = max(1, _ROWS // group)
        self._shape = Shape(size, head_size, self._per_tile * group, key_cache.dtype == torch.bfloat16)
        self._query_shape = (num_query_heads, head_size)
        self._masked = masked
        self._body = _compile(self._shape, group, masked)
        self.lanes = openmp.num_threads()
        self._arguments = np.zeros(1, dtype=_ARGUMENTS)
        self._address = self._arguments.ctypes.data
        numbers, layer = self._arguments.view(np.int64), len(_LAYER.split())
        self._layer, self._step = numbers[:layer], numbers[layer:-1]
        self._scratch = torch.empty(0)
        self._planned = self._queries_end = self._mass_end = 0
        self._kept: tuple[Any, ...] = ()

    def plan(self, block_table: Any, segments: "QuerySegments", live: Any = None) -> None:
        """Divide a step's work among the threads; table and mask are read again by each call.

        Args:
            block_table: [R, W], int32.
            segments: which queries to look at, and where their mass goes.
            live: bool [R, P], P >= the most positions attended, True where a position takes part; None: all do. The
                keys of the others may be anything.

        Raises:
            ValueError: the mask is too small, or the object was built without ``masked``.
        """
        table = np.asarray(block_table, dtype=np.int32)
        tiles, lane_tiles = _divide(segments, self._heads, self.lanes, self._per_tile, self._shape)
        length = segments.context + segments.count - 1
        positions = int(length.max(initial=0))
        mask = live_rows(live, int(segments.row.max(initial=-1)) + 1, positions, self._masked)
        places = _Scratch(self._shape)
        scratch_lane = places.parts + -(-positions // self._shape.part) * places.part
        if self._scratch.numel() < self.lanes * scratch_lane:
            self._scratch = torch.empty(self.lanes * scratch_lane)
        self._step[:] = (
            *(table.ctypes.data, table.strides[0], mask.ctypes.data, mask.strides[0]),
            *(tiles.ctypes.data, lane_tiles.ctypes.data, self.lanes),
            *(self._scratch.data_ptr(), 4 * scratch_lane),
        )
        self._planned = len(tiles)
        self._queries_end = int((segments.first + segments.count).max(initial=0))
        self._mass_end = int((segments.offset + (segments.count - 1) * segments.stride + length).max(initial=0))
        self._kept = (table, mask, tiles, lane_tiles)

    def __call__(self, query: Tensor, key_cache: Tensor, scale: float, mass: Tensor) -> None:
        """Look at one layer's queries, with the arguments of ``attention_mass_reference``.

        Args:
            query: [T, Hq, D]; not copied if float32 with the numbers of a head contiguous.
            mass: float32 [lanes or more, N], the numbers of a lane contiguous.

        Raises:
            ValueError: the tensors are smaller than planned; compiled code would reach beyond them.
        """
        if query.shape[0] < self._queries_end or query.shape[1:] != self._query_shape:
            raise ValueError(
                f"vtoken: attention of {self._queries_end} queries was planned, and {tuple(query.shape)} were given; "
                "call plan for each step."
            )
        check_mass(mass, self.lanes, self._mass_end)
        if not self._planned:
            return
        queries = float_rows(query)
        row, head, _ = queries.stride()
        self._layer[:] = (
            *(queries.data_ptr(), 4 * row, 4 * head),
            *view_keys(key_cache),
            *(mass.data_ptr(), 4 * mass.stride(0)),
        )
        self._arguments["factor"] = scale * LOG2_E
        openmp.run_team(self._body, self._address, self.lanes)
