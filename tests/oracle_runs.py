"""Requests on a real engine, each held to both oracles: the logits are its victims', the victims its formula's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
from engines import Job, generate, prompts, running
from victim_oracle import Settings, check_victims

from vtoken.config import VTokenConfig
from vtoken.core.trace import Trace

Tiny = Callable[[str], Path]
BUDGET, SINKS, RECENT = 64, 4, 32
OUTPUTS = 24
TINY = {"skip_tokenizer_init": True, "max_num_batched_tokens": 96}  # prompts come in parts, beside decoding neighbours


def tiny_jobs() -> list[Job]:
    return [Job(f"r{n}", prompt, OUTPUTS) for n, prompt in enumerate(prompts((300, 77, 129, 128), 512))]


def settings(**options: Any) -> VTokenConfig:
    return VTokenConfig(**{"budget": BUDGET, "sinks": SINKS, "recent": RECENT, "record_trace": True, **options})


def run(
    model: Path, jobs: list[Job], logprobs: int, *, engine_args: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Answers and traces of these requests, all at once."""
    with running(model, settings(**options), **(engine_args or {})) as engine:
        return generate(engine, jobs, logprobs=logprobs), engine.take_traces()


def check(
    reference: Any, jobs: list[Job], answers: dict, traces: dict[str, Trace], score: Any, chunk: int = 10**9
) -> int:
    """Hold every request to both oracles, in each life of its cache; how many victims were compared with survivors.

    ``chunk``: prompts are reduced at its multiples, from the first one on at which the budget is exceeded.
    """
    compared, first = 0, ((BUDGET - 1) // chunk + 1) * chunk
    for job in jobs:
        answer, known = answers[job.name], len(job.prompt)
        oracle.check(reference, job.prompt, answer.token_ids, traces[job.name], answer.logits)
        for life in traces[job.name].incarnations:
            parts = Settings(job.prompt, [*range(first, known, chunk), known], SINKS, RECENT)
            compared += check_victims(reference, [*job.prompt, *answer.token_ids], life, score, parts)
            known = max(known, oracle.length(life) + 1)  # what the next one has to compute before it decodes
    return compared
