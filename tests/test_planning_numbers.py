"""What `vtoken plan` computes before anything runs: sizes of a model, blocks of a pool, seconds of a step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vtoken.planning.gpu import GPUS, find_gpu, serving_defaults
from vtoken.planning.model_size import GIB, read_model
from vtoken.planning.pool import given_pool, pool_in
from vtoken.planning.step_time import StepTime, step_time_of

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
# Embeddings and output, then per layer q, k, v, o, three of the MLP and two norms, then the last norm.
LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
PARAMETERS = 2 * 512 * 64 + 2 * LAYER + 64


def write(directory: Path, **changes: Any) -> str:
    (directory / "config.json").write_text(json.dumps(SMALL | changes), encoding="utf-8")
    return str(directory)


class TestModel:
    def test_sizes(self, tmp_path: Path) -> None:
        model = read_model(write(tmp_path))
        assert model.parameters == PARAMETERS == 139_584
        assert model.weight_bytes == 2 * PARAMETERS
        assert model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2 == 256
        assert (model.flops_per_token, model.flops_per_pair) == (2 * PARAMETERS, 4 * 2 * 4 * 16)
        assert (model.dtype, model.max_model_len, model.head_dim) == ("bfloat16", 2048, 16)
        assert read_model(str(tmp_path / "config.json")) == replace(model, name=str(tmp_path / "config.json"))

    def test_shared_weights_count_once(self, tmp_path: Path) -> None:
        assert read_model(write(tmp_path, tie_word_embeddings=True)).parameters == PARAMETERS - 512 * 64

    def test_a_head_size_of_its_own(self, tmp_path: Path) -> None:
        assert read_model(write(tmp_path, head_dim=32)).kv_bytes_per_token == 512

    def test_one_kv_head_per_query_head(self, tmp_path: Path) -> None:
        assert read_model(write(tmp_path, num_key_value_heads=4)).kv_bytes_per_token == 512

    def test_dtype_and_weights_can_be_given(self, tmp_path: Path) -> None:
        model = read_model(write(tmp_path), "float32", 0.5)
        assert (model.kv_bytes_per_token, model.weight_bytes) == (512, GIB // 2)

    def test_llama_3_8b(self, tmp_path: Path) -> None:
        shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
        model = read_model(write(tmp_path, **shape, num_attention_heads=32, num_key_value_heads=8))
        assert (model.parameters, model.kv_bytes_per_token) == (8_030_261_248, 128 * 1024)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"quantization_config": {"quant_method": "fp8"}}, "has quantized weights; say with --weights"),
            ({"model_type": "mistral", "sliding_window": 1024}, "has layers that do not keep every token, which"),
            ({"dtype": "float64"}, "float64 of model .* is not known; give --dtype bfloat16, float16, float32"),
            ({"dtype": "float8"}, "does not describe a model .*; give a model's config.json"),
            ({"hidden_size": "64"}, "does not describe a model .*; give a model's config.json"),
            ({"num_attention_heads": 0}, "choose one|does not describe a model"),
            ({"model_type": "no-such-model"}, "does not describe a model .*; give a model's config.json"),
            ({"model_type": "vit"}, "choose one"),
        ],
        ids=["quantized", "sliding", "dtype", "no-dtype", "text", "zero", "unknown", "no-language-model"],
    )
    def test_refused(self, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
        name = write(tmp_path, **changes)
        with pytest.raises(ValueError, match=says) as refusal:
            read_model(name)
        assert "\n" not in str(refusal.value)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"cannot be read .*; give its config.json"):
            read_model(str(tmp_path / "config.json"))
        (tmp_path / "config.json").write_text("{", encoding="utf-8")
        with pytest.raises(ValueError, match="does not describe a model"):
            read_model(str(tmp_path))


class TestPool:
    def test_blocks_are_what_fits_less_the_one_that_vllm_keeps(self, tmp_path: Path) -> None:
        model = read_model(write(tmp_path))
        pool = pool_in(model, memory=1.0, utilization=0.5, reserve=0.25, block_size=16)
        room = GIB // 2 - 2 * PARAMETERS - GIB // 4
        assert pool.block_bytes == 16 * 256
        assert pool.num_blocks == room // 4096 - 1 == 65_466
        assert pool.tokens == 16 * 65_466
        assert pool.source == "1 GiB x 0.5 - 0.0 GiB of weights - 0.25 GiB reserve"

    def test_one_byte_decides(self, tmp_path: Path) -> None:
        model = replace(read_model(write(tmp_path)), weight_bytes=GIB - 3 * 4096)
        assert pool_in(model, 1.0, 1.0, 0.0, 16).num_blocks == 2
        fuller = replace(model, weight_bytes=model.weight_bytes + 1)
        assert pool_in(fuller, 1.0, 1.0, 0.0, 16).num_blocks == 1

    def test_no_room(self, tmp_path: Path) -> None:
        model = replace(read_model(write(tmp_path)), weight_bytes=GIB)
        with pytest.raises(ValueError, match="leave no room for K/V; give more --memory"):
            pool_in(model, 1.0, 1.0, 0.0, 16)

    def test_as_many_as_asked_for(self, tmp_path: Path) -> None:
        pool = given_pool(read_model(write(tmp_path)), 12, 32)
        assert (pool.num_blocks, pool.tokens, pool.block_bytes) == (12, 384, 32 * 256)


class TestGpu:
    def test_numbers_can_be_replaced(self) -> None:
        assert find_gpu("h100") == GPUS["H100"]
        assert find_gpu("H100", memory=94, flops=800.0) == replace(GPUS["H100"], memory=94, flops=800.0)
        assert find_gpu("L4", bandwidth=1.0).bandwidth == 1.0

    def test_unknown(self) -> None:
        with pytest.raises(ValueError, match=r"--gpu B9 is not known; give one of A10G, L4, .*, and --memory"):
            find_gpu("B9")

    @pytest.mark.parametrize(
        ("name", "memory", "expected"),
        [
            ("A100-80", None, (256, 2048)),
            ("H100", None, (1024, 8192)),
            ("L4", None, (256, 2048)),
            ("H200", 192, (1024, 16384)),
        ],
    )
    def test_limits_are_those_of_a_server(self, name: str, memory: float | None, expected: tuple[int, int]) -> None:
        assert serving_defaults(find_gpu(name, memory)) == expected


class TestStepTime:
    TIME = StepTime(
        weight_bytes=1000,
        kv_bytes_per_token=10,
        flops_per_token=20,
        flops_per_pair=4,
        bandwidth=100.0,
        flops=50.0,
        efficiency=0.5,
        overhead=0.25,
    )

    def test_a_decode_step_reads(self) -> None:
        assert self.TIME(1, 5, 5) == (1000 + 50) / 100 / 0.5 + 0.25 == 21.25

    def test_a_prompt_computes(self) -> None:
        assert self.TIME(100, 100, 5050) == (20 * 100 + 4 * 5050) / 50 / 0.5 + 0.25 == 888.25

    def test_a_step_without_tokens(self) -> None:
        assert self.TIME(0, 0, 0) == 0.25

    def test_units_of_data_sheets(self, tmp_path: Path) -> None:
        model, gpu = read_model(write(tmp_path)), find_gpu("L4")
        assert step_time_of(model, gpu, 0.6, 1.5) == StepTime(
            2 * PARAMETERS, 256, 2 * PARAMETERS, 512, 300e9, 121e12, 0.6, 0.0015
        )
