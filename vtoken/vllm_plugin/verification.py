"""``verify=True``: after every relocation, each live token must still be there, once, with its K/V unchanged."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from vtoken.core.ragged import Ints
from vtoken.core.token_table import TokenTable

Digests = Callable[[Ints], NDArray[np.int64]]
"""slots [M] -> a number per layer, in the model's order, and token that depends on all bits of its K/V, [layers, M]"""


@dataclass(frozen=True)
class _Before:
    """A request as it was before a relocation: its live tokens in logical order, their slots, [n], and [layers, n]."""

    tokens: Ints
    slots: Ints
    digests: NDArray[np.int64]


class Verifier:
    """Compares what a request held before a relocation with what it holds when the copies are done (I1, I2).

    Call ``note`` before the table changes, ``capture`` after that but before anything is copied, and ``faults`` when
    the copies are done.

    Args:
        table: of the worker.
        digests: reads the KV cache.
    """

    def __init__(self, table: TokenTable, digests: Digests) -> None:
        self._table = table
        self._digests = digests
        self._noted: dict[str, tuple[Ints, Ints]] = {}
        self._before: dict[str, _Before] = {}

    def note(self) -> None:
        """Remember where every live token lies."""
        self._noted = {req_id: self._placed(req_id) for req_id in self._table.req_ids}

    def capture(self) -> None:
        """Read the K/V of the requests whose tokens or slots differ from what was noted, where it still lies."""
        for req_id, (tokens, slots) in self._noted.items():
            now, places = self._placed(req_id)
            if not (np.array_equal(tokens, now) and np.array_equal(slots, places)):
                self._before[req_id] = _Before(tokens, slots, self._digests(slots))

    def faults(self) -> dict[str, str]:
        """One sentence per request that a relocation has damaged; those that are over are passed over."""
        before = {req_id: then for req_id, then in self._before.items() if req_id in self._table}
        self._before = {}
        found = self._doubled(before)
        for req_id, then in before.items():
            fault = self._fault(req_id, then)
            if fault is not None:
                found.setdefault(req_id, fault)
        return found

    def marks(self) -> dict[str, int]:
        """For every request a number that depends on its epoch, its live tokens and the slot of each."""
        marks = {}
        for req_id in self._table.req_ids:
            held = np.concatenate([self._table.epoch[self._table.rows([req_id])], *self._placed(req_id)])
            marks[req_id] = crc32(held.astype(np.int64).tobytes())
        return marks

    def _placed(self, req_id: str) -> tuple[Ints, Ints]:
        table, tokens = self._table, self._table.live_tokens(req_id)
        row = int(table.rows([req_id])[0])
        positions = table.physical_of[row, tokens].astype(np.int64)
        # A request that was refused in its first step never came to know the blocks of what it had found.
        known = positions < table.num_blocks[row] * table.block_size
        return tokens[known], table.slots(np.full(np.count_nonzero(known), row), positions[known])

    def _fault(self, req_id: str, then: _Before) -> str | None:
        tokens, slots = self._placed(req_id)
        if not np.array_equal(tokens, then.tokens):
            lost, gained = np.setdiff1d(then.tokens, tokens), np.setdiff1d(tokens, then.tokens)
            return f"vtoken: I1: a relocation of request {req_id} lost tokens {lost} and brought up tokens {gained}."
        wrong = np.argwhere(self._digests(slots) != then.digests)
        if not len(wrong):
            return None
        layer, n = wrong[0].tolist()
        return (
            f"vtoken: I1: a relocation of request {req_id} changed the K/V of token {tokens[n]} in layer {layer}: slot "
            f"{slots[n]} does not hold what slot {then.slots[n]} held ({len(wrong)} such tokens and layers)."
        )

    def _doubled(self, requests: Iterable[str]) -> dict[str, str]:
        """Requests of which a token shares its slot with another live token, of whichever request.

        The same token of several requests may lie in one slot, as long as none of them writes there any more.
        """
        requests = set(requests)
        if not requests:
            return {}
        placed = [(req_id, *self._placed(req_id)) for req_id in self._table.req_ids]
        slots = np.concatenate([slots for _, _, slots in placed])
        tokens = np.concatenate([tokens for _, tokens, _ in placed])
        frozen = np.concatenate([self._frozen(req_id) for req_id, _, _ in placed])
        _, place, count = np.unique(slots, return_inverse=True, return_counts=True)
        least, most = np.full(len(count), np.iinfo(np.int64).max), np.full(len(count), -1)
        np.minimum.at(least, place, tokens)
        np.maximum.at(most, place, tokens)
        writers = np.bincount(place, weights=~frozen, minlength=len(count))
        doubled = slots[((count > 1) & ((least != most) | (writers > 0)))[place]]
        found = {}
        for req_id, tokens, slots in placed:
            shared = np.flatnonzero(np.isin(slots, doubled))
            if len(shared):
                found[req_id] = (
                    f"vtoken: I2: token {tokens[shared[0]]} of request {req_id} shares slot {slots[shared[0]]} with "
                    "another live token."
                )
        return found

    def _frozen(self, req_id: str) -> NDArray[np.bool_]:
        """Of each live token, in logical order, whether its block is one that the request writes no more."""
        table, rows = self._table, self._table.rows([req_id])
        positions = table.physical_of[rows[0], self._placed(req_id)[0]]
        return positions // table.block_size < table.frozen_blocks(rows)[0]
