"""What the block pool looked like, once a second: what the live page and the reports draw."""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


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


class History:
    """The last frames of an engine, one per interval at most.

    Args:
        length: frames that are kept; 0 keeps none.
        interval: seconds from one to the next.
    """

    def __init__(self, length: int, interval: float = 1.0) -> None:
        self.length = length
        self._interval = interval
        self._frames: deque[Frame] = deque(maxlen=length)
        self._due = 0.0
        self._count = 0

    def due(self, now: float) -> bool:
        """Whether a frame is missing at this time, in seconds of any clock that does not go back."""
        return self.length > 0 and now >= self._due

    def next_number(self, now: float) -> int:
        """The number of the frame that is taken at this time."""
        self._due = now + self._interval
        self._count += 1
        return self._count

    def append(self, frame: Frame) -> None:
        self._frames.append(frame)

    def since(self, number: int) -> Iterator[Frame]:
        """The frames after the one of this number, the oldest first."""
        return (frame for frame in self._frames if frame.number > number)
