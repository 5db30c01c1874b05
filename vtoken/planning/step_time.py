"""How long a step takes: a roofline, and a fixed overhead. An estimate, with all that it rests on in one place."""

from dataclasses import asdict, dataclass
from typing import Any

from vtoken.planning.gpu import Gpu
from vtoken.planning.model_size import ModelSize


@dataclass(frozen=True)
class StepTime:
    """Seconds = max(bytes / bandwidth, operations / flops) / efficiency + overhead.

    Bytes are the weights, once, and the K/V of every token that is attended. Operations are those of the weights for
    each new token, and those of attention for each pair of a query and a token.

    Attributes:
        weight_bytes, kv_bytes_per_token, flops_per_token, flops_per_pair: of the model.
        bandwidth: bytes/s.
        flops: operations/s.
        efficiency: share of both that is reached, in (0, 1].
        overhead: seconds per step.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: int
    flops_per_pair: int
    bandwidth: float
    flops: float
    efficiency: float
    overhead: float

    def __call__(self, new_tokens: int, attended: int, pairs: int) -> float:
        """Seconds of a step.

        Args:
            new_tokens: that it computes, over all requests.
            attended: tokens whose K/V is read, likewise.
            pairs: of a query and a token that it attends, likewise.
        """
        if not new_tokens:
            return self.overhead
        reading = (self.weight_bytes + self.kv_bytes_per_token * attended) / self.bandwidth
        computing = (self.flops_per_token * new_tokens + self.flops_per_pair * pairs) / self.flops
        return max(reading, computing) / self.efficiency + self.overhead

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def step_time_of(model: ModelSize, gpu: Gpu, efficiency: float, overhead_ms: float) -> StepTime:
    """The step time of a model on a GPU."""
    return StepTime(
        model.weight_bytes,
        model.kv_bytes_per_token,
        model.flops_per_token,
        model.flops_per_pair,
        gpu.bandwidth * 1e9,
        gpu.flops * 1e12,
        efficiency,
        overhead_ms / 1e3,
    )
