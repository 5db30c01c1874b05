"""A fake engine whose blocks can be looked into, and a bench that runs its tasks on one, in this process."""

from pathlib import Path
from typing import Any

from byte_tokenizer import ByteTokenizer
from fake_engine import FakeEngine
from rich.console import Console

from vtoken.evaluation.bench.bench import Bench
from vtoken.evaluation.bench.engines import EnginePool, EngineSpec
from vtoken.evaluation.bench.requests import BenchRequests
from vtoken.evaluation.bench.serve import find

SEEN = {
    "needles": 6,
    "needles_found": 3,
    "native_needles_found": 5,
    "log_likelihood": -2.5,
    "log_likelihood_change": -0.125,
}
"""What a quality measurement says."""
SHOWN = ["3 of 6", "5 of 6", "-0.125"]
"""The same in a table."""


class BlockEngine(FakeEngine):
    """Packs the live tokens of a request into the first blocks, or, with ``holes``, one into each."""

    holes = False

    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int, **settings: Any) -> None:
        super().add_request(request_id, prompt_token_ids, max_tokens)

    def live_per_block(self) -> dict[str, list[int]]:
        return {request.request_id: self._spread(request.cached) for request in self._running}

    def _spread(self, live: int) -> list[int]:
        if self.holes:
            return [1] * live
        full, rest = divmod(live, self.block_size)
        return [self.block_size] * full + [rest] * (rest > 0)


class Here:
    """Stands for an engine's process: does its tasks on an engine in this one."""

    def __init__(self, spec: EngineSpec, engine: Any) -> None:
        self.spec, self.engine = spec, engine

    def do(self, task: str, **arguments: Any) -> Any:
        return find(task)(self.engine, **arguments)

    def close(self) -> None:
        pass


class StubBench(Bench):
    """Engines are ``BlockEngine``, of which all tokens but ``keep`` of a request are dropped; quality is given."""

    def __init__(self, keep: int | None = 40, file: Path | None = None) -> None:
        self.specs: list[EngineSpec] = []

        def start(spec: EngineSpec, settle: object) -> Any:
            self.specs.append(spec)
            return Here(spec, BlockEngine(spec.engine_args["block_size"], 10_000, keep=keep))

        requests = BenchRequests(ByteTokenizer(), 8192, file)
        super().__init__(Path("model"), _Config(), requests, EnginePool(start), Console(quiet=True), quick=True)

    def quality_of(self, policy: str, budget: int | float, **settings: Any) -> dict[str, Any]:
        return SEEN


class _Config:
    """What vLLM's arguments need to know of a model."""

    max_position_embeddings = 8192
    num_hidden_layers = 1
    num_attention_heads = 1
    hidden_size = 8
