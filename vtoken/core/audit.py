"""The invariants of the token table, as functions.

I1 conservation, I2 unique mapping and I4 planning are properties of tables and plans and are checked here; I3
(visibility) is a property of the order of operations on the device. Each function raises ``InvariantViolation``.
"""

from collections.abc import Mapping

import numpy as np

from vtoken.core.planner import Packing, Plan
from vtoken.core.ragged import Ints
from vtoken.core.token_table import DEAD, HOLE, TokenTable


class InvariantViolation(AssertionError):
    """A token was lost, doubled or misplaced."""


def live_ids(table: TokenTable) -> dict[str, tuple[int, ...]]:
    """The ordered live logical ids of every request: what a relocation must not change."""
    return {req_id: tuple(table.live_tokens(req_id).tolist()) for req_id in table.req_ids}


def check_conservation(before: Mapping[str, tuple[int, ...]], table: TokenTable) -> None:
    """I1: every request that is still there has exactly the live ids that it had before a relocation."""
    for req_id, ids in live_ids(table).items():
        if req_id in before and before[req_id] != ids:
            lost, gained = sorted(set(before[req_id]) - set(ids)), sorted(set(ids) - set(before[req_id]))
            raise InvariantViolation(f"I1: request {req_id} lost tokens {lost} and gained tokens {gained}")


def check_mapping(table: TokenTable) -> None:
    """I2: every live token has one slot, every slot at most one live token, and the counts agree with both.

    Requests may share a block that none of them writes any more, with the same token in each slot.
    """
    size = table.block_size
    holders_of_block: dict[int, list[tuple[str, int, int]]] = {}
    for req_id in table.req_ids:
        row = int(table.rows([req_id])[0])
        length, held = int(table.length[row]), int(table.num_blocks[row])
        physical, logical = table.physical_of[row], table.logical_at[row]
        tokens = np.flatnonzero(physical[:length] != DEAD)
        _require((physical[length:] == DEAD).all(), f"I2: request {req_id} maps a token that does not exist yet")
        _require((logical[held * size :] == HOLE).all(), f"I2: request {req_id} has a token outside its blocks")
        _require(len(tokens) == table.num_live[row], f"I2: request {req_id} miscounts its live tokens")
        _require(
            np.array_equal(logical[physical[tokens]], tokens) and (logical != HOLE).sum() == len(tokens),
            f"I2: the two maps of request {req_id} are not each other's inverse",
        )
        counts = (logical[: held * size].reshape(held, size) != HOLE).sum(axis=1)
        _require(np.array_equal(counts, table.live_in_block[row, :held]), f"I2: request {req_id} miscounts a block")
        _require(not table.live_in_block[row, held:].any(), f"I2: request {req_id} counts tokens in a block it left")
        for column, block in enumerate(table.blocks[row, :held].tolist()):
            holders_of_block.setdefault(block, []).append((req_id, row, column))
        _require(len(set(table.block_ids(req_id))) == held, f"I2: request {req_id} holds a block twice")
        frozen = int(table.frozen_blocks(np.array([row]))[0])
        _require(0 <= table.read_only[row] <= held, f"I2: request {req_id} keeps more blocks than it holds")
        _require(frozen <= held, f"I2: request {req_id} has written more blocks than it holds")
    for block, holders in holders_of_block.items():
        if len(holders) > 1:
            _check_shared(table, block, holders)


def _check_shared(table: TokenTable, block: int, holders: list[tuple[str, int, int]]) -> None:
    names = " and by ".join(req_id for req_id, _, _ in holders)
    seen = np.full(table.block_size, HOLE)
    for _, row, column in holders:
        frozen = int(table.frozen_blocks(np.array([row]))[0])
        _require(column < frozen, f"I2: block {block} is held by {names}, and one of them may write into it")
        tokens = table.logical_at[row, column * table.block_size : (column + 1) * table.block_size]
        both = (seen != HOLE) & (tokens != HOLE)
        _require(np.array_equal(seen[both], tokens[both]), f"I2: block {block} is held by {names} for different tokens")
        seen = np.where(tokens != HOLE, tokens, seen)


def check_dense(table: TokenTable, rows: Ints) -> None:
    """At a forward, the n tokens behind read-only blocks fill exactly ceil(n / S) blocks, without a hole."""
    for row in rows.tolist():
        first = int(table.read_only[row]) * table.block_size
        n = int((table.logical_at[row, first:] != HOLE).sum())
        _require(
            (table.logical_at[row, first : first + n] != HOLE).all(), f"row {row} has a hole among its first {n} slots"
        )
        held = int(table.num_blocks[row] - table.read_only[row])
        _require(held == -(-n // table.block_size), f"row {row} attends {n} tokens and holds {held} blocks")


def check_plan(plan: Plan, table: TokenTable) -> None:
    """I4 for `fill`: a plan moves live tokens into holes of kept blocks, once each, and leaves the rest empty."""
    keep = dict(zip(plan.rows.tolist(), plan.keep_blocks.tolist(), strict=True))
    moved: set[tuple[int, int]] = set()
    for row, source, destination in zip(
        plan.moves.rows.tolist(), plan.moves.sources.tolist(), plan.moves.destinations.tolist(), strict=True
    ):
        _require(table.logical_at[row, source] != HOLE, f"I4: row {row} moves the hole at {source}")
        _require(table.logical_at[row, destination] == HOLE, f"I4: row {row} overwrites position {destination}")
        _require(destination < keep[row] * table.block_size, f"I4: row {row} moves into a block that it gives up")
        _require(destination < source, f"I4: row {row} moves a token away from the front")
        _require(destination >= table.read_only[row] * table.block_size, f"I4: row {row} writes into a read-only block")
        _require(not {(row, source), (row, destination)} & moved, f"I4: row {row} names a position twice")
        moved |= {(row, source), (row, destination)}
    for row, blocks in keep.items():
        end = int(table.num_blocks[row]) * table.block_size
        stay = [
            p
            for p in range(blocks * table.block_size, end)
            if table.logical_at[row, p] != HOLE and (row, p) not in moved
        ]
        _require(not stay, f"I4: row {row} gives up a block with live tokens at {stay}")


def check_packing(packing: Packing, table: TokenTable) -> None:
    """I4 for `pack`: blocks become strictly fewer, none of the sources is named twice or still filled, all fits."""
    row, sources, size = packing.row, packing.sources, table.block_size
    full = int(table.end[row]) // size
    _require((np.diff(sources) > 0).all(), f"I4: row {row} names a source twice, or out of order")
    _require(
        len(sources) > 0 and sources[0] >= 0 and sources[-1] < min(full, int(table.num_blocks[row])),
        f"I4: row {row} packs a block that is not full: {sources.tolist()} of {full}",
    )
    _require(
        packing.destinations < len(sources),
        f"I4: row {row} packs {len(sources)} blocks into {packing.destinations}",
    )
    live = int(table.live_in_block[row, sources].sum())
    _require(
        live <= packing.destinations * size,
        f"I4: row {row} packs {live} live tokens into {packing.destinations} blocks",
    )


def _require(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise InvariantViolation(message)
