"""A backend's attention with an observer beside it: vLLM's own kernel runs wherever nobody needs scores."""

from typing import TYPE_CHECKING, Any

import torch

from vtoken.kernels.layout import vec_views

if TYPE_CHECKING:
    from vtoken.kernels.cpu.observer import AttentionObserver


class ObservedAttention:
    """Mixin over a backend's ``AttentionImpl``, laid over the instances of the layers that are observed."""

    vtoken_observer: "AttentionObserver"

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As ``AttentionImpl.forward`` of vLLM; query and output [T, Hq, D], padding at the end allowed."""
        observer = self.vtoken_observer
        if attn_metadata is None or not observer.replaces_backend:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # type: ignore[misc]
        if attn_metadata is not None and observer.active:
            observer.attend(query, *vec_views(kv_cache), output)
        return output


def observe(layers: list[Any], observer: "AttentionObserver") -> None:
    """Lay the observer over these attention layers, for as long as they live."""
    for layer in layers:
        stock = type(layer.impl)
        layer.impl.__class__ = type(f"Observed{stock.__name__}", (ObservedAttention, stock), {})
        layer.impl.vtoken_observer = observer
