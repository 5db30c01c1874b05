"""Every refusal, against vLLM's own configuration objects: each attribute it reads exists and means what it says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import ENGINE_ARGS

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin.allow_list import REFUSALS, UNVERIFIED, check_supported


@pytest.fixture(scope="module")
def stock(tiny_gqa: Path) -> Any:
    """A configuration of stock vLLM that vtoken accepts."""
    from vllm.engine.arg_utils import EngineArgs

    args = {**ENGINE_ARGS, "skip_tokenizer_init": True, "distributed_executor_backend": "uni"}
    return EngineArgs(model=str(tiny_gqa), **args).create_engine_config()


SOMETHING = SimpleNamespace()
# Option -> attribute of the configuration, and the value that has to be refused.
FORBIDDEN: dict[str, tuple[str, Any]] = {
    "vLLM's V2 model runner": ("use_v2_model_runner", True),
    "speculative decoding": ("speculative_config", SOMETHING),
    "a KV connector": ("kv_transfer_config", SOMETHING),
    "KV offloading": ("cache_config.kv_offloading_size", 4.0),
    "an encoder connector": ("ec_transfer_config", SOMETHING),
    "pipeline parallelism": ("parallel_config.pipeline_parallel_size", 2),
    "context parallelism": ("parallel_config.decode_context_parallel_size", 2),
    "data parallelism of a mixture of experts": ("parallel_config.data_parallel_size", 2),
    "dual-batch overlap": ("parallel_config.use_ubatching", True),
    "scheduler_reserve_full_isl=False": ("scheduler_config.scheduler_reserve_full_isl", False),
    "sleep mode": ("model_config.enable_sleep_mode", True),
    "prompt embeddings": ("model_config.enable_prompt_embeds", True),
    "a pooling model": ("model_config.runner_type", "pooling"),
    "an encoder-decoder model": ("model_config.is_encoder_decoder", True),
    "a multimodal model": ("model_config.is_multimodal_model", True),
    "M-RoPE": ("model_config.uses_mrope", True),
    "multi-head latent attention": ("model_config.use_mla", True),
    "a hybrid or attention-free model": ("model_config.is_attention_free", True),
    "sliding-window attention": ("model_config.hf_text_config.sliding_window", 128),
    "ALiBi": ("model_config.uses_alibi", True),
    "KV sharing across layers": ("model_config.hf_text_config.num_kv_shared_layers", 2),
    "a kv_cache_dtype of its own": ("cache_config.cache_dtype", "fp8"),
    "another worker class": ("parallel_config.worker_cls", "mine.Worker"),
    "another scheduler class": ("scheduler_config.scheduler_cls", "mine.Scheduler"),
    "a device other than the CPU": ("device_config.device_type", "cuda"),
    "this model architecture": ("model_config.architectures", ["GPT2LMHeadModel"]),
    "this model_impl": ("model_config.model_impl", "transformers"),
    "weight quantization": ("model_config.quantization", "awq"),
    "this distributed_executor_backend": ("parallel_config.distributed_executor_backend", "ray"),
}
# What else such a configuration has.
TOGETHER_WITH = {"data parallelism of a mixture of experts": ("model_config.is_moe", True)}
MADE_BY_HUGGING_FACE = ("sliding_window", "num_kv_shared_layers")


class Overlay:
    """A configuration object with one attribute replaced; everything else is the real thing."""

    def __init__(self, base: Any, path: str, value: Any) -> None:
        name, _, rest = path.partition(".")
        # Where vLLM renames an attribute, this is where the test says so.
        assert hasattr(base, name) or name in MADE_BY_HUGGING_FACE, f"{type(base).__name__} has no {name}"
        self._base = base
        self._replaced = {name: Overlay(getattr(base, name), rest, value) if rest else value}

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._base, name)


def forbidden(stock: Any, option: str) -> Any:
    return Overlay(Overlay(stock, *TOGETHER_WITH.get(option, FORBIDDEN[option])), *FORBIDDEN[option])


def test_every_refusal_is_tested() -> None:
    assert set(FORBIDDEN) == {refusal.option for refusal in (*REFUSALS, *UNVERIFIED)}


def test_the_stock_configuration_is_accepted(stock: Any) -> None:
    check_supported(stock, VTokenConfig())


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.option)
def test_what_is_not_supported_is_refused(stock: Any, refusal: Any) -> None:
    with pytest.raises(ValueError) as error:
        check_supported(forbidden(stock, refusal.option), VTokenConfig(allow_unverified=True))
    assert str(error.value) == f"vtoken: {refusal.option} is not supported yet; {refusal.remedy}."


def test_replicas_and_ranks_of_a_dense_model_are_accepted(stock: Any) -> None:
    for option in ("data_parallel_size", "tensor_parallel_size"):
        check_supported(Overlay(stock, f"parallel_config.{option}", 2), VTokenConfig())


@pytest.mark.parametrize("refusal", UNVERIFIED, ids=lambda refusal: refusal.option)
def test_what_is_not_verified_needs_consent(stock: Any, refusal: Any) -> None:
    config = Overlay(stock, *FORBIDDEN[refusal.option])
    with pytest.raises(ValueError, match=f"^vtoken: {refusal.option} has not been verified yet; .*allow_unverified"):
        check_supported(config, VTokenConfig())
    check_supported(config, VTokenConfig(allow_unverified=True))


def test_a_model_with_alibi_is_recognised(stock: Any, tmp_path: Path) -> None:
    """BLOOM biases every layer by key position, and says so nowhere in its configuration."""
    from transformers import BloomConfig
    from vllm.config import ModelConfig

    config = BloomConfig(vocab_size=64, hidden_size=64, n_layer=1, n_head=2, architectures=["BloomForCausalLM"])
    config.save_pretrained(tmp_path)
    bloom = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32", seed=0)
    with pytest.raises(ValueError, match=r"^vtoken: ALiBi is not supported yet"):
        check_supported(Overlay(stock, "model_config", bloom), VTokenConfig(allow_unverified=True))
