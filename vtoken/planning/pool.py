"""From a GPU's memory to blocks, as vLLM gets there."""

from dataclasses import asdict, dataclass
from typing import Any

from vtoken.planning.model_size import GIB, ModelSize


@dataclass(frozen=True)
class Pool:
    """Blocks that requests can hold.

    Attributes:
        num_blocks: of ``block_size`` tokens; vLLM's own one is not among them.
        block_bytes: of K and V, in all layers.
        source: how ``num_blocks`` came about, in words.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    source: str

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.block_size

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": self.tokens}


def given_pool(model: ModelSize, num_blocks: int, block_size: int) -> Pool:
    """So many blocks."""
    return Pool(num_blocks, block_size, model.kv_bytes_per_token * block_size, "as asked for")


def pool_in(model: ModelSize, memory: float, utilization: float, reserve: float, block_size: int) -> Pool:
    """The blocks beside a model in a GPU's memory: memory x utilization - weights - reserve.

    Args:
        memory: GiB.
        utilization: share of it that vLLM may use.
        reserve: GiB for activations, CUDA graphs and what the libraries take, which vLLM measures at start-up.

    Raises:
        ValueError: one sentence, where there is no room for a block.
    """
    block_bytes = model.kv_bytes_per_token * block_size
    room = int(memory * utilization * GIB) - model.weight_bytes - int(reserve * GIB)
    weights = f"{model.weight_bytes / GIB:.1f} GiB of weights"
    source = f"{memory:g} GiB x {utilization:g} - {weights} - {reserve:g} GiB reserve"
    num_blocks = room // block_bytes - 1
    if num_blocks < 1:
        raise ValueError(f"{source} leave no room for K/V; give more --memory or a smaller --dtype or --reserve.")
    return Pool(num_blocks, block_size, block_bytes, source)
