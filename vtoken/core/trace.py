"""What happened to one request, in a form from which its attention can be replayed without vtoken."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from vtoken.core.ledger import StepCounts
from vtoken.core.ragged import Ints, offsets_of


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


class TraceRecorder:
    """Keeps the traces of a worker's requests until somebody takes them."""

    def __init__(self) -> None:
        self.traces: dict[str, Trace] = {}

    def begin(self, req_id: str, prefix_hit: int) -> None:
        """A request begins, or begins again, with so many tokens from the prefix cache."""
        self.traces.setdefault(req_id, Trace()).incarnations.append(Incarnation(prefix_hit))

    def note(self, req_ids: list[str], counts: StepCounts, healthy: Ints, dying: Ints, victims: Ints) -> None:
        """Take down a step.

        Args:
            req_ids: of the step; ``counts`` are in this order.
            healthy, dying: indices of the requests that computed, and of those among them that lost tokens.
            victims: the latter's, request by request.
        """
        bounds = offsets_of(counts.evict[dying])
        taken = {i: victims[bounds[n] : bounds[n + 1]].tolist() for n, i in enumerate(dying.tolist())}
        for i in healthy.tolist():
            life = self.traces[req_ids[i]].incarnations[-1]
            life.new_tokens.append(int(counts.new_tokens[i]))
            life.victims.append(sorted(taken.get(i, [])))
            life.num_blocks.append(int(counts.num_blocks[i]))

    def take(self, unfinished: Container[str]) -> dict[str, Trace]:
        """All traces recorded so far; only those of unfinished requests are kept."""
        traces = self.traces
        self.traces = {req_id: trace for req_id, trace in traces.items() if req_id in unfinished}
        return traces
