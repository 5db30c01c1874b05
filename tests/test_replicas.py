"""Two replicas behind vLLM's own front end, each an engine of its own."""

from pathlib import Path
from typing import Any

from engines import Job, generate, prompts, running
from programs import run_program

from vtoken.config import VTokenConfig
from vtoken.core.trace import Trace

OPTIONS: dict[str, Any] = {"policy": "streaming_llm", "budget": 64, "record_trace": True}


def test_replicas_answer_as_one_engine_does(tiny_gqa: Path) -> None:
    jobs = [Job(f"r{n}", prompt, 20) for n, prompt in enumerate(prompts((300, 120, 129, 200), 512))]
    question = [str(tiny_gqa), OPTIONS, [[job.name, job.prompt, job.max_tokens] for job in jobs]]
    (got,) = run_program("two_replicas.py", question)
    with running(tiny_gqa, VTokenConfig(**OPTIONS), skip_tokenizer_init=True) as engine:
        alone = {}
        for job in jobs:
            alone |= generate(engine, [job])
        traces = engine.take_traces()
    assert got["tokens"] == {name: answer.token_ids for name, answer in alone.items()}
    served = [{name.split("-")[0]: Trace.from_dict(trace) for name, trace in each.items()} for each in got["traces"]]
    assert [sorted(each) for each in served] == [["r0", "r2"], ["r1", "r3"]]
    assert served[0] | served[1] == traces
    assert all(life.victims[0] for each in served for trace in each.values() for life in trace.incarnations)
