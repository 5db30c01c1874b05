"""What the demo is going to run, settled and checked before anything is started."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.evaluation.model import model_dtype
from vtoken.evaluation.prompt_file import read_prompt_file
from vtoken.evaluation.workloads import (
    DEMO_OUTPUT_TOKENS,
    DEMO_REQUESTS,
    Workload,
    explain_requests,
    load_tokenizer,
    needle_length,
    needle_requests,
)
from vtoken.vllm_plugin.compiler import missing_compiler

BLOCK_SIZE = 32
MAX_NUM_SEQS = 64
FULL_REQUESTS = 4


@dataclass(frozen=True)
class DemoOptions:
    """The user's wishes; None leaves the choice to the demo.

    Attributes:
        prompts: JSON-lines file to take the requests from.
        requests: how many requests; with ``prompts``, only the first so many.
        max_tokens: output tokens per request; with ``prompts``, for lines that name none.
        blocks: block budget.
        eager: leave out vLLM's compilation.
    """

    prompts: Path | None = None
    requests: int | None = None
    max_tokens: int | None = None
    blocks: int | None = None
    eager: bool = False


@dataclass(frozen=True)
class Plan:
    """The load and the engine it runs on. ``num_blocks`` is what requests can hold.

    ``naive`` has the settings of a third run, and asks for frames of the pool in it and in vtoken's; see ``naive_of``.
    """

    model: Path
    engine_args: dict[str, Any]
    config: VTokenConfig
    workloads: list[Workload]
    needles: list[Workload]
    num_blocks: int
    notes: list[str]
    naive: VTokenConfig | None = None


def make_plan(model: Path, config: VTokenConfig, options: DemoOptions) -> Plan:
    """Choose the load and the engine arguments.

    Raises:
        ValueError: one sentence, for a model, prompts or a block budget that cannot work.
    """
    text_config, tokenizer = load_model_description(model)
    context = int(text_config.max_position_embeddings)
    workloads = _load(tokenizer, context, options)
    needles = needle_requests(tokenizer, needle_length(workloads))
    longest = max([*workloads, *needles], key=lambda work: work.total_tokens)
    if longest.total_tokens > context:
        raise ValueError(
            f"request {longest.request_id} needs {longest.total_tokens} tokens, but the context of {model} "
            f"is {context}; use --prompts with shorter prompts, or a model with a longer context."
        )
    blocks_per_request = -(-longest.total_tokens // BLOCK_SIZE)
    num_blocks = FULL_REQUESTS * blocks_per_request if options.blocks is None else options.blocks
    if num_blocks < blocks_per_request:
        raise ValueError(
            f"a block budget of {num_blocks} blocks holds {num_blocks * BLOCK_SIZE} tokens, but request "
            f"{longest.request_id} alone needs {longest.total_tokens}; "
            f"use --blocks {blocks_per_request} or more."
        )
    notes = []
    eager = options.eager
    if not eager and (missing := missing_compiler()) is not None:
        notes.append(f"No C++ compiler ('{missing}') was found: running eagerly, without vLLM's compilation.")
        eager = True
    engine_args = engine_arguments(text_config, num_blocks, min(blocks_per_request * BLOCK_SIZE, context), eager=eager)
    return Plan(model, engine_args, config, workloads, needles, num_blocks, notes)


def naive_of(config: VTokenConfig) -> VTokenConfig:
    """Settings for the same evictions without reclamation: a block is free once all its tokens are dead.

    Raises:
        ValueError: one sentence, where that is what these settings ask for already.
    """
    if config.reclaim == "none":
        raise ValueError(
            "vtoken: option 'reclaim' = 'none' is what --html compares with; leave it out, or take 'fill' or 'pack'."
        )
    return VTokenConfig(**{**config.model_dump(), "reclaim": "none"})


def engine_arguments(
    text_config: Any,
    num_blocks: int,
    max_model_len: int,
    *,
    eager: bool,
    block_size: int = BLOCK_SIZE,
    dtype: str | None = None,
) -> dict[str, Any]:
    """vLLM's arguments for a pool of ``num_blocks`` blocks that requests can hold; None is ``model_dtype()``."""
    dtype = dtype or model_dtype()
    # vLLM keeps one block for itself.
    pool = num_blocks + 1
    engine_args: dict[str, Any] = {
        "dtype": dtype,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": MAX_NUM_SEQS,
        "num_gpu_blocks_override": pool,
        # Without it vLLM first insists on most of the machine's memory, however few blocks are asked for.
        "kv_cache_memory_bytes": pool * block_size * _bytes_per_token(text_config, dtype),
        "distributed_executor_backend": "uni",
        "seed": 0,
    }
    if eager:
        engine_args["enforce_eager"] = True
    return engine_args


def check_model_directory(model: Path) -> Path:
    """Returns the directory. Raises ValueError, in one sentence, unless a model seems to be there."""
    if not model.is_dir():
        raise ValueError(f"model directory {model} does not exist; give a folder with config.json and weights.")
    if not (model / "config.json").is_file():
        raise ValueError(f"model directory {model} holds no config.json; give a model in Hugging Face's format.")
    return model


def load_model_description(model: Path) -> tuple[Any, Any]:
    """Text configuration and tokenizer. Raises ValueError, in one sentence, for a model that cannot be read."""
    from transformers import AutoConfig

    check_model_directory(model)
    try:
        text_config = AutoConfig.from_pretrained(str(model), local_files_only=True).get_text_config()
        tokenizer = load_tokenizer(model)
    except Exception as error:  # transformers raises many kinds for a file that is damaged or missing
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"the model in {model} cannot be read ({reason}); check that it is complete.") from None
    return text_config, tokenizer


def _load(tokenizer: Any, context: int, options: DemoOptions) -> list[Workload]:
    max_tokens = options.max_tokens or DEMO_OUTPUT_TOKENS
    if options.prompts is not None:
        return read_prompt_file(options.prompts, tokenizer, context, max_tokens, options.requests)
    return explain_requests(tokenizer, options.requests or DEMO_REQUESTS, max_tokens)


def attention_shape(text_config: Any) -> tuple[int, int, int, int]:
    """(layers, query heads, KV heads, numbers per head) of a model."""
    query_heads = int(text_config.num_attention_heads)
    heads = int(getattr(text_config, "num_key_value_heads", None) or query_heads)
    head_dim = int(getattr(text_config, "head_dim", None) or text_config.hidden_size // query_heads)
    return int(text_config.num_hidden_layers), query_heads, heads, head_dim


def _bytes_per_token(text_config: Any, dtype: str) -> int:
    """K and V of all layers and KV heads."""
    layers, _, heads, head_dim = attention_shape(text_config)
    return 2 * layers * heads * head_dim * (4 if dtype == "float32" else 2)
