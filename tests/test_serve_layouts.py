"""Servers of other shapes than the common one: several front ends and engines, vLLM's own command, and refusals."""

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import prompts
from serving import VLLM_SERVE, Server, refusal, served

ENGINE = {
    "served-model-name": "tiny",
    "dtype": "float32",
    "block-size": "32",
    "max-model-len": "1024",
    "num-gpu-blocks-override": "101",
    "kv-cache-memory-bytes": str(1 << 30),
}
FLAGS = ("--enforce-eager", "--skip-tokenizer-init")
OWN = ("--policy", "streaming_llm", "--budget", "64", "--recent", "16")
PROMPT = prompts((200,), 512)[0]
ONE_CORE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.slow


def arguments(model: Path, *more: str) -> list[str]:
    return [str(model), *(part for name, value in ENGINE.items() for part in (f"--{name}", value)), *FLAGS, *more]


def complete(server: Server, **own: Any) -> httpx.Response:
    """By a client of its own, so that any front end may answer."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.address}/v1/completions", json={**body, "vllm_xargs": own}, timeout=120.0)


def test_two_front_ends_before_two_engines(tiny_gqa: Path) -> None:
    """Whoever answers tells the same, and nothing is counted twice or by one front end alone."""
    layout = ("--api-server-count", "2", "--data-parallel-size", "2")
    with served(arguments(tiny_gqa, *OWN, *layout), ready=2, **ONE_CORE) as server:
        answers = [complete(server) for _ in range(6)]
        evicted = [answer.json()["kv_transfer_params"]["vtoken"]["tokens_evicted"] for answer in answers]
        assert evicted == 6 * [200 + 19 - 63]
        refused = [complete(server, **{"vtoken.budget": 1}).status_code for _ in range(5)]
        assert refused == 5 * [400]
        pages = [httpx.get(f"{server.address}/metrics") for _ in range(8)]
        told = Counter(
            tuple(
                sorted(
                    line
                    for line in page.text.splitlines()
                    if line.startswith(
                        ("vtoken_tokens_evicted_total", "vtoken_requests_refused_total", "vtoken_free_blocks")
                    )
                )
            )
            for page in pages
        )
        ((lines, times),) = told.items()  # all eight alike
        assert times == 8
        values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
        of = [f'{{engine="{n}",model_name="tiny"}}' for n in (0, 1)]
        by_engine = [values[f"vtoken_tokens_evicted_total{labels}"] for labels in of]
        assert sum(by_engine) == sum(evicted) and min(by_engine) > 0
        assert values["vtoken_requests_refused_total"] == 5
        assert [values[f"vtoken_free_blocks{labels}"] for labels in of] == [100, 100]
        engines = httpx.get(f"{server.address}/v1/vtoken/pool").json()["engines"]
        assert [engine["name"] for engine in engines] == ["engine 0", "engine 1"]
        assert [engine["frames"][-1]["tokens_evicted"] for engine in engines] == by_engine
        last = engines[1]["frames"][-1]["number"]
        for since, left in ((f"since=0&since={last}", [True, False]), ("since=999999", [False, True])):
            engines = httpx.get(f"{server.address}/v1/vtoken/pool?{since}").json()["engines"]
            assert [len(engine["frames"]) > 0 for engine in engines] == left


def test_vllms_own_command_configured_by_hand(tiny_gqa: Path) -> None:
    """With VLLM_PLUGINS the routes are there too, under the prefix that a proxy takes away."""
    settings = '{"vtoken": {"policy": "streaming_llm", "budget": 64, "recent": 16, "history": 0}}'
    given = arguments(tiny_gqa, "--additional-config", settings)
    with served(given, VLLM_SERVE, VLLM_PLUGINS="vtoken", **ONE_CORE) as server:
        assert complete(server).json()["kv_transfer_params"]["vtoken"]["tokens_evicted"] == 200 + 19 - 63
        assert server.own()["vtoken_tokens_evicted_total"] == 200 + 19 - 63
        assert httpx.get(f"{server.address}/vtoken").status_code == 200
        (engine,) = httpx.get(f"{server.address}/v1/vtoken/pool").json()["engines"]
        assert engine["frames"] == []  # as asked


REFUSED = [
    (["--budget", "5"], {}, "vtoken: option 'budget' = 5 is below sinks + recent + interval = 4 + 32 + 1 = 37, raise"),
    (["--policy", "h20"], {}, "vtoken: unknown policy 'h20'"),
    (
        ["--budget", "64"],
        {"VLLM_PLUGINS": "other"},
        "vtoken: VLLM_PLUGINS = 'other' leaves vtoken out; add it, or unset",
    ),
    (
        ["--budget", "64", "--additional-config", '{"vtoken": {"budget": 0.5}}'],
        {},
        "vtoken: option 'budget' and additional_config['vtoken'] = {'budget': 0.5} are both given; put all settings",
    ),
    (["--kv-cache-dtype", "fp8"], {}, "vtoken: a kv_cache_dtype of its own is not supported yet"),
    (["--reclaim", "pack", "--request-policies", "nobody"], {}, "vtoken: unknown policy 'nobody'"),
]


@pytest.mark.parametrize("more, environment, sentence", REFUSED)
def test_a_server_that_does_not_start_says_why(
    more: list[str], environment: dict[str, str], sentence: str, tiny_gqa: Path
) -> None:
    code, line = refusal(arguments(tiny_gqa, *more), **environment)
    assert (code, line[: len(sentence)]) == (2, sentence)
