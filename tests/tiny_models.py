"""Tiny random Llama checkpoints, made on the spot, whose logits are worth comparing."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PROBE_LENGTH = 64


def tiny_llama(
    directory: str | Path,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    layers: int = 2,
    vocab: int = 512,
    head_dim: int = 32,
    max_position_embeddings: int = 2048,
    seed: int = 0,
) -> Path:
    """Save a float32 Llama with random weights into ``directory`` (no tokenizer) and return the directory.

    Grouped-query attention by default; ``num_kv_heads=num_heads`` is multi-head, ``num_kv_heads=1`` multi-
    query. Attention and output weights grow until the logits are spread (standard deviation above 1) and
    depend on the context; RuntimeError if they never do.
    """
    config = LlamaConfig(
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
        model = LlamaForCausalLM(config).float().eval()
        probes = torch.randint(vocab, (16, PROBE_LENGTH))
    for _ in range(8):
        if _worth_comparing(model, probes):
            model.save_pretrained(directory)
            return Path(directory)
        _scale(model, 1.25)
    raise RuntimeError(f"no scale makes the tiny Llama with seed {seed} spread and context-dependent")


@torch.inference_mode()
def _worth_comparing(model: LlamaForCausalLM, probes: torch.Tensor) -> bool:
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
def _scale(model: LlamaForCausalLM, factor: float) -> None:
    model.lm_head.weight.mul_(factor)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
            projection.weight.mul_(factor)
