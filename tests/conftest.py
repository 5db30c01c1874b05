"""Settings that must be in place before vllm is imported, and the models the tests run on."""

import os

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def tiny_gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with 4 query and 2 KV heads."""
    from tiny_models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("tiny_gqa"), num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The small real model: VTOKEN_TEST_MODEL if set, else the one `vtoken demo` fetches."""
    if path := os.environ.get("VTOKEN_TEST_MODEL"):
        return Path(path)
    from vtoken.evaluation.model import ensure_model

    return Path(ensure_model())
