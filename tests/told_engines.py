"""A bench whose engines answer what a test tells them to, and note what they were asked."""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from vtoken.evaluation.bench.bench import Bench
from vtoken.evaluation.bench.engines import EnginePool, EngineSpec
from vtoken.evaluation.bench.requests import BenchRequests
from vtoken.evaluation.workloads import Workload

Answer = Callable[[str, str, dict[str, Any]], Any]
"""(variant, task, arguments) -> what the engine returns."""


class _Texts(BenchRequests):
    def exactly(self, count: int, tokens: int, max_tokens: int = 128) -> list[Workload]:
        return [Workload(f"text-{n}", [n] * tokens, max_tokens) for n in range(count)]

    def long(
        self, count: int, longest: int, kind: str = "", shortest: int = 1, max_tokens: int = 128
    ) -> list[Workload]:
        return [Workload(f"long-{n}", [n] * (1200 + n), max_tokens) for n in range(count)]


class _Engine:
    def __init__(self, variant: str, spec: EngineSpec, answer: Answer) -> None:
        self.variant, self.spec, self._answer = variant, spec, answer
        self.block_size = spec.engine_args["block_size"]
        self.num_blocks = spec.engine_args["num_gpu_blocks_override"] - 1

    def do(self, task: str, **arguments: Any) -> Any:
        return self._answer(self.variant, task.partition(":")[2], arguments)

    def close(self) -> None: ...


class _TextConfig:
    max_position_embeddings = 8192
    num_attention_heads = num_hidden_layers = 2
    hidden_size = 8


class ToldBench(Bench):
    """Engines are called as their way of reclaiming, "native", or "… again" for the second of a kind."""

    def __init__(self, answer: Answer, **options: Any) -> None:
        def start(spec: EngineSpec, settle: object) -> Any:
            variant = spec.vtoken.reclaim if spec.vtoken else "native"
            self.started.append(spec)
            return _Engine(variant + " again" * spec.copy, spec, answer)

        self.started: list[EngineSpec] = []
        requests = _Texts(None, 8192)
        super().__init__(None, _TextConfig, requests, EnginePool(start), Console(quiet=True), **options)  # type: ignore[arg-type]

    def quality_of(self, policy: str, budget: int | float, **settings: Any) -> dict[str, Any]:
        return quality(policy)


def quality(policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "budget": 0.5,
        "needles": 6,
        "needles_found": 4,
        "native_needles_found": 5,
        "log_likelihood": -3.25,
        "log_likelihood_change": -0.125,
        "tokens_evicted": 99,
    }


def policy_of(arguments: dict[str, Any]) -> str | None:
    """What the requests of a load ask for; None where they say nothing."""
    asked = {(work["extra_args"] or {}).get("vtoken.policy") for work in arguments["workloads"]}
    (policy,) = asked
    return policy
