"""Tiny random checkpoints, made on the spot, whose logits are worth comparing."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

PROBE_LENGTH = 64


def tiny_model(
    directory: str | Path,
    architecture: str = "llama",
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    layers: int = 2,
    vocab: int = 512,
    head_dim: int = 32,
    max_position_embeddings: int = 2048,
    seed: int = 0,
) -> Path:
    """Save a float32 model with random weights into ``directory`` (no tokenizer) and return the directory.

    Grouped-query attention by default; ``num_kv_heads=num_heads`` is multi-head, ``num_kv_heads=1`` multi-
    query. Attention and output weights grow until the logits are spread (standard deviation above 1) and
    depend on the context; RuntimeError if they never do.
    """
    config_class, model_class = ARCHITECTURES[architecture]
    config = config_class(
        vocab_size=vocab,
        hidden_size=num_heads * head_dim,
        intermediate_size=2 * num_heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=(num_heads * head_dim) ** -0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float().eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at first, which would hide one that is left out
                torch.nn.init.normal_(parameter, std=0.3)
        probes = torch.randint(vocab, (16, PROBE_LENGTH))
    for _ in range(8):
        if _worth_comparing(model, probes):
            model.save_pretrained(directory)
            return Path(directory)
        _scale(model, 1.25)
    raise RuntimeError(f"no scale makes the tiny {architecture} with seed {seed} spread and context-dependent")


@torch.inference_mode()
def _worth_comparing(model: Any, probes: torch.Tensor) -> bool:
    """Whether logits are spread, hiding half the context moves them, and context decides the top token."""
    probes = probes.clone()
    probes[:, -1] = 0  # same last token everywhere: only attention can tell the probes apart
    logits = model(probes).logits
    hide = torch.full((PROBE_LENGTH, PROBE_LENGTH), torch.finfo(torch.float32).min).triu(1)
    hide[-1, : PROBE_LENGTH // 2] = torch.finfo(torch.float32).min
    hidden = model(probes, attention_mask=hide.expand(len(probes), 1, -1, -1)).logits
    change = (hidden[:, -1] - logits[:, -1]).abs().amax(dim=-1)
    return (
        logits.std(dim=-1).min().item() >= 1.2  # a margin above the oracle's 1
        and change.min().item() >= 0.25
        and logits[:, -1].argmax(dim=-1).unique().numel() >= len(probes) // 4
    )


@torch.inference_mode()
def _scale(model: Any, factor: float) -> None:
    model.lm_head.weight.mul_(factor)
    for layer in model.model.layers:
        attention = layer.self_attn
        scaled = [attention.q_proj, attention.k_proj, attention.o_proj]
        if hasattr(attention, "q_norm"):  # what a projection gains, a norm behind it takes away
            scaled = [attention.q_norm, attention.k_norm, attention.o_proj]
        for module in scaled:
            module.weight.mul_(factor)
