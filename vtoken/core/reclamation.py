"""Turning the holes that evictions leave into free blocks: when to plan, and what to commit."""

import numpy as np

from vtoken.core.planner import Plan, Snapshot, plan_fill
from vtoken.core.ragged import Ints
from vtoken.core.token_table import TokenTable


class FillReclamation:
    """``reclaim="fill"``: keep every request dense by moving its last tokens into its own holes."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def plan(self, rows: Ints, evicted: Ints, next_tokens: Ints) -> Plan:
        """Plan for requests that have just forgotten ``evicted`` tokens each; shapes [R].

        A request that forgot one token and computes one next needs no move and is not looked at.
        """
        table = self._table
        rows, next_tokens = rows[evicted > next_tokens], next_tokens[evicted > next_tokens]
        width = int(table.num_blocks[rows].max(initial=0)) * table.block_size
        snapshot = Snapshot(rows, table.logical_at[rows, :width], table.num_live[rows])
        return plan_fill(snapshot, next_tokens, table.block_size)

    def commit(self, plan: Plan) -> None:
        """Write the plan into the table. The K/V must have been copied, or its copy must have been ordered."""
        self._table.apply_moves(plan.moves)
        self._table.release_blocks(plan.rows, np.minimum(plan.keep_blocks, self._table.num_blocks[plan.rows]))
