"""vLLM's asynchronous engine, as its server uses it: streams, clients that leave, requests that are refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import oracle
import pytest
from engines import prompts
from llms import ARGS, TIGHT

from vtoken.core.trace import Trace

LONG = 120.0
"""Seconds after which a stream counts as hanging; nothing waits that long unless the test fails."""


class Client:
    """Streams from one engine; the pool holds one request of the longest kind."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.traces: dict[str, Trace] = {}

    async def stream(self, name: str, prompt: Any, max_tokens: int, **options: Any) -> AsyncIterator[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": -1, **options}
        params = SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, **settings)
        asked = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        async for output in self.llm.generate(asked, params, name):
            yield output.outputs[0]

    async def whole(self, name: str, prompt: Any, max_tokens: int, **options: Any) -> tuple[list[Any], list[int]]:
        """All parts, and the tokens in them."""
        parts = [part async for part in self.stream(name, prompt, max_tokens, **options)]
        return parts, [token for part in parts for token in part.token_ids]

    async def leaves_after(self, name: str, prompt: list[int], outputs: int) -> None:
        stream, got = self.stream(name, prompt, 200), 0
        async for part in stream:
            got += len(part.token_ids)
            if got >= outputs:
                break
        await stream.aclose()

    async def take_traces(self) -> dict[str, Trace]:
        (traces,) = await self.llm.collective_rpc("take_vtoken_traces")
        return {req_id.rpartition("-")[0]: Trace.from_dict(trace) for req_id, trace in traces.items()}


async def session(llm: Any, reference: Any) -> None:
    client = Client(llm)
    one, two, late, big = prompts((150, 70, 90, 300), 512)
    streamed, _ = await asyncio.gather(client.whole("one", one, 30), client.leaves_after("two", two, 8))
    # Room for this one is there only if whoever left has given everything back.
    parts, tokens = await client.whole("big", big, 20, stream_interval=4)
    assert len(tokens) == 20 and len(parts) < 20
    with pytest.raises(ValueError, match="below sinks"):
        await client.whole("refused", late, 5, extra_args={"vtoken.budget": 3})

    async def chunks() -> AsyncIterator[Any]:
        from vllm.engine.protocol import StreamingInput

        for part in (late, late):
            yield StreamingInput({"prompt_token_ids": part})

    with pytest.raises(ValueError, match="streaming sessions are not supported yet; send the whole prompt at once"):
        await client.whole("session", chunks(), 5)
    parts, tokens = await client.whole("late", late, 10)
    traces = await client.take_traces()
    for name, prompt, (got, output) in (("one", one, streamed), ("late", late, (parts, tokens))):
        logits = [{token: e.logprob for token, e in row.items()} for part in got for row in part.logprobs]
        oracle.check(reference, prompt, output, traces[name], logits)
    assert len(traces["two"].incarnations[0].new_tokens) < 150
    assert set(await client.take_traces()) <= {"late"}  # the worker holds nobody, or whoever has just ended


def test_streams_and_clients_that_leave(no_other_engine: None, tiny_gqa: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {**ARGS, "num_gpu_blocks_override": 11, "skip_tokenizer_init": True}

    async def talk() -> None:
        args = AsyncEngineArgs(model=str(tiny_gqa), additional_config={"vtoken": TIGHT}, **options)
        llm = AsyncLLM.from_engine_args(args)
        try:
            await asyncio.wait_for(session(llm, oracle.load_reference(tiny_gqa)), LONG)
        finally:
            llm.shutdown()

    asyncio.run(talk())
