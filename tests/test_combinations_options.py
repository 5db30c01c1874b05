"""Engine options one by one, each held to the oracle; a start each, so most run with VTOKEN_TEST_EVERYTHING=1 alone."""

import os
from pathlib import Path
from typing import Any

import oracle
import pytest
from engines import prompts
from llms import BUDGET, TIGHT, hold, serving
from vllm import SamplingParams

EVERYTHING = bool(os.environ.get("VTOKEN_TEST_EVERYTHING"))
LENGTHS, OUTPUTS = (150, 150, 200, 70), 15


class Extension:
    """For ``worker_extension_cls``."""

    def counts_blocks(self) -> int:
        return self.model_runner.vtoken.table.block_size


@pytest.mark.skipif(not EVERYTHING, reason="runs with VTOKEN_TEST_EVERYTHING=1")
@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "CPU_ATTN"},
        {"enable_chunked_prefill": False},
        {"enable_prefix_caching": False},
        {"kv_cache_metrics": True, "kv_cache_metrics_sample": 1.0, "disable_log_stats": False},
        {"kv_sharing_fast_prefill": True},
        {"long_prefill_token_threshold": 20},
        {"max_num_active_seqs": 2},
        {"max_num_batched_tokens": 64},
        {"max_num_scheduled_tokens": 50},
        {"max_num_seqs": 1},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"stream_interval": 4},
        {"watermark": 0.3},
        {"worker_extension_cls": f"{__name__}.Extension"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_engine_option(tiny_gqa: Path, options: dict[str, Any]) -> None:
    asked = prompts(LENGTHS, 512)
    asked[1] = asked[0]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, logprobs=-1, detokenize=False)
    with serving(tiny_gqa, TIGHT, **{"skip_tokenizer_init": True, **options}) as served:
        reference = oracle.load_reference(tiny_gqa)
        for _ in range(2):
            for (completion,) in served.tell(asked, params):
                hold(reference, completion)
        evicted = 2 * sum(length + OUTPUTS - 1 - (BUDGET - 1) for length in LENGTHS)
        assert served.engine.snapshot().tokens_evicted == evicted
        if "worker_extension_cls" in options:
            assert served.llm.collective_rpc("counts_blocks") == [32]
