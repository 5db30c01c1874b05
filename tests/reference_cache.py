"""Where the tokens of one request lie, as Python lists, by the rules in their plainest form.

Nothing of vtoken's own bookkeeping is used here; ``test_stub_engine`` and its neighbours compare it with this.
"""

import math
from abc import ABC, abstractmethod
from fractions import Fraction

from vllm import SamplingParams

from vtoken.config import VTokenConfig
from vtoken.core.reclamation import BlockChange

S = 16
HOLE = -1
UNBOUNDED = 10**9


def blocks_for(tokens: int) -> int:
    return -(-tokens // S)


def reference_budget(config: VTokenConfig, params: SamplingParams, prompt_length: int) -> int:
    """The request's budget in tokens; one that its whole sequence never reaches is as good as infinite."""
    budget = (params.extra_args or {}).get("vtoken.budget", config.budget)
    if isinstance(budget, float):
        floor = config.sinks + config.recent + config.interval
        budget = max(math.ceil(Fraction(str(budget)) * prompt_length), floor)
    return budget if budget < prompt_length + params.max_tokens else UNBOUNDED


class ReferenceCache(ABC):
    """One request, under the policy that forgets the oldest tokens behind the sinks.

    ``cells[p]`` is the token at physical position p, HOLE where one has died.
    """

    def __init__(self, mark: int, prompt_length: int, budget: int, config: VTokenConfig) -> None:
        self.mark, self.prompt_length, self.budget, self.config = mark, prompt_length, budget, config
        self.cells: list[int] = []
        self.length = 0
        self.computed = 0
        self.prefilled = False
        self.evictions = 0

    @property
    def steady(self) -> bool:
        """Reduced when its prefill ended, or later."""
        return self.prefilled and self.evictions > 0

    @property
    def live(self) -> list[int]:
        return sorted(token for token in self.cells if token != HOLE)

    @property
    @abstractmethod
    def returned(self) -> int:
        """Tokens by which the positions that the request takes are fewer than the tokens of its sequence."""

    def append(self, count: int) -> list[int]:
        """Positions of the next tokens."""
        positions = [self._place(token, count) for token in range(self.length, self.length + count)]
        self.length += count
        self.computed = count
        return positions

    def forget(self, complete: bool) -> tuple[list[int], int]:
        """What happens after a forward; (tokens evicted, how many tokens moved for it)."""
        chunk = self.config.prefill_chunk if self.config.prefill_evict == "chunked" else UNBOUNDED
        if self.prefilled:
            due, decodes_next = (self.length - self.prompt_length) % self.config.interval == 0, True
        else:
            due, decodes_next = complete or self.length % chunk == 0, complete
            self.prefill_end = self.length
            start = self.length - self.computed
            assert self.budget == UNBOUNDED or start // chunk == (self.length - 1) // chunk, "beyond an eviction"
        self.prefilled |= complete
        live = self.live
        surplus = len(live) - (self.budget - self.config.interval)
        if not due or surplus <= 0:
            return [], 0
        kept = max(self.config.recent, min(self.config.grace, self.length - self.prefill_end))
        victims = [t for t in live if self.config.sinks <= t < self.length - kept][:surplus]
        assert len(victims) == surplus
        dead = set(victims)
        self.cells = [HOLE if t in dead else t for t in self.cells]
        self.evictions += 1
        return victims, self._close_up(decodes_next)

    @abstractmethod
    def _place(self, token: int, count: int) -> int:
        """Write one of ``count`` new tokens; its position."""

    @abstractmethod
    def _close_up(self, decodes_next: bool) -> int:
        """Follow an eviction at once, as far as that needs no other request; tokens moved."""


class DenseReference(ReferenceCache):
    """``fill``: the list ends with the last position that the next forward may use."""

    @property
    def returned(self) -> int:
        return self.length - len(self.live)

    def append(self, count: int) -> list[int]:
        positions = super().append(count)
        assert HOLE not in self.cells
        return positions

    def _place(self, token: int, count: int) -> int:
        """The lowest hole for a single token, the end for several."""
        if HOLE not in self.cells:
            self.cells.append(token)
            return len(self.cells) - 1
        assert count == 1, "several tokens were written into holes"
        position = self.cells.index(HOLE)
        self.cells[position] = token
        return position

    def _close_up(self, decodes_next: bool) -> int:
        extent, moved = len(self.live) + decodes_next, 0
        for position in range(extent, len(self.cells)):
            if self.cells[position] != HOLE:
                self.cells[self.cells.index(HOLE)] = self.cells[position]
                moved += 1
        del self.cells[extent:]
        return moved


class AppendingReference(ReferenceCache):
    """``none`` and ``pack``: tokens are appended, and the list ends with the newest one.

    ``blocks`` are the ids that the cells lie in, S at a time. Those that leave in ``none`` are foreseen; for ``pack``
    the worker's own choice of sources is taken, and what must then happen to the cells is foreseen.
    """

    def __init__(self, mark: int, prompt_length: int, budget: int, config: VTokenConfig) -> None:
        super().__init__(mark, prompt_length, budget, config)
        self.blocks: list[int] = []
        self.dead_blocks: list[int] = []

    @property
    def returned(self) -> int:
        return self.length - len(self.cells)

    def follow(self, change: BlockChange | None) -> int:
        """Let blocks go, and fill those that came in; how many tokens were moved."""
        change = change or BlockChange([])
        sources = [block for block in change.freed if block not in self.dead_blocks]
        assert sorted(change.freed) == sorted([*self.dead_blocks, *sources]), "a dead block stayed, or one left twice"
        assert bool(sources) == bool(change.adopted) and (not sources or len(change.adopted) < len(sources))
        assert len(sources) <= (self.config.pack_blocks if self.config.reclaim == "pack" else 0)
        if change.freed == self.dead_blocks == []:
            return 0
        cells_of = {block: self.cells[n * S : (n + 1) * S] for n, block in enumerate(self.blocks)}
        assert all(len(cells_of[block]) == S for block in change.freed), "a block that is being filled left"
        moving = sorted(t for block in sources for t in cells_of[block] if t != HOLE)
        assert len(change.adopted) == blocks_for(len(moving))
        padded = moving + [HOLE] * (-len(moving) % S)
        cells_of |= {block: padded[n * S : (n + 1) * S] for n, block in enumerate(change.adopted)}
        if sources:
            place = min(self.blocks.index(block) for block in sources)
            self.blocks[place:place] = change.adopted
        self.blocks = [block for block in self.blocks if block not in change.freed]
        self.cells = [token for block in self.blocks for token in cells_of[block]]
        self.dead_blocks = []
        return len(moving)

    def _place(self, token: int, count: int) -> int:
        self.cells.append(token)
        return len(self.cells) - 1

    def _close_up(self, decodes_next: bool) -> int:
        full = len(self.cells) // S
        empty = [HOLE] * S
        self.dead_blocks = [self.blocks[n] for n in range(full) if self.cells[n * S : (n + 1) * S] == empty]
        return 0


def reference_for(mark: int, prompt_length: int, budget: int, config: VTokenConfig) -> ReferenceCache:
    kind = DenseReference if config.reclaim == "fill" else AppendingReference
    return kind(mark, prompt_length, budget, config)
