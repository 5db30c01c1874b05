"""GPUs by the numbers of their vendor's data sheets."""

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: in ``GPUS``.
        memory: GiB. Data sheets say GB; what the driver shows is close to as many GiB on HBM, and 6 % less on GDDR.
        bandwidth: of its memory, GB/s.
        flops: TFLOP/s in bfloat16, dense.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A10G", 24, 600, 70),
        Gpu("L4", 24, 300, 121),
        Gpu("L40S", 48, 864, 362),
        Gpu("A100-40", 40, 1555, 312),
        Gpu("A100-80", 80, 2039, 312),
        Gpu("H100", 80, 3350, 989),
        Gpu("H200", 141, 4800, 989),
    )
}


def find_gpu(name: str, memory: float | None = None, bandwidth: float | None = None, flops: float | None = None) -> Gpu:
    """The GPU of that name, with those of its numbers replaced that are given.

    Raises:
        ValueError: one sentence, for an unknown name.
    """
    gpu = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if gpu is None:
        raise ValueError(
            f"--gpu {name} is not known; give one of {', '.join(GPUS)}, and --memory, --bandwidth and --flops for "
            "another one."
        )
    return replace(
        gpu,
        memory=gpu.memory if memory is None else memory,
        bandwidth=gpu.bandwidth if bandwidth is None else bandwidth,
        flops=gpu.flops if flops is None else flops,
    )


def serving_defaults(gpu: Gpu) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) that ``vllm serve`` takes where nothing is said."""
    if gpu.memory >= 160:
        return 1024, 16384
    return (1024, 8192) if gpu.memory >= 70 and "A100" not in gpu.name else (256, 2048)
