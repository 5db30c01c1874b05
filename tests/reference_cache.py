"""What one request remembers and where its tokens lie, as Python lists, by the rules in their plainest form.

Nothing of vtoken's own bookkeeping is used here; ``test_stub_engine`` and its neighbours compare it with this.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from vllm import SamplingParams

from vtoken.config import VTokenConfig
from vtoken.core.reclamation import BlockChange

S = 16
HOLE = -1
UNBOUNDED = 10**9


def blocks_for(tokens: int) -> int:
    return -(-tokens // S)


def protected_head(config: VTokenConfig, prompt_length: int) -> int:
    """Leading tokens that are never forgotten."""
    return max(config.sinks, config.protect_prefix, prompt_length if config.protect_prompt else 0)


def settings_for(config: VTokenConfig, params: SamplingParams) -> VTokenConfig:
    """The engine's settings with the request's own; a budget of 0 for one that is not compressed."""
    own = {key.removeprefix("vtoken."): value for key, value in (params.extra_args or {}).items()}
    off = own.pop("off", 0) or (config.compress == "asked" and not own)
    return config.model_copy(update=own | ({"budget": 0} if off else {}))


def reference_budget(config: VTokenConfig, params: SamplingParams, prompt_length: int) -> int:
    """Of a request with these settings, in tokens; one that its whole sequence never reaches is infinite."""
    budget = config.budget
    if budget == 0:
        return UNBOUNDED
    if isinstance(budget, float):
        floor = protected_head(config, prompt_length) + max(config.recent, config.grace) + config.interval
        budget = max(math.ceil(Fraction(str(budget)) * prompt_length), floor)
    return budget if budget < prompt_length + params.max_tokens else UNBOUNDED


class ReferenceCache(ABC):
    """One request, under the policy that forgets the oldest tokens behind the sinks, or under one that is asked.

    Args:
        mark: what its tokens' K/V is told apart by.
        prompt_length, budget: of the request, in tokens.
        config: the engine's settings.
    """

    def __init__(self, mark: int, prompt_length: int, budget: int, config: VTokenConfig) -> None:
        self.mark, self.prompt_length, self.budget, self.config = mark, prompt_length, budget, config
        self.length = 0
        self.computed = 0
        self.prefilled = False
        self.evictions = 0
        self.reduced_from = self.grown_by = 0

    @property
    def steady(self) -> bool:
        """Reduced when its prefill ended, or later."""
        return self.prefilled and self.evictions > 0

    @property
    @abstractmethod
    def live(self) -> list[int]:
        """The tokens that are remembered, in logical order."""

    def append(self, marks: Sequence[int]) -> list[int] | None:
        """Positions of the next tokens, whose K/V these marks stand for; None if nobody here can say."""
        self.length += len(marks)
        self.computed = len(marks)
        return None

    def content(self, tokens: Sequence[int]) -> np.ndarray:
        """What the slots of these logical tokens hold, shape [N, 2]."""
        return np.stack([np.full(len(tokens), self.mark), np.array(tokens, dtype=np.int64)], axis=-1)

    def forget(self, complete: bool, taken: list[int] | None = None) -> tuple[list[int], int]:
        """What happens after a forward; (tokens evicted, how many tokens moved for it).

        ``taken`` are the victims of a policy that is not foreseen here: number and protection must be right.
        """
        surplus, decodes_next = self._surplus(complete)
        if surplus <= 0:
            assert not taken, f"tokens {taken} were forgotten before their time"
            return [], 0
        kept = max(self.config.recent, min(self.config.grace, self.length - self.prefill_end))
        head = protected_head(self.config, self.prompt_length)
        may_go = [t for t in self.live if head <= t < self.length - kept]
        victims = may_go[:surplus] if taken is None else taken
        assert len(victims) == surplus, f"{len(victims)} tokens were forgotten instead of {surplus}"
        assert set(victims) <= set(may_go), "a token was forgotten that is protected, or dead"
        assert len(set(victims)) == len(victims), "a token was forgotten twice"
        self._bury(set(victims))
        self.evictions += 1
        return victims, self._close_up(decodes_next)

    def _surplus(self, complete: bool) -> tuple[int, bool]:
        """Tokens to forget after this forward, and whether the next one computes a single token."""
        chunk = self.config.prefill_chunk if self.config.prefill_evict == "chunked" else UNBOUNDED
        if self.prefilled:
            due, decodes_next = (self.length - self.prompt_length) % self.config.interval == 0, True
        else:
            due, decodes_next = complete or self.length % chunk == 0, complete
            self.prefill_end = self.length
            start = self.length - self.computed
            assert self.budget == UNBOUNDED or start // chunk == (self.length - 1) // chunk, "beyond an eviction"
        self.prefilled |= complete
        return (len(self.live) - (self.budget - self.config.interval) if due else 0), decodes_next

    @abstractmethod
    def _bury(self, dead: set[int]) -> None:
        """These tokens are forgotten."""

    @abstractmethod
    def _close_up(self, decodes_next: bool) -> int:
        """Follow an eviction at once, as far as that needs no other request; tokens moved."""


class PlacedReference(ReferenceCache):
    """Foresees where each token lies, too: ``cells[p]`` is the token at physical position p, HOLE for a dead one."""

    def __init__(self, mark: int, prompt_length: int, budget: int, config: VTokenConfig) -> None:
        super().__init__(mark, prompt_length, budget, config)
        self.cells: list[int] = []

    @property
    def live(self) -> list[int]:
        return sorted(token for token in self.cells if token != HOLE)

    @property
    @abstractmethod
    def returned(self) -> int:
        """Tokens by which the positions that the request takes are fewer than the tokens of its sequence."""

    def append(self, marks: Sequence[int]) -> list[int]:
        positions = [self._place(self.length + n, len(marks)) for n in range(len(marks))]
        super().append(marks)
        return positions

    def _bury(self, dead: set[int]) -> None:
        self.cells = [HOLE if t in dead else t for t in self.cells]

    @abstractmethod
    def _place(self, token: int, count: int) -> int:
        """Write one of ``count`` new tokens; its position."""


class DenseReference(PlacedReference):
    """``fill``: the list ends with the last position that the next forward may use."""

    @property
    def returned(self) -> int:
        return self.length - len(self.live)

    def append(self, marks: Sequence[int]) -> list[int]:
        positions = super().append(marks)
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


class AppendingReference(PlacedReference):
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


class CachingReference(ReferenceCache):
    """With a prefix cache: which tokens are there, and what their K/V must be.

    Where they lie depends on what others hold, and is looked at instead of foreseen.

    Args:
        mark: of what it computes once it has lost a token, in this life of its cache.
        hit: leading tokens that it found in the prefix cache.
        marks: of the tokens found there.
    """

    def __init__(
        self, mark: int, prompt_length: int, budget: int, config: VTokenConfig, hit: int, marks: list[int]
    ) -> None:
        super().__init__(mark, prompt_length, budget, config)
        self.hit, self.length, self.marks = hit, hit, list(marks)
        self._live = list(range(hit))
        if config.prefill_evict == "chunked":
            places = range(config.prefill_chunk, hit + 1, config.prefill_chunk)
            assert all(place <= budget - config.interval for place in places), "the hit passes over an eviction"

    @property
    def live(self) -> list[int]:
        return self._live

    def append(self, marks: Sequence[int]) -> None:
        self._live += range(self.length, self.length + len(marks))
        self.marks += marks
        super().append(marks)

    def content(self, tokens: Sequence[int]) -> np.ndarray:
        return np.array([(self.marks[token], token) for token in tokens], dtype=np.int64).reshape(-1, 2)

    def _bury(self, dead: set[int]) -> None:
        self._live = [token for token in self._live if token not in dead]

    def _close_up(self, decodes_next: bool) -> int:
        return 0


def reference_for(mark: int, prompt_length: int, budget: int, config: VTokenConfig) -> ReferenceCache:
    kind = DenseReference if config.reclaim == "fill" else AppendingReference
    return kind(mark, prompt_length, budget, config)
