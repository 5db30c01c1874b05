"""What ``openvino_peer`` needs of OpenVINO GenAI, without a model: real block counts, outputs that can be told.

Stands in for the packages openvino and openvino_genai alike.
"""

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

__version__ = "fake"
BLOCK = 32
WORDS = 200


class AggregationMode(Enum):
    SUM = 0
    NORM_SUM = 1


class Status(Enum):
    RUNNING = 0
    FINISHED = 1
    IGNORED = 2


@dataclass
class CacheEvictionConfig:
    start_size: int
    recent_size: int
    max_cache_size: int
    aggregation_mode: AggregationMode
    apply_rotation: bool
    snapkv_window_size: int


@dataclass
class SchedulerConfig:
    num_kv_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    enable_prefix_caching: bool = True
    use_cache_eviction: bool = False
    cache_eviction_config: CacheEvictionConfig | None = None


@dataclass
class GenerationConfig:
    max_new_tokens: int = 0
    ignore_eos: bool = False
    do_sample: bool = True


def Tensor(array: Any) -> Any:
    assert array.dtype == "int64"
    return array


@dataclass
class Handle:
    prompt: list[int]
    wanted: int
    evicting: bool
    made: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    status: Status = Status.RUNNING

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        taken, self.unread = self.unread, []
        return {0: SimpleNamespace(generated_ids=taken)}

    def get_status(self) -> Status:
        return self.status

    def produce(self) -> None:
        """The prompt's sum and on, from the third token on another number where something was forgotten."""
        n = len(self.made)
        self.made.append((sum(self.prompt) + n + (self.evicting and n > 1)) % WORDS)
        self.unread.append(self.made[-1])
        if len(self.made) == self.wanted:
            self.status = Status.FINISHED


class ContinuousBatchingPipeline:
    """A request with a token of 199 in its prompt is never produced; of the rest, as many run as fit whole."""

    def __init__(self, path: str, config: SchedulerConfig, device: str, properties: dict[str, Any]) -> None:
        assert device == "CPU"
        assert properties["INFERENCE_PRECISION_HINT"] == "f32"
        assert config.enable_prefix_caching is False
        assert config.use_cache_eviction == (config.cache_eviction_config is not None)
        self.config, self.bytes = config, {"f32": 4, "u8": 1}[properties["KV_CACHE_PRECISION"]]
        self.waiting: list[Handle] = []
        self.running: list[Handle] = []
        self.usage, self.scheduled = 0.0, 0

    def add_request(self, request_id: int, tokens: Any, generation: GenerationConfig) -> Handle:
        assert generation.ignore_eos
        assert not generation.do_sample
        prompt = tokens[0].tolist()
        handle = Handle(prompt, generation.max_new_tokens, self.config.use_cache_eviction)
        if WORDS - 1 in prompt:
            handle.status = Status.IGNORED
        else:
            self.waiting.append(handle)
        return handle

    def has_non_finished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> None:
        while self.waiting and sum(map(self._blocks, [*self.running, self.waiting[0]])) <= self.config.num_kv_blocks:
            self.running.append(self.waiting.pop(0))
        for handle in self.running:
            handle.produce()
        self.usage = 100 * sum(map(self._blocks, self.running)) / self.config.num_kv_blocks
        self.scheduled = len(self.running)
        self.running = [handle for handle in self.running if handle.status is Status.RUNNING]

    def get_metrics(self) -> Any:
        size = self.config.num_kv_blocks * BLOCK * self.bytes
        return SimpleNamespace(cache_usage=self.usage, scheduled_requests=self.scheduled, kv_cache_size_in_bytes=size)

    def _blocks(self, handle: Handle) -> int:
        held = -(-(len(handle.prompt) + len(handle.made)) // BLOCK)
        evicting = self.config.cache_eviction_config
        return min(held, evicting.max_cache_size // BLOCK + 1) if evicting and handle.made else held
