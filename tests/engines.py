"""Running real vLLM engines in tests, and watching what each forward is given."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from quick_starts import quick_starts

from vtoken.config import VTokenConfig
from vtoken.core.trace import Trace
from vtoken.vllm_plugin import make_engine

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "block_size": 32,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 129,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 30,
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
}


@dataclass(frozen=True)
class Job:
    """A request: its prompt, how much it generates, its own budget (None: the engine's), and what else it sets."""

    name: str
    prompt: list[int]
    max_tokens: int
    budget: int | float | None = None
    own: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logits: list[dict[int, float]] = field(default_factory=list)


def prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, n).tolist() for n in lengths]


@contextmanager
def running(model: Path, vtoken: VTokenConfig | None, **engine_args: Any) -> Iterator[Any]:
    """An engine that is shut down afterwards."""
    with quick_starts():
        engine = make_engine(str(model), vtoken, **{**ENGINE_ARGS, **engine_args})
        try:
            yield engine
        finally:
            engine.shutdown()


def generate(engine: Any, jobs: Sequence[Job], logprobs: int | None = None) -> dict[str, Answer]:
    """Run all jobs together to their end."""
    answers = {job.name: Answer() for job in jobs}
    for job in jobs:
        own = job.own if job.budget is None else {"budget": job.budget, **job.own}
        extra = {f"vtoken.{name}": value for name, value in own.items()} or None
        engine.add_request(job.name, job.prompt, job.max_tokens, extra_args=extra, logprobs=logprobs)
    while engine.has_unfinished():
        for progress in engine.step():
            answers[progress.request_id] = Answer(progress.token_ids, progress.logprobs or [])
    return answers


@dataclass(frozen=True)
class Seen:
    """What one request's part of a forward looked like."""

    request_id: str
    positions: list[int]
    seq_len: int
    block_ids: list[int]
    slots: list[int]


class ForwardWatch:
    """Reads the attention inputs of every forward from vLLM's runner, just before the model runs."""

    def __init__(self, engine: Any) -> None:
        self.forwards: list[list[Seen]] = []
        self._names = engine._external_id
        self._runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._stock = self._runner._model_forward
        self._runner._model_forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        runner, batch = self._runner, self._runner.input_batch
        table, starts = batch.block_table[0], runner.query_start_loc.np
        seen = []
        for row, req_id in enumerate(batch.req_ids):
            part = slice(int(starts[row]), int(starts[row + 1]))
            blocks = table.block_table.np[row]
            used = int(table.num_blocks_per_row[row])
            assert not blocks[used:].any(), "the tail of a block-table row must be null"
            seen.append(
                Seen(
                    self._names[req_id],
                    runner.positions[part].tolist(),
                    int(runner.seq_lens[row]),
                    blocks[:used].tolist(),
                    table.slot_mapping.gpu[part].tolist(),
                )
            )
        self.forwards.append(seen)
        return self._stock(*args, **kwargs)


def block_counts(trace: Trace) -> list[int]:
    return [count for life in trace.incarnations for count in life.num_blocks]
