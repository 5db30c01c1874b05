"""What happened to one request, in a form from which its attention can be replayed without vtoken."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Incarnation:
    """One life of a request's cache: from empty to the end of the request or to a preemption.

    ``new_tokens[i]`` is the number of tokens that forward i computed; ``victims[i]`` are the logical ids evicted
    right after forward i, so that forward i + 1 is the first one without them. ``num_blocks[i]`` is the number of
    blocks that the request held at forward i.
    """

    prefix_hit: int = 0
    new_tokens: list[int] = field(default_factory=list)
    victims: list[list[int]] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)


@dataclass
class Trace:
    """The lives of one request's cache, more than one if it was preempted and recomputed."""

    incarnations: list[Incarnation] = field(default_factory=list)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Trace":
        """Undo ``dataclasses.asdict``: between processes only plain containers keep their type."""
        return cls([Incarnation(**life) for life in plain["incarnations"]])
