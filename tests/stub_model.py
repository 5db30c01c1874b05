"""A model that is nothing but its configuration: enough for vLLM's scheduler."""

from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 1024


def stub_model(directory: Path) -> Any:
    """vLLM's view of a Llama without weights; the directory is needed only while this is called."""
    from transformers import LlamaConfig
    from vllm.config import ModelConfig

    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    return ModelConfig(
        model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN, enforce_eager=True
    )
