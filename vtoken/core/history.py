"""What the block pool looked like, once a second: what the live page and the reports draw."""

from collections import deque
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any, Protocol


@dataclass(frozen=True)
class Holding:
    """The blocks of one request, in the order of its positions, and how many live tokens each of them has."""

    request: str
    blocks: list[int]
    live: list[int]


@dataclass(frozen=True)
class Frame:
    """The pool after a step. The totals count from the engine's start.

    Attributes:
        number: counts the frames of one engine from 1.
        time: seconds since the epoch.
        running, waiting: requests.
        held_blocks: blocks that are not free; one that several requests share counts once.
        live_tokens: slots of them whose token somebody attends.
        dead_tokens: slots of them whose token was evicted; the others are not used yet.
        holdings: who holds what. A block that several requests share is in each of theirs.
    """

    number: int
    time: float
    running: int
    waiting: int
    held_blocks: int
    live_tokens: int
    dead_tokens: int
    tokens_evicted: int
    tokens_moved: int
    blocks_reclaimed: int
    holdings: list[Holding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Recording:
    """Frames of one engine.

    Attributes:
        name: what a reader calls it, such as "fill".
        settings: one line about what is evicted and how blocks come back.
        block_size: slots per block.
        num_blocks: blocks that requests can hold; their ids are 1 to this, since vLLM keeps block 0.
        frames: the oldest first.
    """

    name: str
    settings: str
    block_size: int
    num_blocks: int
    frames: list[Frame] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class CompactHoldings(Protocol):
    """Holdings in a form that takes little memory: those of ``core/holdings.py``."""

    @property
    def nbytes(self) -> int: ...
    def listed(self) -> list[Holding]: ...


class History:
    """The last frames of an engine, one per interval: one that comes early takes the place of the last one.

    Args:
        length: frames that are kept; 0 keeps none.
        interval: seconds from one to the next.
        most_bytes: what their holdings may take together, whatever the length.
    """

    def __init__(self, length: int, interval: float = 1.0, most_bytes: int = 64 << 20) -> None:
        self._length = length
        self._interval = interval
        self._most_bytes = most_bytes
        self._frames: deque[tuple[Frame, CompactHoldings]] = deque()
        self._bytes = 0
        self._due = -inf
        self._count = 0

    def due(self, now: float) -> bool:
        """Whether a frame is missing at this time, in seconds of a clock that does not go back."""
        return self._length > 0 and now >= self._due

    @property
    def keeps(self) -> bool:
        return self._length > 0

    def append(self, now: float, frame: Frame, held: CompactHoldings) -> None:
        """Keep a frame, taken at this time of the same clock, under the next number; the oldest ones give way."""
        if now < self._due and self._frames:
            self._bytes -= self._frames.pop()[1].nbytes
        else:
            self._due = now + self._interval
        self._count += 1
        self._frames.append((replace(frame, number=self._count), held))
        self._bytes += held.nbytes
        while len(self._frames) > self._length or self._bytes > self._most_bytes:
            self._bytes -= self._frames.popleft()[1].nbytes

    def since(self, number: int, most_blocks: int) -> list[Frame]:
        """The frames after the one of this number, the oldest first.

        Args:
            number: that of the last frame that is known already; 0 for none.
            most_blocks: when their holdings name so many blocks, what comes later is left for the next time.
        """
        frames: list[Frame] = []
        blocks = 0
        for frame, held in self._frames:
            if frame.number > number and blocks < most_blocks:
                frames.append(replace(frame, holdings=held.listed()))
                blocks += sum(len(one.blocks) for one in frames[-1].holdings)
        return frames
