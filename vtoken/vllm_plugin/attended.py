"""Who attends the queries of a forward: our kernels or the backend's."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ledger import StepCounts
from vtoken.core.observed import AttendedQueries, ObservedRuns, QueryRuns
from vtoken.core.ragged import Ints
from vtoken.core.token_table import HOLE, TokenTable


def attended_queries(
    table: TokenTable,
    counts: StepCounts,
    healthy: Ints,
    rows: Ints,
    index: Ints,
    starts: Ints,
    reduced: NDArray[np.bool_],
    manner: Callable[[Ints], tuple[Any, Any]],
) -> tuple[AttendedQueries, Ints]:
    """What our kernels attend and observe of a step, and which of the healthy requests are observed.

    Args:
        table: with the step's tokens in it.
        counts: of all requests of the step.
        healthy: those that passed its checks, as places in ``counts``, [R].
        rows, index, reduced: their rows of the table, places in the batch, and whether they have lost tokens, [R].
        starts: first place of each request of the batch in its flat token arrays, [batch].
        manner: how the queries of requests in some rows are observed; the last two fields of ``ObservedRuns``.
    """
    new_tokens, looks_from, length = counts.new_tokens[healthy], counts.observe_from[healthy], table.end[rows]
    is_seen, is_holed, single = looks_from < new_tokens, table.num_live[rows] < length, new_tokens == 1
    seen, holed = np.flatnonzero(is_seen), np.flatnonzero(is_holed)
    # Our kernel is the faster one, so where it can attend everybody it does. Requests that are whole are left to the
    # backend, unless they are looked at: without an eviction everything stays, to the last bit, as it is without us.
    ours = is_holed | (single & (is_seen | reduced))
    everybody = len(healthy) == len(counts.new_tokens) and ours.all()
    spared = np.flatnonzero(~is_seen & ~is_holed) if everybody else healthy[:0]
    observed = ObservedRuns(
        index[seen],
        starts[index[seen]] + looks_from[seen],
        (new_tokens - looks_from)[seen],
        length[seen],
        *manner(rows[seen]),
    )
    queries = AttendedQueries(
        observed,
        QueryRuns(index[holed], starts[index[holed]], new_tokens[holed], length[holed]),
        table.logical_at[rows[holed], : int(length[holed].max(initial=0))] != HOLE,
        total=int(counts.new_tokens.sum()),
        spared=QueryRuns(index[spared], starts[index[spared]], new_tokens[spared], length[spared]),
    )
    return queries, seen
