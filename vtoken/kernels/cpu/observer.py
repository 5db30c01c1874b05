"""Observing attention on the CPU while a forward runs, layer by layer, into one array of masses."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.core.observed import ObservedQueries
from vtoken.core.ragged import Ints, offsets_of
from vtoken.core.token_scores import Floats
from vtoken.kernels.attention_mass import QuerySegments
from vtoken.kernels.cpu.attention_mass import AttentionMass
from vtoken.kernels.cpu.decode_attention import DecodeAttention


class AttentionObserver:
    """Collects the attention mass of a forward's observed queries over the observed layers.

    A single observed query of a request is attended here, output included, in one pass over its cache. Of several
    (a prompt's), only the mass is computed here.

    Args:
        key_cache, value_cache: views [blocks, S, H, D] of any observed layer: all have this layout.
        num_query_heads: query heads per layer.
        num_layers: observed layers.
        scale: factor on the logits.
        each_query: keep one row of masses per query instead of their sum.
        decay: weight of a query relative to the one after it, in a sum.
    """

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        num_query_heads: int,
        num_layers: int,
        scale: float,
        *,
        each_query: bool = False,
        decay: float = 1.0,
    ) -> None:
        self.heads = num_query_heads * num_layers
        self._scale, self._each_query, self._decay = scale, each_query, decay
        self._decode = DecodeAttention(key_cache, value_cache, num_query_heads)
        self._several = AttentionMass(key_cache, num_query_heads)
        self._queries: ObservedQueries | None = None
        self._mass = self._total = torch.empty(0)
        self._lone_rows: Ints = np.empty(0, dtype=np.int64)
        self._several_seen = False

    @property
    def active(self) -> bool:
        """Something of the forward under way is observed."""
        return self._queries is not None

    @property
    def replaces_backend(self) -> bool:
        """Every output of the forward comes from here, so that the backend's own kernel need not run."""
        return self._queries is not None and self._queries.whole and not self._several_seen

    def begin(self, queries: ObservedQueries | None, block_table: NDArray[np.int32]) -> None:
        """Say what the next forward observes; block_table: the batch's, shape [batch, width]."""
        self._queries = queries
        if queries is None:
            return
        sizes = queries.attended * (queries.count if self._each_query else 1)
        offsets = offsets_of(sizes)
        self._mass = torch.zeros(self._decode.lanes, int(offsets[-1]))
        self._total = torch.zeros_like(self._mass, dtype=torch.float64)
        lone = np.flatnonzero(queries.count == 1)
        lone = lone[np.argsort(queries.first[lone])]  # in the batch's order, to take its queries without a copy
        self._lone_rows = queries.first[lone]
        if len(lone):
            self._decode.plan(queries.attended[lone], block_table[queries.index[lone]], offsets[lone])

        several = np.flatnonzero(queries.count > 1)
        self._several_seen = len(several) > 0
        if len(several):
            count, attended = queries.count[several], queries.attended[several]
            segments = QuerySegments(
                first=queries.first[several],
                count=count,
                context=attended - count + 1,
                row=queries.index[several],
                offset=offsets[several],
                stride=attended if self._each_query else np.zeros_like(attended),
            )
            self._several.plan(block_table, segments)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor) -> None:
        """One layer's attention: query, output [T, Hq, D]; the outputs of single observed queries are written."""
        if len(self._lone_rows):
            self._attend_lone(query, key_cache, value_cache, output)
        if self._several_seen:
            self._several(query, key_cache, self._scale, self._decay, self._mass)
            # Thousands of queries times all heads and layers, added one by one in float32, lose a thousandth.
            self._total += self._mass
            self._mass.zero_()

    def take(self) -> Floats:
        """The masses of the forward that has just ended, over all observed layers; see ``begin`` for the order."""
        self._queries = None
        return (self._total + self._mass).sum(dim=0).float().numpy()

    def _attend_lone(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor) -> None:
        rows = self._lone_rows
        if rows[-1] == len(rows) - 1:  # exactly the first rows of the batch
            self._decode(query[: len(rows)], key_cache, value_cache, self._scale, output[: len(rows)], self._mass)
            return
        index = torch.from_numpy(rows)
        written = torch.empty_like(output[index])
        self._decode(query[index], key_cache, value_cache, self._scale, written, self._mass)
        output[index] = written
