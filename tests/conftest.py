"""Settings that must be in place before vllm is imported, and the models the tests run on."""

import functools
import os

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # A core each: models this small gain nothing from a second one, and two teams of threads that take turns on the
    # same cores wait for each other most of the time.
    core = sorted(os.sched_getaffinity(0))[int(worker.removeprefix("gw")) % len(os.sched_getaffinity(0))]
    os.sched_setaffinity(0, {core})
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core)}

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

from collections.abc import Callable, Iterator, Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from types import MappingProxyType  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def tiny_gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with 4 query and 2 KV heads."""
    from tiny_models import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny_gqa"), num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random models by name: llama-mha, llama-gqa, llama-mqa, qwen2 and qwen3 (both GQA)."""
    from tiny_models import tiny_model

    heads = {"llama-mha": 4, "llama-gqa": 2, "llama-mqa": 1, "qwen2": 2, "qwen3": 2}

    @functools.cache
    def make(name: str) -> Path:
        return tiny_model(
            tmp_path_factory.mktemp(name), name.split("-", maxsplit=1)[0], num_heads=4, num_kv_heads=heads[name]
        )

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The small real model: VTOKEN_TEST_MODEL if set, else the one `vtoken demo` fetches."""
    if path := os.environ.get("VTOKEN_TEST_MODEL"):
        return Path(path)
    from vtoken.evaluation.model import ensure_model

    return Path(ensure_model())


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A chromium without a screen; skips where there is none."""
    from browser import start_browser

    started = start_browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.driver.quit()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, for the test."""
    import torch
    from torch._C import set_num_threads  # vLLM replaces torch's own name for it once a worker has bound its threads

    before = torch.get_num_threads()
    yield set_num_threads
    set_num_threads(before)


@pytest.fixture(scope="session")
def stub_model_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Llama configuration; there are no weights, and none are needed."""
    from stub_model import stub_model

    return stub_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def make(stub_model_config: Any) -> Iterator[Callable[..., Any]]:
    """Makes stub engines: vLLM's scheduler over a worker without a model."""
    from lagging_engine import LaggingEngine
    from stub_worker import StubEngine

    from vtoken.config import VTokenConfig

    kinds = {"sync": StubEngine, "early": LaggingEngine, "late": functools.partial(LaggingEngine, early=False)}

    def make_engine(
        num_blocks: int = 1000,
        *,
        seqs: int = 256,
        batched: int = 65536,
        caching: bool = False,
        lag: str = "sync",
        scheduling: Mapping[str, Any] = MappingProxyType({}),
        **options: object,
    ) -> Any:
        settings = {"policy": "streaming_llm", "sinks": 2, "recent": 6, "interval": 1, **options}
        settings.setdefault("record_trace", settings["policy"] != "streaming_llm")
        config = VTokenConfig(**settings)
        return kinds[lag](stub_model_config, config, num_blocks, seqs, batched, caching, **scheduling)

    yield make_engine


@pytest.fixture
def start(stub_model_config: Any) -> Callable[..., Any]:
    """Starts a scheduler of vLLM's or of ours under the same driver: ``start(kind, num_blocks, ...)``."""
    from behaviour import Driver

    return functools.partial(Driver, stub_model_config)


@pytest.fixture
def no_other_engine() -> None:
    """Requests are validated for all engines that this process has configured: forget those of other tests."""
    from vllm.platforms import current_platform

    from vtoken.vllm_plugin import plugin

    platform = type(current_platform)
    stock, _ = getattr(platform.validate_request, plugin._MARK, (platform.validate_request, ()))
    platform.validate_request = stock
