"""What a model takes, from its config.json: bytes of weights, bytes of K/V per token, and work per token."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtoken.evaluation.plan import attention_shape

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GIB = 1 << 30


@dataclass(frozen=True)
class ModelSize:
    """Sizes of one model.

    Attributes:
        name: as the user gave it.
        dtype: of weights and K/V.
        parameters: all of them; those that layers share count once.
        weight_bytes: of the weights as loaded.
        layers, query_heads, kv_heads, head_dim: of its attention.
        max_model_len: tokens that it is made for, prompt and output together.
    """

    name: str
    dtype: str
    parameters: int
    weight_bytes: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_model_len: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations that the weights take per new token."""
        return 2 * self.parameters

    @property
    def flops_per_pair(self) -> int:
        """Likewise, per query and token that it attends: one product for the score, one for the output."""
        return 4 * self.layers * self.query_heads * self.head_dim

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kv_bytes_per_token": self.kv_bytes_per_token}


def read_model(name: str, dtype: str | None = None, weights_gib: float | None = None) -> ModelSize:
    """The sizes of a model; no weight is read.

    Args:
        name: path of a config.json, or of its directory, or a name on the Hugging Face hub.
        dtype: of weights and K/V; None for the model's own.
        weights_gib: GiB of the weights, for those that are stored in another form than ``dtype``.

    Raises:
        ValueError: one sentence, for a model that cannot be read or that vtoken does not serve.
    """
    config = _load(name)
    text = config.get_text_config()
    if weights_gib is None and getattr(config, "quantization_config", None):
        raise ValueError(f"model {name} has quantized weights; say with --weights how many GiB they take.")
    _require_full_attention(name, text)
    dtype = dtype or str(getattr(text, "dtype", None) or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype} of model {name} is not known; give --dtype {', '.join(DTYPE_BYTES)}.")
    parameters = _count_parameters(name, config)
    return ModelSize(
        name,
        dtype,
        parameters,
        parameters * DTYPE_BYTES[dtype] if weights_gib is None else int(weights_gib * GIB),
        *attention_shape(text),
        int(text.max_position_embeddings),
    )


def _load(name: str) -> Any:
    from transformers import AutoConfig

    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json" or path.exists():
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            return AutoConfig.for_model(**told)
        except OSError as error:
            raise ValueError(f"model {name} cannot be read ({error.strerror}); give its config.json.") from None
        except Exception as error:  # transformers has many kinds for what makes no sense
            reason = _first_line(error)
            raise ValueError(f"{path} does not describe a model ({reason}); give a model's config.json.") from None
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:
        reason = _first_line(error)
        raise ValueError(f"model {name} was not found ({reason}); give the path of its config.json.") from None


def _require_full_attention(name: str, text: Any) -> None:
    """Raises ValueError, in one sentence, unless each layer keeps K and V of every token."""
    kinds = set(getattr(text, "layer_types", None) or ())
    slides = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    if getattr(text, "kv_lora_rank", None):
        what = "latent attention (MLA)"
    elif slides or kinds - {"full_attention"}:
        what = "layers that do not keep every token"
    elif not all(getattr(text, field, None) for field in ("num_attention_heads", "max_position_embeddings")):
        what = "no attention that vtoken knows"
    else:
        return
    raise ValueError(f"model {name} has {what}, which vtoken does not serve; choose one with full attention.")


def _count_parameters(name: str, config: Any) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        reason = _first_line(error)
        raise ValueError(f"model {name} is no language model ({reason}); choose one that generates text.") from None
    return sum(parameter.numel() for parameter in model.parameters())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".: ")
