"""What is not attended has no influence on any bit: poison in every slot that no live token occupies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Answer, Job, generate, prompts, running

from vtoken.config import VTokenConfig
from vtoken.core.token_table import HOLE
from vtoken.kernels.layout import vec_views

S = 32
FOREVER = 1e30
Tiny = Callable[[str], Path]


class Poisoner:
    """Before every forward: NaN in blocks that nobody holds, NaN in K and 1e30 in V of the held blocks' other slots.

    (vLLM's own kernel multiplies V of a last block's tail by zero, so that NaN there would harm vLLM itself.)
    """

    def __init__(self, engine: Any, spoil: bool = False) -> None:
        self._runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._stock, self._spoil = self._runner._model_forward, spoil
        self._runner._model_forward = self._forward
        layers = self._runner.compilation_config.static_forward_context.values()
        self._caches = [vec_views(layer.kv_cache) for layer in layers]
        self.slots = self.blocks = self.holes = 0

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        runner, batch = self._runner, self._runner.input_batch
        table, held = batch.block_table[0], torch.zeros(self._caches[0][0].shape[0], dtype=torch.bool)
        for request in runner.requests.values():  # those left out of this step too
            held[request.block_ids[0]] = True
        tails: list[tuple[int, int]] = []
        for row in range(len(batch.req_ids)):
            blocks = table.block_table.np[row, : table.num_blocks_per_row[row]].tolist()
            length = int(runner.seq_lens[row])
            mine = runner.vtoken.table.rows([batch.req_ids[row]])[0]
            holes = np.flatnonzero(runner.vtoken.table.logical_at[mine, :length] == HOLE).tolist()
            self.holes += len(holes)
            tails += [(blocks[p // S], p % S) for p in holes]
            tails += [(blocks[p // S], p % S) for p in range(length, len(blocks) * S)]
            if self._spoil:
                tails.append((blocks[0], 0))
        where = tuple(torch.tensor(tails).T) if tails else None
        for keys, values in self._caches:
            keys[~held] = values[~held] = torch.nan
            if where is not None:
                keys[where], values[where] = torch.nan, FOREVER
        self.slots += len(tails)
        self.blocks += int((~held).sum())
        return self._stock(*args, **kwargs)


def run(model: Path, config: VTokenConfig, watch: Any = None, **engine_args: Any) -> tuple[dict[str, Answer], Any]:
    jobs = [Job(f"r{n}", p, 30) for n, p in enumerate(prompts((300, 77, 129, 128, 40), 512))]
    with running(model, config, skip_tokenizer_init=True, max_num_batched_tokens=96, **engine_args) as engine:
        watching = watch and watch(engine)
        return generate(engine, jobs, logprobs=-1), watching


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "streaming_llm"},
        {"policy": "h2o"},
        {"policy": "h2o", "prefill_evict": "chunked", "prefill_chunk": 40},
        {"policy": "scissorhands", "interval": 5},
        {"policy": "snapkv", "score_layers": [1]},
        {"policy": "key_norm", "budget": 45},
        {"policy": "random", "reclaim": "none"},
        {"policy": "h2o", "reclaim": "pack", "check_interval": 1, "low_watermark": 1.0, "headroom": 0.1},
        {"policy": "snapkv", "reclaim": "none", "prefill_evict": "chunked", "prefill_chunk": 40},
    ],
    ids=["stock kernel", "h2o", "chunked", "each query", "one layer", "key norms", "holes", "packed", "holed prompt"],
)
def test_logits_are_bit_identical(tiny: Tiny, options: dict) -> None:
    config = VTokenConfig(**{"budget": 50, "sinks": 4, "recent": 32, **options})
    clean, _ = run(tiny("llama-gqa"), config)
    poisoned, poisoner = run(tiny("llama-gqa"), config, Poisoner)
    assert poisoner.slots > 1000 and poisoner.blocks > 1000
    assert (poisoner.holes > 100) == (config.reclaim != "fill")
    assert {r: a.token_ids for r, a in poisoned.items()} == {r: a.token_ids for r, a in clean.items()}
    assert {r: a.logits for r, a in poisoned.items()} == {r: a.logits for r, a in clean.items()}


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o"])
def test_poison_in_one_live_slot_shows(tiny: Tiny, policy: str) -> None:
    config = VTokenConfig(budget=50, policy=policy)
    clean, _ = run(tiny("llama-gqa"), config)
    spoiled, _ = run(tiny("llama-gqa"), config, lambda engine: Poisoner(engine, spoil=True))
    assert any(spoiled[r].logits != clean[r].logits for r in clean)
