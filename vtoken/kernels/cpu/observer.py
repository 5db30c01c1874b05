"""Attention on the CPU with holes, where the attention itself is wanted, and where that spares the backend all of it.

Driven while a forward runs, layer by layer; masses add up in one array.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.core.observed import AttendedQueries
from vtoken.core.ragged import Ints, offsets_of, ranges, segment_ids
from vtoken.core.token_scores import Floats
from vtoken.kernels.attention_mass import QuerySegments
from vtoken.kernels.cpu.attention_mass import AttentionMass
from vtoken.kernels.cpu.decode_attention import DecodeAttention


class AttentionObserver:
    """Attends the queries of requests with holes, and collects the attention mass of observed queries.

    A single observed query of a request is attended here, output included, in one pass over its cache. Of several
    (a prompt's), only the mass is computed beside the backend's attention. In a forward that would be attended here
    altogether but for some single queries, these are, too: one kernel for all is faster than two.

    Args:
        key_cache, value_cache: views [blocks, S, H, D] of any observed layer: all have this layout.
        num_query_heads: query heads per layer.
        num_layers: observed layers.
        scale: factor on the logits.
        prompts: several queries of a request may be observed in one forward.
        holes: requests may have holes.

    Attributes:
        active: something of the forward under way is attended or observed here.
        replaces_backend: every output of it comes from here, so that the backend's own kernel need not run.
    """

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        num_query_heads: int,
        num_layers: int,
        scale: float,
        *,
        prompts: bool = True,
        holes: bool = False,
    ) -> None:
        self.heads = num_query_heads * num_layers
        self._scale = scale
        self._decode = DecodeAttention(key_cache, value_cache, num_query_heads, masked=holes)
        self._several = AttentionMass(key_cache, num_query_heads, masked=holes) if prompts else None
        self._mass = self._total = torch.empty(0)
        self._rows: Ints = np.empty(0, dtype=np.int64)
        self._several_seen = False
        self.active = self.replaces_backend = False

    def begin(self, queries: AttendedQueries, block_table: NDArray[np.int32]) -> None:
        """Say what the next forward needs; block_table: the batch's, shape [batch, width]."""
        self.active = bool(queries)
        if not self.active:
            return
        observed = queries.observed
        offsets = offsets_of(observed.attended * observed.lines)
        self._mass = torch.zeros(self._decode.lanes, int(offsets[-1]))
        self._total = torch.zeros_like(self._mass, dtype=torch.float64)
        self._plan_rows(queries, offsets[:-1], block_table)
        self._plan_several(queries, offsets[:-1], block_table)
        self.replaces_backend = len(self._rows) == queries.total

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, observes: bool = True
    ) -> None:
        """One layer's attention: query, output [T, Hq, D]; the outputs of what is attended here are written."""
        if len(self._rows):
            self._attend_rows(query, key_cache, value_cache, output, self._mass if observes else None)
        if self._several is not None and self._several_seen and observes:
            self._several(query, key_cache, self._scale, self._mass)
            # Thousands of queries times all heads and layers, added one by one in float32, lose a thousandth.
            self._total += self._mass
            self._mass.zero_()

    def take(self) -> Floats:
        """The masses of the forward that has just ended, over all observed layers; see ``Observer``."""
        self.active = False
        return (self._total + self._mass).sum(dim=0).float().numpy()

    def _plan_rows(self, queries: AttendedQueries, offsets: Ints, block_table: NDArray[np.int32]) -> None:
        """Every query that is attended here is a row: observed ones that are alone, all of the holed, spared ones."""
        observed, holed = queries.observed, queries.holed
        of_holed = segment_ids(holed.count)
        step = ranges(np.zeros_like(holed.count), holed.count)
        place = holed.first[of_holed] + step
        attended = (holed.attended - holed.count + 1)[of_holed] + step
        lone = np.flatnonzero(observed.count == 1)
        dense = lone[~np.isin(observed.first[lone], place)]

        place = np.concatenate([place, observed.first[dense], queries.spared.first])
        order = np.argsort(place)  # in the batch's order, to take its queries without a copy
        self._rows = place = place[order]
        if not len(place):
            return
        index = np.concatenate([holed.index[of_holed], observed.index[dense], queries.spared.index])[order]
        attended = np.concatenate([attended, observed.attended[dense], queries.spared.attended])[order]
        row_offsets = np.full(len(place), -1)
        row_offsets[np.searchsorted(place, observed.first[lone])] = offsets[lone]
        live = None
        if len(holed.index):
            live = np.ones((len(order), max(queries.live.shape[1], int(attended.max()))), dtype=np.bool_)
            holes = order < len(of_holed)
            live[holes, : queries.live.shape[1]] = queries.live[of_holed[order[holes]]]
        self._decode.plan(attended, block_table[index], row_offsets, live)

    def _plan_several(self, queries: AttendedQueries, offsets: Ints, block_table: NDArray[np.int32]) -> None:
        """Of several observed queries of a request, the mass alone is computed here."""
        observed, holed = queries.observed, queries.holed
        several = np.flatnonzero(observed.count > 1)
        self._several_seen = len(several) > 0
        if not self._several_seen:
            return
        assert self._several is not None, "a policy that looks at prompts says so in its needs"
        count, attended, index = observed.count[several], observed.attended[several], observed.index[several]
        segments = QuerySegments(
            first=observed.first[several],
            count=count,
            context=attended - count + 1,
            row=np.arange(len(several)),
            offset=offsets[several],
            stride=np.where(observed.each_query, observed.attended, 0)[several],
            decay=np.broadcast_to(observed.query_decay, observed.count.shape)[several],
        )
        live = None
        with_holes = np.isin(index, holed.index)
        if with_holes.any():
            live = np.ones((len(several), max(queries.live.shape[1], int(attended.max()))), dtype=np.bool_)
            place_of = np.argsort(holed.index)
            which = place_of[np.searchsorted(holed.index, index[with_holes], sorter=place_of)]
            live[with_holes, : queries.live.shape[1]] = queries.live[which]
        self._several.plan(block_table[index], segments, live)

    def _attend_rows(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, mass: Tensor | None
    ) -> None:
        rows = self._rows
        if rows[-1] == len(rows) - 1:  # exactly the first rows of the batch
            self._decode(query[: len(rows)], key_cache, value_cache, self._scale, output[: len(rows)], mass)
            return
        index = torch.from_numpy(rows)
        written = torch.empty_like(output[index])
        self._decode(query[index], key_cache, value_cache, self._scale, written, mass)
        output[index] = written
