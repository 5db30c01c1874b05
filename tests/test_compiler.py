"""Without a C++ compiler: refused where the model would be compiled, in agreement with torch's own search."""

import os
from pathlib import Path
from typing import Any

import pytest
from engines import ENGINE_ARGS
from torch._inductor import config as inductor
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from vtoken.vllm_plugin.compiler import check_compiler, missing_compiler

SENTENCE = (
    "vtoken: vLLM's compilation calls the C++ compiler '{}', which is not to be found; install g++, name another "
    "compiler by the environment variable CXX, or set enforce_eager=True."
)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on the PATH: a machine without a compiler, until one is put there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TORCH_INDUCTOR_INSTALL_GXX", raising=False)
    return tmp_path


def put(directory: Path, name: str, mode: int = 0o755) -> Path:
    (directory / name).write_text("#!/bin/sh\nexit 0\n")
    (directory / name).chmod(mode)
    return directory / name


def torch_finds_one() -> bool:
    """Torch's own search, with ``CXX`` as it would read it when it is imported."""
    with inductor.patch({"cpp.cxx": (None, os.environ.get("CXX", "g++"))}):
        cpp_builder.cpp_compiler_search.cache_clear()
        try:
            return bool(cpp_builder.get_cpp_compiler())
        except (InvalidCxxCompiler, PermissionError):  # the latter for an empty name
            return False
        finally:
            cpp_builder.cpp_compiler_search.cache_clear()


@pytest.mark.parametrize(
    ("cxx", "there", "missing"),
    [
        (None, [], "g++"),
        (None, ["gcc", "clang++", "c++"], "g++"),
        (None, ["g++"], None),
        ("clang++", ["g++"], "clang++"),
        ("clang++", ["clang++"], None),
        ("ccache g++", ["ccache", "g++"], "ccache g++"),
        ("", ["g++"], ""),
    ],
)
def test_the_search_is_torchs(
    tools: Path, monkeypatch: pytest.MonkeyPatch, cxx: str | None, there: list[str], missing: str | None
) -> None:
    for name in there:
        put(tools, name)
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    assert missing_compiler() == missing
    assert torch_finds_one() == (missing is None)


def test_a_compiler_may_be_named_by_its_path_or_fetched(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(put(tools, "mine")))
    assert missing_compiler() is None
    assert torch_finds_one()
    monkeypatch.delenv("CXX")
    assert missing_compiler() == "g++"
    monkeypatch.setenv("TORCH_INDUCTOR_INSTALL_GXX", "1")
    assert missing_compiler() is None


def engine_config(model: Path, **changes: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = {**ENGINE_ARGS, "skip_tokenizer_init": True, "distributed_executor_backend": "uni", **changes}
    return EngineArgs(model=str(model), **args).create_engine_config()


CONFIGURED = {"vtoken": {"policy": "streaming_llm", "budget": 64}}


def test_refused_only_if_the_model_is_compiled(tools: Path, tiny_gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as refusal:
        engine_config(tiny_gqa, enforce_eager=False, additional_config=CONFIGURED)
    assert SENTENCE.format("g++") in str(refusal.value)
    engine_config(tiny_gqa, enforce_eager=True, additional_config=CONFIGURED)
    stock = engine_config(tiny_gqa, enforce_eager=False)  # as vLLM has it: it fails when it compiles
    with pytest.raises(ValueError) as refusal:
        check_compiler(stock)
    assert str(refusal.value) == SENTENCE.format("g++")
    monkeypatch.setattr(stock.device_config, "device_type", "cuda")
    check_compiler(stock)
    put(tools, "g++")
    accepted = engine_config(tiny_gqa, enforce_eager=False, additional_config=CONFIGURED)
    assert accepted.compilation_config.backend == "inductor"
    assert accepted.compilation_config.mode
