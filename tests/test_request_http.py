"""Settings of requests as they come in over HTTP, to vLLM's own OpenAI server in front of an engine process."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from engines import prompts

Tiny = Callable[[str], Path]
LONG = 60.0
"""Seconds after which the server counts as hanging."""

SETTINGS = {"policy": "streaming_llm", "request_policies": ["tova"], "budget": 64, "recent": 16}
OWN = "policy, budget, sinks, recent, protect_prefix, protect_prompt, off"
FLAG = "is refused: must be true or false, or 1 or 0."
PROMPT = prompts((200,), 512)[0]

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"vtoken.budget": 0},
        "option 'budget' = 0 is refused: must be at least 1 token; to keep all, set vtoken.off in",
    ),
    ({"vtoken.budget": float("nan")}, "option 'budget' = nan is refused: must, as a share of the prompt, lie in (0, 1"),
    ({"vtoken.budget": 20}, "option 'budget' = 20 is below sinks + recent + interval = 4 + 16 + 1 = 21"),
    ({"vtoken.self": 1}, "unknown option 'self'; the options are budget, off,"),
    ({"vtoken.sinks": -1}, "option 'sinks' = -1 is refused: input should be greater than or equal to 0."),
    ({"vtoken.off": 2}, f"option 'off' = 2 {FLAG}"),
    ({"vtoken.protect_prompt": "yes"}, f"option 'protect_prompt' = 'yes' {FLAG}"),
    ({"vtoken.protect_prompt": True}, "option 'budget' = 64 is below the protected prompt + recent + interval = 200 +"),
    ({"vtoken.off": True, "vtoken.budget": 90}, "option 'off' = 1 contradicts 'budget': leave out one or the other."),
    ({"vtoken.policy": "h2o"}, "option 'policy' = 'h2o' is not on offer; ask for streaming_llm or tova, or start the"),
    ({"vtoken.reclaim": "pack"}, f"option 'reclaim' = 'pack' is refused: a request may set {OWN}, and all else is for"),
    ({"vtoken.bugdet": 90}, "unknown option 'bugdet'; did you mean 'budget'?"),
]


@asynccontextmanager
async def server(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """vLLM's own, on a free port, and a client for it. The engine is in a process of its own, as with `vllm serve`."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vtoken.vllm_plugin.plugin import register

    register()  # where the plugin is not installed, but on the path
    engine_args = {
        "model": str(model),
        "served-model-name": "tiny",
        "dtype": "float32",
        "block-size": 32,
        "max-model-len": 1024,
        "num-gpu-blocks-override": 129,
        "kv-cache-memory-bytes": 1 << 30,
        "additional-config": json.dumps({"vtoken": SETTINGS}),
    }
    given = [part for name, value in engine_args.items() for part in (f"--{name}", str(value))]
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([*given, "--enforce-eager", "--skip-tokenizer-init", "--no-enable-prefix-caching"])
    async with build_async_engine_client(args) as engine:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()  # whoever comes before the server takes calls waits for it
            serving = app.state.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
            served = asyncio.create_task(serving.serve(sockets=[listening]))
            address = f"http://127.0.0.1:{listening.getsockname()[1]}"
            try:
                async with httpx.AsyncClient(base_url=address, timeout=LONG) as client:
                    yield client
            finally:
                serving.should_exit = True
                await served


def body(max_tokens: int, own: dict[str, Any], **more: Any) -> str:
    """A request for a completion; NaN is written as Python's json has it."""
    wanted = {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps(wanted | more | {"vllm_xargs": own})


async def post(client: httpx.AsyncClient, content: str) -> httpx.Response:
    return await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})


async def check_refusals(client: httpx.AsyncClient) -> None:
    for own, sentence in REFUSED:
        answer = await post(client, body(5, own))
        assert answer.status_code == 400, (own, answer.text)
        message = answer.json()["error"]["message"]
        assert message.startswith(f"vtoken: {sentence}"), message
    nested = await post(client, body(5, {"vtoken": {"budget": 90}}))  # vLLM's own refusal
    assert nested.status_code == 400 and "vllm_xargs" in nested.text


async def told(client: httpx.AsyncClient, **own: Any) -> dict[str, int]:
    """What comes back with a request for 20 tokens."""
    answer = await post(client, body(20, {f"vtoken.{name}": value for name, value in own.items()}))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 20
    found: dict[str, int] = answer.json()["kv_transfer_params"]["vtoken"]
    return found


async def visit(model: Path) -> None:
    async with server(model) as client:
        wanted = body(700, {"vtoken.policy": "tova"}, stream=True)
        headers = {"content-type": "application/json"}
        async with client.stream("POST", "/v1/completions", content=wanted, headers=headers) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            await check_refusals(client)
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2] + rest[-3]
        # 200 tokens of prompt and 19 more, of which so many are left before the next one; seven blocks at first.
        answers = await asyncio.gather(
            told(client),
            told(client, policy="tova", sinks=2),
            told(client, budget=0.5, protect_prompt=False),
            told(client, off=True),
            told(client, budget=217, protect_prompt=1),
        )
    evicted = [219 - 63, 219 - 63, 219 - 99, 0, 219 - 216]
    assert answers == [{"tokens_evicted": n, "peak_blocks": 7} for n in evicted]


def test_over_http(no_other_engine: None, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    asyncio.run(asyncio.wait_for(visit(tiny("llama-gqa")), 5 * LONG))
