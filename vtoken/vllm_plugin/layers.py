"""A worker is made over its model's attention layers: their caches as one, the layout of those, and who looks on."""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger

from vtoken.config import VTokenConfig
from vtoken.core.ragged import Ints
from vtoken.kernels import key_norms, openmp
from vtoken.kernels.copy_engine import copy_engine_for
from vtoken.kernels.cpu.observer import AttentionObserver
from vtoken.kernels.digest import digest
from vtoken.kernels.layout import BlockLayout, check_vec_layout, probe_layout, vec_views
from vtoken.kernels.relocation import Relocator
from vtoken.policies import Needs, load_policies
from vtoken.vllm_plugin.attention import observe
from vtoken.vllm_plugin.kv_cache import EvictableAttentionSpec
from vtoken.vllm_plugin.ranks import Ranks, TensorParallelRanks
from vtoken.vllm_plugin.scores import KeyNorms
from vtoken.vllm_plugin.worker import EvictionWorker

logger = init_logger(f"vllm.{__name__}")


def make_worker(
    config: VTokenConfig, vllm_config: Any, layers: list[Any], spec: EvictableAttentionSpec
) -> EvictionWorker:
    """The worker's part over the caches of these attention layers, with what its policies need measured.

    Raises:
        ValueError: one sentence, for layers or a layout of their caches that are not supported.
    """
    cache = _all_layers([layer.kv_cache for layer in layers])
    layout = _probe(layers[0], spec)
    needs = {name: policy.needs for name, policy in load_policies(config).items()}
    holes = config.reclaim != "fill" or vllm_config.cache_config.enable_prefix_caching
    observer = _observe(config, layers, layout, spec, needs, holes)
    measures = any(one.key_norms for one in needs.values())
    ranks = TensorParallelRanks() if vllm_config.parallel_config.tensor_parallel_size > 1 else Ranks()
    norms = _key_norms(vllm_config, cache, layout, spec, ranks) if measures else None
    copies = copy_engine_for(cache.device.type, Relocator(cache, layout), config.copies)
    digests = partial(_digests, cache, layout, _memory_order(layers)) if config.verify else None
    bytes_per_token = spec.page_size_bytes // spec.block_size * len(layers)
    return EvictionWorker(config, spec.block_size, copies, observer, norms, ranks, digests, bytes_per_token)


def _memory_order(layers: list[Any]) -> Ints:
    """For each layer its place in ``_all_layers``."""
    return np.argsort(np.argsort([layer.kv_cache.data_ptr() for layer in layers]))


def _digests(cache: torch.Tensor, layout: BlockLayout, order: Ints, slots: Ints) -> NDArray[np.int64]:
    return digest(cache, layout, torch.from_numpy(slots).to(cache.device)).cpu().numpy()[order]


def _key_norms(
    vllm_config: Any, cache: torch.Tensor, layout: BlockLayout, spec: EvictableAttentionSpec, ranks: Ranks
) -> KeyNorms:
    """Measures keys so that the sum over ranks counts each KV head once, be it on one rank or on several."""
    norms = key_norms.KeyNorms(cache, layout, spec.num_kv_heads, spec.head_size)
    holders = ranks.size * spec.num_kv_heads // vllm_config.model_config.get_total_num_kv_heads()
    return norms if holders == 1 else lambda slots: norms(slots) / np.float32(holders)


def _observe(
    config: VTokenConfig,
    layers: list[Any],
    layout: BlockLayout,
    spec: EvictableAttentionSpec,
    needs: dict[str, Needs],
    holes: bool,
) -> AttentionObserver | None:
    """Lay an observer over the layers that it may have to attend, or refuse with ValueError in one sentence.

    Where nobody needs one it is there because its kernel is faster, and None if that does not support these layers, or
    has one thread while vLLM's has them all.
    """
    needed = holes or any(one.attention for one in needs.values())
    if not needed and not openmp.has_runtime:
        return None
    counts = list(range(len(layers))) if config.score_layers is None else sorted(set(config.score_layers))
    if not holes:  # only what is observed
        layers, counts = [layers[n] for n in counts], list(range(len(counts)))
    try:
        _check_layers(config, layers, needs)
        check_vec_layout(layout, spec.num_kv_heads, spec.head_size)
        observer = AttentionObserver(
            *vec_views(layers[0].kv_cache),
            num_query_heads=layers[0].impl.num_heads,
            num_layers=len(counts),
            scale=layers[0].impl.scale,
            prompts=any(one.prompt_queries > 0 for one in needs.values()),
            holes=holes,
        )
    except ValueError as error:
        if needed:
            raise
        logger.info("vtoken: vLLM's own attention kernel is used throughout. %s", error)
        return None
    observe(layers, observer, counts)
    return observer


def _check_layers(config: VTokenConfig, layers: list[Any], needs: dict[str, Needs]) -> None:
    """Raises ValueError, in one sentence, for attention that our kernel does not compute."""
    impl = layers[0].impl
    if type(impl).__name__ != "CPUAttentionBackendImpl" or impl.logits_soft_cap or impl.sinks is not None:
        look = [name for name, one in needs.items() if one.attention]
        if look:
            wants = f"policy '{look[0]}' looks at attention"
        else:
            wants = "prefix caching leaves holes" if config.reclaim == "fill" else f"'{config.reclaim}' leaves holes"
        raise ValueError(
            f"vtoken: {wants}, which is not supported yet with {type(impl).__name__} or with a soft cap or sinks in "
            "attention; use reclaim='fill' with streaming_llm, random or key_norm, and enable_prefix_caching=False."
        )
    impls = [layer.impl for layer in layers]
    if len({(type(one), one.num_heads, one.scale, one.logits_soft_cap, one.sinks is None) for one in impls}) > 1:
        raise ValueError(
            "vtoken: attention layers that differ in heads, scale, soft cap or sinks are not supported yet where there "
            "are holes or attention is looked at; use reclaim='fill' with streaming_llm, random or key_norm, and "
            "enable_prefix_caching=False."
        )


def _all_layers(caches: list[torch.Tensor]) -> torch.Tensor:
    """View the layers' caches as one tensor [layers, blocks, numbers per block]."""
    caches = sorted(caches, key=lambda cache: cache.data_ptr())
    first, numbers = caches[0], caches[0][0].numel()
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(caches)}
    if len(steps) > 1 or len({cache.untyped_storage().data_ptr() for cache in caches}) > 1:
        raise ValueError(
            "vtoken: the layers' KV caches are not evenly spaced in one allocation; remove VLLM_KV_CACHE_LAYOUT."
        )
    return first.as_strided((len(caches), first.shape[0], numbers), (steps.pop() if steps else 0, first.stride(0), 1))


def _probe(layer: Any, spec: EvictableAttentionSpec) -> BlockLayout:
    """Find where a token's numbers lie, by letting the layer write some into a scratch block."""
    cache = layer.kv_cache

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        dtype = cache.dtype
        layer.impl.do_kv_cache_update(layer, key.to(dtype), value.to(dtype), cache, slots)

    scratch = torch.empty_strided((1, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    return probe_layout(write, scratch, spec.num_kv_heads, spec.head_size)
