"""A backend's attention with an observer beside it: vLLM's own kernel runs wherever that does not do all its work."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from vtoken.kernels.cpu.observer import AttentionObserver
from vtoken.kernels.layout import vec_views


def observe(layers: list[Any], observer: AttentionObserver, observed: Collection[int]) -> None:
    """Put the observer into attention layers, between them and their backend, for as long as they live.

    Args:
        layers: those whose attention it may have to compute.
        observer: one for all of them.
        observed: the places, in ``layers``, of those whose attention counts.
    """
    for n, layer in enumerate(layers):
        layer.impl.forward = _observed(layer.impl.forward, observer, n in observed)


def _observed(
    stock: Callable[..., torch.Tensor], observer: AttentionObserver, observes: bool
) -> Callable[..., torch.Tensor]:
    def forward(
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
        """vLLM's ``AttentionImpl.forward``; query and output [T, Hq, D], padding at the end allowed."""
        if attn_metadata is None or not observer.active:
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if not observer.replaces_backend:
            stock(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        observer.attend(query, *vec_views(kv_cache), output, observes)
        return output

    return forward
