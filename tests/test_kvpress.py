"""Where the definitions coincide, our priorities are those of NVIDIA's kvpress on the same random tensors.

kvpress scores each layer and KV head (a mean over its group of query heads) and keeps other tokens for each. We sum
over heads and layers before choosing, so its scores are summed here. What is compared are values and ranking.
"""

import importlib
import importlib.util
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from policy_driver import observation, priorities

from vtoken.core.selection import select_victims
from vtoken.policies import Policy
from vtoken.policies.h2o import H2O
from vtoken.policies.key_norm import KeyNorm
from vtoken.policies.snapkv import SnapKV
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.policies.tova import TOVA

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, LENGTH, WINDOW = 3, 6, 2, 8, 90, 12
GROUP = QUERY_HEADS // KV_HEADS

PRESSES = {
    "StreamingLLMPress": "streaming_llm_press",
    "ObservedAttentionPress": "observed_attention_press",
    "SnapKVPress": "snapkv_press",
    "KnormPress": "knorm_press",
    "TOVAPress": "tova_press",
}


@pytest.fixture(scope="module")
def kvpress() -> Iterator[SimpleNamespace]:
    """The press classes. kvpress's own ``__init__`` imports every press with all their requirements; this does not."""
    found = importlib.util.find_spec("kvpress")
    if found is None or found.origin is None:
        pytest.skip("kvpress is not installed; requirements/kvpress.txt says how")
    root = Path(found.origin).parent
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kvpress"}
    for name, directory in (("kvpress", root), ("kvpress.presses", root / "presses")):
        package = types.ModuleType(name)
        package.__path__ = [str(directory)]
        sys.modules[name] = package
    try:
        modules = {name: importlib.import_module(f"kvpress.presses.{file}") for name, file in PRESSES.items()}
    except ImportError as error:
        pytest.skip(f"kvpress does not import beside this transformers: {error}")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvpress"]:
            del sys.modules[name]
        sys.modules.update(before)
    yield SimpleNamespace(**{name: getattr(module, name) for name, module in modules.items()})


class Layers:
    """Random queries and keys of a few layers, and their causal attention, [layers, heads, queries, tokens]."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.query = 1.5 * torch.randn(LAYERS, QUERY_HEADS, LENGTH, HEAD_DIM, generator=draw)
        self.key = torch.randn(LAYERS, KV_HEADS, LENGTH, HEAD_DIM, generator=draw)
        logits = self.query @ self.key.repeat_interleave(GROUP, dim=1).transpose(2, 3) / math.sqrt(HEAD_DIM)
        hidden = torch.triu(torch.full((LENGTH, LENGTH), -math.inf), diagonal=1)
        self.attention = torch.softmax(logits + hidden, dim=-1)

    def scores(self, press: Any, given: bool = True) -> np.ndarray:
        """kvpress's scores summed over layers and KV heads, shape [tokens].

        ``given``: with the attention as it is; else kvpress has to compute it from the hidden states, which are the
        queries here, in a model whose projection and rotation do nothing.
        """
        total = torch.zeros(LENGTH, dtype=torch.float64)
        config = SimpleNamespace(num_attention_heads=QUERY_HEADS, num_key_value_heads=KV_HEADS)
        module = SimpleNamespace(config=config, head_dim=HEAD_DIM, q_proj=torch.nn.Identity())
        no_rotation = {"position_embeddings": (torch.ones(1, LENGTH, HEAD_DIM), torch.zeros(1, LENGTH, HEAD_DIM))}
        for layer in range(LAYERS):
            attention = self.attention[layer : layer + 1] if given else None
            states = self.query[layer].transpose(0, 1).reshape(1, LENGTH, QUERY_HEADS * HEAD_DIM)
            keys = self.key[layer : layer + 1]
            scores = press.score(module, states, keys, keys, attention, no_rotation)
            assert scores.shape == (1, KV_HEADS, LENGTH)
            total += scores.sum(dim=(0, 1))
        return total.numpy()

    def observed(self, policy: Policy) -> np.ndarray:
        """Our priorities after the prompt, whose last queries were observed as the policy asks."""
        count = min(policy.needs.prompt_queries, LENGTH)
        mass = self.attention[:, :, LENGTH - count :].sum(dim=(0, 1, 2)).numpy()
        tokens = np.arange(LENGTH)
        state = policy.observe(observation(tokens=tokens, mass=mass, queries=[count], of_prompt=[True]))
        return priorities(policy, observation(tokens=tokens, state=state))


@pytest.fixture(scope="module")
def layers() -> Layers:
    return Layers()


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal values, and therefore an equal ranking, in which no two tokens are too close to call."""
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert np.diff(np.sort(ours)).min() > 0
    assert np.argsort(ours).tolist() == np.argsort(theirs).tolist()


def test_the_comparison_can_fail(layers: Layers, kvpress: SimpleNamespace) -> None:
    theirs = GROUP * layers.scores(kvpress.ObservedAttentionPress())
    for other in (H2O(average=False), H2O(decay=0.99), TOVA()):
        with pytest.raises(AssertionError):
            assert_same(layers.observed(other), theirs)


def test_streaming_llm_keeps_the_same_tokens(layers: Layers, kvpress: SimpleNamespace) -> None:
    press = kvpress.StreamingLLMPress(compression_ratio=0.4, n_sink=4)
    dropped = np.flatnonzero(layers.scores(press) == 0)
    tokens = np.arange(LENGTH)
    priority = priorities(StreamingLLM(), observation(tokens=tokens))
    one = np.ones(1, dtype=np.int64)
    victims = select_victims(priority, tokens, one * LENGTH, one * LENGTH, one * len(dropped), sinks=4, recent=0)
    assert len(dropped) == 36 and victims.tolist() == dropped.tolist()


def test_h2o_is_observed_attention(layers: Layers, kvpress: SimpleNamespace) -> None:
    assert_same(layers.observed(H2O()), GROUP * layers.scores(kvpress.ObservedAttentionPress()))


@pytest.mark.parametrize("given", [True, False], ids=["attention given", "attention computed"])
@pytest.mark.parametrize("kernel_size", [1, 5, 9])
def test_snapkv(layers: Layers, kvpress: SimpleNamespace, kernel_size: int, given: bool) -> None:
    press = kvpress.SnapKVPress(compression_ratio=0.5, window_size=WINDOW, kernel_size=kernel_size)
    ours = layers.observed(SnapKV(kernel_size=kernel_size, observation_window=WINDOW))
    theirs = layers.scores(press, given)
    # kvpress takes the mean over the window's queries, and gives the window itself a score that always keeps it.
    assert_same(ours[:-WINDOW], WINDOW * GROUP * theirs[:-WINDOW])
    assert (theirs[-WINDOW:] > theirs[:-WINDOW].max()).all()


def test_key_norm(layers: Layers, kvpress: SimpleNamespace) -> None:
    norms = np.sqrt((layers.key.numpy() ** 2).sum(axis=-1)).sum(axis=(0, 1))
    ours = priorities(KeyNorm(), observation(tokens=np.arange(LENGTH), key_norm=norms))
    assert_same(ours, layers.scores(kvpress.KnormPress()))


@pytest.mark.parametrize("given", [True, False], ids=["attention given", "attention computed"])
def test_tova(layers: Layers, kvpress: SimpleNamespace, given: bool) -> None:
    # kvpress takes the mean over all heads, once per KV head, and always keeps the last token.
    theirs = layers.scores(kvpress.TOVAPress(), given)
    assert_same(layers.observed(TOVA())[:-1], GROUP * theirs[:-1])


def test_importing_the_presses_leaves_no_stub_behind(kvpress: SimpleNamespace) -> None:
    assert all(hasattr(module, "__file__") for name, module in sys.modules.items() if name.startswith("kvpress"))
