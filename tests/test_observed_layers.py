"""Over which attention layers an observer is laid, and what happens where its kernel cannot do the backend's work."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vtoken.config import VTokenConfig
from vtoken.kernels import openmp
from vtoken.kernels.cpu.observer import AttentionObserver
from vtoken.policies import load_policies
from vtoken.vllm_plugin import layers as observed_layers


class CPUAttentionBackendImpl:
    """What is looked at of vLLM's class by that name."""

    num_heads, scale, sinks = 8, 1.0, None

    def __init__(self, logits_soft_cap: float = 0.0) -> None:
        self.logits_soft_cap = logits_soft_cap

    def forward(self) -> None: ...


class OtherBackendImpl(CPUAttentionBackendImpl):
    pass


@pytest.fixture(autouse=True)
def any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_layers, "check_vec_layout", lambda *args: None)


def lay(impl: Any, policy: str, holes: bool, **settings: Any) -> tuple[AttentionObserver | None, list[bool]]:
    """The observer, and which of three layers it has been laid over."""
    dtype = settings.pop("dtype", torch.float32)
    made = [SimpleNamespace(impl=impl(), kv_cache=torch.zeros(2, 1, 32, 64, dtype=dtype)) for _ in range(3)]
    config = VTokenConfig(policy=policy, budget=64, **settings)
    needs = {name: one.needs for name, one in load_policies(config).items()}
    spec = SimpleNamespace(num_kv_heads=1, head_size=32)
    observer = observed_layers._observe(config, made, None, spec, needs, holes)
    return observer, ["forward" in vars(layer.impl) for layer in made]


def test_a_faster_kernel_that_has_but_one_thread_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "has_runtime", False)
    assert lay(CPUAttentionBackendImpl, "streaming_llm", False) == (None, [False] * 3)
    assert lay(CPUAttentionBackendImpl, "streaming_llm", True)[1] == [True] * 3  # needed, fast or not


@pytest.mark.parametrize("different", [{"scale": 0.5}, {"num_heads": 4}, {"sinks": 1}, {"logits_soft_cap": 30.0}])
def test_layers_that_differ(different: dict[str, Any]) -> None:
    """One kernel is planned for all of them."""
    made: list[CPUAttentionBackendImpl] = []

    def impl() -> CPUAttentionBackendImpl:
        made.append(CPUAttentionBackendImpl())
        for name, value in different.items() if len(made) == 3 else ():
            setattr(made[-1], name, value)
        return made[-1]

    assert lay(impl, "streaming_llm", False)[0] is None
    made.clear()
    with pytest.raises(ValueError, match="layers that differ in heads, scale, soft cap or sinks"):
        lay(impl, "h2o", False)


@pytest.mark.parametrize("policy", ["streaming_llm", "random", "key_norm", "h2o"])
@pytest.mark.parametrize("holes", [False, True])
def test_all_layers_of_a_supported_backend(policy: str, holes: bool) -> None:
    observer, laid = lay(CPUAttentionBackendImpl, policy, holes)
    assert isinstance(observer, AttentionObserver) and laid == [True] * 3
    assert observer.heads == 24


def test_layers_that_do_not_count_are_left_alone_where_there_are_no_holes() -> None:
    assert lay(CPUAttentionBackendImpl, "h2o", False, score_layers=[2, 0])[1] == [True, False, True]
    assert lay(CPUAttentionBackendImpl, "h2o", True, score_layers=[2, 0])[1] == [True, True, True]


UNSUPPORTED = {
    "another backend": (OtherBackendImpl, torch.float32),
    "soft cap": (lambda: CPUAttentionBackendImpl(30.0), torch.float32),
    "dtype": (CPUAttentionBackendImpl, torch.float16),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
class TestUnsupported:
    def test_nobody_needs_it(self, case: str) -> None:
        impl, dtype = UNSUPPORTED[case]
        assert lay(impl, "streaming_llm", False, dtype=dtype) == (None, [False] * 3)

    @pytest.mark.parametrize(("policy", "holes"), [("h2o", False), ("streaming_llm", True), ("h2o", True)])
    def test_somebody_does(self, case: str, policy: str, holes: bool) -> None:
        impl, dtype = UNSUPPORTED[case]
        with pytest.raises(ValueError, match="vtoken: "):
            lay(impl, policy, holes, dtype=dtype)
