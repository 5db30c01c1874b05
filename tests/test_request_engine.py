"""Requests with settings of their own on the real engine, together: each is held to the formula of its own policy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
from engines import Answer, Job, generate, prompts, running
from oracle_runs import OUTPUTS, TINY
from victim_oracle import SCORES, Score, Settings, check_victims, h2o_fading

from vtoken.config import VTokenConfig
from vtoken.core.trace import Trace

Tiny = Callable[[str], Path]
CONFIG = VTokenConfig(
    policy="h2o",
    policy_options={"decay": 0.9},
    request_policies=[name for name in SCORES if name != "h2o"],
    budget=64,
    record_trace=True,
)
OWN: dict[str, dict[str, Any]] = {
    "h2o": {},
    "scissorhands": {"policy": "scissorhands", "sinks": 9},
    "snapkv": {"policy": "snapkv", "budget": 80, "recent": 40},
    "off": {"off": 1},
    "random": {"policy": "random", "budget": 0.5, "recent": 3},
    "tova": {"policy": "tova", "protect_prefix": 17},
    "key_norm": {"policy": "key_norm", "budget": 190, "protect_prompt": 1, "recent": 0},
    "streaming_llm": {"policy": "streaming_llm", "sinks": 0},
}
LENGTHS = (300, 77, 129, 150, 128, 200, 180, 90)
EVICTED = {
    "h2o": 300 - 63 + 23,
    "scissorhands": 77 - 63 + 23,
    "snapkv": 129 - 79 + 23,
    "off": 0,
    "random": 128 - 63 + 23,
    "tova": 200 - 63 + 23,
    "key_norm": 180 + 23 - 189,
    "streaming_llm": 90 - 63 + 23,
}


def jobs() -> list[Job]:
    return [Job(name, prompt, OUTPUTS, own=OWN[name]) for name, prompt in zip(OWN, prompts(LENGTHS, 512), strict=True)]


def parts(job: Job) -> Settings:
    own = {"sinks": 4, "recent": 32} | job.own
    head = len(job.prompt) if "protect_prompt" in own else max(own["sinks"], own.get("protect_prefix", 0))
    return Settings(job.prompt, [len(job.prompt)], head, own["recent"])


def compared(
    reference: Any, job: Job, answer: Answer, trace: Trace, score: Score, settings: Settings | None = None
) -> int:
    """How many victims were compared with survivors, by this score."""
    (life,) = trace.incarnations
    return check_victims(reference, [*job.prompt, *answer.token_ids], life, score, settings or parts(job))


def test_a_mixed_batch(tiny: Tiny) -> None:
    model = tiny("llama-gqa")
    with running(model, CONFIG, **TINY) as engine:
        answers = generate(engine, jobs(), logprobs=-1)
        traces = engine.take_traces()
    reference = oracle.load_reference(model)
    scores = SCORES | {"h2o": h2o_fading}
    for job in jobs():
        answer, trace = answers[job.name], traces[job.name]
        report = oracle.check(
            reference, job.prompt, answer.token_ids, trace, answer.logits, allow_none=job.name == "off"
        )
        assert report.evictions == EVICTED[job.name], job.name
        if job.name != "off":
            assert compared(reference, job, answer, trace, scores[job.name]) > 0
    # Whose formula, and whose protection it is, makes a difference.
    scissorhands, tova = jobs()[1], jobs()[5]
    for job, other in ((scissorhands, tova), (tova, scissorhands)):
        with pytest.raises(AssertionError, match="was taken, and"):
            compared(reference, job, answers[job.name], traces[job.name], scores[other.name])
    job = jobs()[-1]
    with pytest.raises(AssertionError, match="a protected token or a dead one was taken"):
        engines = Settings(job.prompt, [90], 4, 32)
        compared(reference, job, answers[job.name], traces[job.name], scores[job.name], engines)
    job = jobs()[0]
    oracle.check_sensitivity(
        reference, job.prompt, answers[job.name].token_ids, traces[job.name], answers[job.name].logits, candidates=2
    )


def test_who_does_not_ask_is_served_as_ever(tiny: Tiny) -> None:
    """The tokens of stock vLLM, one request at a time; beside others that ask, and for both ways not to."""
    model, prompt = tiny("llama-gqa"), prompts((150, 170, 300), 512)
    with running(model, None, **TINY) as engine:
        stock = [generate(engine, [Job("stock", p, OUTPUTS)])["stock"].token_ids for p in prompt]
    config = CONFIG.model_copy(update={"compress": "asked"})
    with running(model, config, **TINY, enable_prefix_caching=True) as engine:
        mixed = [
            Job("silent", prompt[0], OUTPUTS),
            Job("off", prompt[1], OUTPUTS, own={"off": True}),
            Job("asks", prompt[2], OUTPUTS, own={"sinks": 4}),
        ]
        answers = generate(engine, mixed, logprobs=-1)
        traces = engine.take_traces()
        again = generate(engine, [Job("again", prompt[0], OUTPUTS)])["again"].token_ids
        (life,) = engine.take_traces()["again"].incarnations
    assert [answers[name].token_ids for name in ("silent", "off")] == stock[:2] and again == stock[0]
    assert life.prefix_hit == 128  # four whole blocks of 150 tokens, as vLLM has it
    evicted = {name: sum(1 for _ in oracle.victims_of(trace)) for name, trace in traces.items()}
    assert evicted == {"silent": 0, "off": 0, "asks": 300 - 63 + 23}
    answer = answers["asks"]
    oracle.check(oracle.load_reference(model), prompt[2], answer.token_ids, traces["asks"], answer.logits)
