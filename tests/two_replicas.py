"""Runs two replicas of a model behind vLLM's own front end and prints what each of them did as JSON.

A program of its own, for the reason that ``two_ranks.py`` is one. Reads ``[model, options, jobs]`` from stdin. Requests
come in pairs and say which replica they want, since the front end balances by what it last heard of each: so each has
one at a time.
"""

import asyncio
import json
import multiprocessing
import os
import sys
from typing import Any

from engines import ENGINE_ARGS, Job


async def serve(model: str, options: dict[str, Any], jobs: list[Job]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine_args = {
        **ENGINE_ARGS,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni",
        "data_parallel_size": 2,
        "data_parallel_address": "127.0.0.1",
        "additional_config": {"vtoken": {"record_trace": True, **options}},
    }
    front = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **engine_args))
    try:
        answers = {}

        async def answer(job: Job, replica: int) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
            prompt = {"prompt_token_ids": job.prompt}
            async for output in front.generate(prompt, params, job.name, data_parallel_rank=replica):
                answers[job.name] = list(output.outputs[0].token_ids)

        for pair in zip(jobs[::2], jobs[1::2], strict=True):
            await asyncio.gather(*map(answer, pair, (0, 1)))
        core = front.engine_core
        replicas = [
            (await core._call_utility_async("collective_rpc", "take_vtoken_traces", None, (), None, engine=engine))[0]
            for engine in core.core_engines
        ]
    finally:
        front.shutdown()
    return {"tokens": answers, "traces": replicas}


def main() -> None:
    import vllm.model_executor.models.llama  # noqa: F401
    import vllm.v1.engine.coordinator as coordinator
    import vllm.v1.engine.utils as engine_utils

    import vtoken.vllm_plugin.compat  # noqa: F401

    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # whoever started us may be bound to one core
    for module in (engine_utils, coordinator):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    answers, sys.stdout = sys.stdout, sys.stderr
    model, options, jobs = json.load(sys.stdin)
    print(json.dumps(asyncio.run(serve(model, options, [Job(*job) for job in jobs]))), file=answers)


if __name__ == "__main__":
    main()
