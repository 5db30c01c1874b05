"""An engine without a model: real block counts, one second per step, and outputs that can be told in advance."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class FakeProgress:
    request_id: str
    token_ids: list[int]
    finished: bool
    finish_reason: str | None


@dataclass
class FakeSnapshot:
    held_blocks: int
    live_tokens: int
    running: int
    waiting: int
    preemptions: int = 0
    tokens_evicted: int = 0
    tokens_moved: int = 0
    blocks_reclaimed: int = 0


@dataclass
class _Request:
    request_id: str
    prompt: list[int]
    max_tokens: int
    cached: int = 0
    output: list[int] = field(default_factory=list)


class FakeEngine:
    """Admits a request when its full length fits, and decodes one token per running request and step.

    keep: live tokens after every step, by eviction and repacking; None evicts nothing.
    answer: output tokens for a prompt, cut to the request's length.
    finish_reason: of every request.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        keep: int | None = None,
        answer: Callable[[list[int]], list[int]] = lambda prompt: [0],
        finish_reason: str = "length",
    ) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.now = 0.0
        self.evicted = self.moved = self.reclaimed = 0
        self._keep, self._answer, self._finish_reason = keep, answer, finish_reason
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []

    def clock(self) -> float:
        return self.now

    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None:
        self._waiting.append(_Request(request_id, prompt_token_ids, max_tokens))

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[FakeProgress]:
        self.now += 1.0
        while self._waiting and self._fits(self._waiting[0]):
            self._running.append(self._waiting.pop(0))
        progress = []
        for request in list(self._running):
            request.cached += 1 if request.output else len(request.prompt)
            answer = self._answer(request.prompt)
            request.output.append(answer[len(request.output) % len(answer)])
            finished = len(request.output) == request.max_tokens
            if finished:
                self._running.remove(request)
            else:
                self._evict(request)
            reason = self._finish_reason if finished else None
            progress.append(FakeProgress(request.request_id, list(request.output), finished, reason))
        return progress

    def snapshot(self) -> FakeSnapshot:
        return FakeSnapshot(
            held_blocks=sum(self._blocks(request.cached) for request in self._running),
            live_tokens=sum(request.cached for request in self._running),
            running=len(self._running),
            waiting=len(self._waiting),
            tokens_evicted=self.evicted,
            tokens_moved=self.moved,
            blocks_reclaimed=self.reclaimed,
        )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _fits(self, request: _Request) -> bool:
        full = sum(self._blocks(len(other.prompt) + other.max_tokens - 1) for other in [*self._running, request])
        return full <= self.num_blocks

    def _evict(self, request: _Request) -> None:
        if self._keep is None or request.cached <= self._keep:
            return
        kept_blocks = self._blocks(self._keep)
        # The newest tokens survive; those beyond the kept blocks move into holes.
        self.moved += min(self._keep, max(request.cached - kept_blocks * self.block_size, 0))
        self.evicted += request.cached - self._keep
        self.reclaimed += self._blocks(request.cached) - kept_blocks
        request.cached = self._keep
