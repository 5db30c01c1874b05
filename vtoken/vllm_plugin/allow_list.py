"""What vtoken runs on. Everything else is refused at start-up, in one sentence that names the option and what to do.

``REFUSALS`` are features that vtoken does not support. ``UNVERIFIED`` are places where it may well work, but where its
tests have not been; ``allow_unverified=True`` opens them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.core.budget import longest_request

VERIFIED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_STOCK_WORKERS = ("auto", "vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker")
_OURS = "vtoken.vllm_plugin.compat."


@dataclass(frozen=True)
class Refusal:
    """``found`` says whether a configuration has it; ``option`` names it, ``remedy`` says what to do."""

    option: str
    remedy: str
    found: Callable[[Any], Any]


def _window(config: Any) -> Any:
    text_config = config.model_config.hf_text_config
    return getattr(text_config, "sliding_window", None) and getattr(text_config, "use_sliding_window", True)


REFUSALS = (
    Refusal(
        "vLLM's V2 model runner",
        "set the environment variable VLLM_USE_V2_MODEL_RUNNER=0",
        lambda c: c.use_v2_model_runner,
    ),
    Refusal("speculative decoding", "remove speculative_config", lambda c: c.speculative_config is not None),
    Refusal("a KV connector", "remove kv_transfer_config", lambda c: c.kv_transfer_config is not None),
    # vLLM turns this one into a connector only after it has asked us.
    Refusal("KV offloading", "remove kv_offloading_size", lambda c: c.cache_config.kv_offloading_size is not None),
    Refusal("an encoder connector", "remove ec_transfer_config", lambda c: c.ec_transfer_config is not None),
    Refusal(
        "pipeline parallelism", "set pipeline_parallel_size=1", lambda c: c.parallel_config.pipeline_parallel_size > 1
    ),
    Refusal(
        "context parallelism",
        "set decode_context_parallel_size=1 and prefill_context_parallel_size=1",
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1 or c.parallel_config.prefill_context_parallel_size > 1
        ),
    ),
    # Replicas of a dense model are engines of their own; those of a mixture of experts step together.
    Refusal(
        "data parallelism of a mixture of experts",
        "set data_parallel_size=1",
        lambda c: c.parallel_config.data_parallel_size > 1 and c.model_config.is_moe,
    ),
    Refusal("dual-batch overlap", "set enable_dbo=False and ubatch_size=0", lambda c: c.parallel_config.use_ubatching),
    Refusal(
        "scheduler_reserve_full_isl=False",
        "leave it at True, since admission counts on it",
        lambda c: not c.scheduler_config.scheduler_reserve_full_isl,
    ),
    Refusal("sleep mode", "set enable_sleep_mode=False", lambda c: c.model_config.enable_sleep_mode),
    Refusal("prompt embeddings", "set enable_prompt_embeds=False", lambda c: c.model_config.enable_prompt_embeds),
    Refusal("a pooling model", "serve a text-generation model", lambda c: c.model_config.runner_type != "generate"),
    Refusal("an encoder-decoder model", "serve a decoder-only model", lambda c: c.model_config.is_encoder_decoder),
    Refusal("a multimodal model", "serve a text-only model", lambda c: c.model_config.is_multimodal_model),
    Refusal("M-RoPE", "serve a text-only model", lambda c: c.model_config.uses_mrope),
    Refusal("multi-head latent attention", "serve a model with MHA, MQA or GQA", lambda c: c.model_config.use_mla),
    Refusal(
        "a hybrid or attention-free model",
        "serve a model with full attention",
        lambda c: c.model_config.is_hybrid or c.model_config.is_attention_free,
    ),
    Refusal("sliding-window attention", "serve a model with full attention", _window),
    Refusal("ALiBi", "serve a model with rotary positions", lambda c: c.model_config.uses_alibi),
    Refusal(
        "KV sharing across layers",
        "serve a model in which every layer has its own cache",
        lambda c: getattr(c.model_config.hf_text_config, "num_kv_shared_layers", 0),
    ),
    Refusal("a kv_cache_dtype of its own", "set kv_cache_dtype='auto'", lambda c: c.cache_config.cache_dtype != "auto"),
    Refusal(
        "another worker class",
        "remove worker_cls",
        lambda c: (
            str(c.parallel_config.worker_cls) not in _STOCK_WORKERS
            and not str(c.parallel_config.worker_cls).startswith(_OURS)
        ),
    ),
    Refusal(
        "another scheduler class",
        "remove scheduler_cls",
        lambda c: (
            c.scheduler_config.scheduler_cls is not None and not str(c.scheduler_config.scheduler_cls).startswith(_OURS)
        ),
    ),
)

UNVERIFIED = (
    Refusal("a device other than the CPU", "run on a CPU", lambda c: c.device_config.device_type != "cpu"),
    Refusal(
        "this model architecture",
        f"serve one of {', '.join(VERIFIED_ARCHITECTURES)}",
        lambda c: not set(c.model_config.architectures) & set(VERIFIED_ARCHITECTURES),
    ),
    Refusal(
        "this model_impl",
        "set it to 'auto' or 'vllm'",
        lambda c: str(c.model_config.model_impl) not in ("auto", "vllm"),
    ),
    Refusal("weight quantization", "serve unquantized weights", lambda c: c.model_config.quantization is not None),
    Refusal(
        "this distributed_executor_backend",
        "set it to 'uni' or 'mp'",
        lambda c: c.parallel_config.distributed_executor_backend not in (None, "uni", "mp"),
    ),
)


def check_supported(vllm_config: Any, config: VTokenConfig) -> None:
    """Raises ValueError naming the first option of a configuration that is not on the list."""
    for refusal in REFUSALS:
        if refusal.found(vllm_config):
            raise ValueError(f"vtoken: {refusal.option} is not supported yet; {refusal.remedy}.")
    for refusal in UNVERIFIED:
        if refusal.found(vllm_config) and not config.allow_unverified:
            raise ValueError(
                f"vtoken: {refusal.option} has not been verified yet; {refusal.remedy}, "
                "or set vtoken's option allow_unverified=True to try it."
            )
    _check_pool(vllm_config, config)
    _check_sizes(vllm_config, config)


def _check_sizes(vllm_config: Any, config: VTokenConfig) -> None:
    """Settings that only make sense for some models."""
    longest = vllm_config.model_config.max_model_len
    if config.protected > longest:
        raise ValueError(
            f"vtoken: the options protect {config.protected} tokens of each request, so with max_model_len={longest} "
            "nothing would ever be evicted; lower recent, grace or sinks."
        )
    layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    if config.score_layers and max(config.score_layers) >= layers:
        raise ValueError(
            f"vtoken: option 'score_layers' = {config.score_layers} must name some of the model's layers, which are 0 "
            f"to {layers - 1}."
        )


def _check_pool(vllm_config: Any, config: VTokenConfig) -> None:
    """The pool must hold one request of full length, at its peak: a whole prompt, unless it is reduced in chunks."""
    cache, max_length = vllm_config.cache_config, vllm_config.model_config.max_model_len
    longest = longest_request(config, max_length)
    if cache.num_gpu_blocks_override is None:
        return
    room = (cache.num_gpu_blocks_override - 1) * cache.block_size  # vLLM keeps one block for itself
    if room < longest:
        # What bounds a request's blocks, in the order in which it takes effect.
        bounds = {
            "set vtoken's reclaim='fill'": config.reclaim == "fill",
            "set vtoken's compress='all'": config.compress == "all",
            "set vtoken's protect_prompt=False": not config.protect_prompt or isinstance(config.budget, int),
            "set vtoken's prefill_evict='chunked'": config.prefill_evict == "chunked",
        }
        other = next((remedy for remedy, done in bounds.items() if not done), "lower the budget")
        raise ValueError(
            f"vtoken: num_gpu_blocks_override={cache.num_gpu_blocks_override} leaves room for {room} tokens, too few "
            f"for the {longest} that one request of max_model_len={max_length} takes at its peak; raise it to at least "
            f"{-(-longest // cache.block_size) + 1}, lower max_model_len, or {other}."
        )
