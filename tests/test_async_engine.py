"""A real model under vLLM's asynchronous scheduling: the same tokens, and what the victims imply."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from async_engine import running_late
from engines import Job, generate, running

from vtoken.config import VTokenConfig

Tiny = Callable[[str], Path]
VOCAB = 512
ENGINE: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": True, "max_num_batched_tokens": 96}
OUTPUTS = 24
more = pytest.mark.skipif(not os.environ.get("VTOKEN_TEST_EVERYTHING"), reason="runs with VTOKEN_TEST_EVERYTHING=1")


def jobs() -> list[Job]:
    """Prompts that share beginnings, with budgets that they outgrow, and one that does not."""
    rng = np.random.default_rng(11)
    trunk = rng.integers(3, VOCAB, 160).tolist()
    lengths, budgets = [(160, 40), (128, 7), (64, 90), (0, 150), (160, 20)], [64, 48, 64, 0.4, 10_000]
    return [
        Job(f"r{n}", trunk[:shared] + rng.integers(3, VOCAB, own).tolist(), OUTPUTS, budget)
        for n, ((shared, own), budget) in enumerate(zip(lengths, budgets, strict=True))
    ]


def settings(**options: Any) -> VTokenConfig:
    return VTokenConfig(**{"policy": "streaming_llm", "sinks": 4, "recent": 16, "record_trace": True, **options})


def lags(engine: Any) -> list[int]:
    """From now on, how many steps were under way whenever one was scheduled."""
    counts: list[int] = []
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts.append(len(scheduler.vtoken._under_way))
        return schedule(*args, **kwargs)

    scheduler.schedule = counted
    return counts


def one_by_one(engine: Any) -> tuple[list[list[int]], list[int]]:
    answers = [generate(engine, [job])[job.name].token_ids for job in jobs()]
    traces = engine.take_traces()
    return answers, [traces[job.name].incarnations[0].prefix_hit for job in jobs()]


@pytest.mark.parametrize(
    "options", [{"policy": "h2o"}, pytest.param({"reclaim": "none", "interval": 3}, marks=more)], ids=["fill", "none"]
)
def test_one_request_at_a_time_says_the_same(tiny: Tiny, options: dict[str, Any]) -> None:
    with running(tiny("llama-gqa"), settings(**options), **ENGINE) as engine:
        answers, hits = one_by_one(engine)
    assert sum(hits) > 0 and all(len(answer) == OUTPUTS for answer in answers)
    with running_late(tiny("llama-gqa"), settings(**options), **ENGINE) as engine:
        counts = lags(engine)
        assert one_by_one(engine) == (answers, hits)
    assert counts.count(1) > OUTPUTS * (len(answers) - 1)


PACK = {"reclaim": "pack", "theta_f": 0.05, "low_watermark": 1.0, "check_interval": 1, "headroom": 0.05}


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "h2o", "prefill_evict": "chunked", "prefill_chunk": 40},
        pytest.param({}, marks=more),
        pytest.param({"policy": "tova", "interval": 4, **PACK}, marks=more),
    ],
    ids=["chunked", "fill", "pack"],
)
def test_a_mixed_batch_is_what_its_victims_imply(tiny: Tiny, options: dict[str, Any]) -> None:
    with running_late(tiny("llama-gqa"), settings(**options), **ENGINE) as engine:
        counts = lags(engine)
        generate(engine, [Job("first", jobs()[0].prompt, 2, 10_000)])
        answers, traces = generate(engine, jobs(), logprobs=-1), engine.take_traces()
        stats = engine.llm_engine.engine_core.engine_core.scheduler.vtoken.stats
    assert counts.count(1) > OUTPUTS and stats.tokens_evicted > 0 and stats.blocks_reclaimed > 0
    model = oracle.load_reference(tiny("llama-gqa"))
    for job in jobs():
        answer, trace = answers[job.name], traces[job.name]
        oracle.check(model, job.prompt, answer.token_ids, trace, answer.logits, allow_none=job.budget == 10_000)
    assert sum(traces[job.name].incarnations[0].prefix_hit for job in jobs()) > 0
    longest = jobs()[0]
    answer, trace = answers[longest.name], traces[longest.name]
    refusals = oracle.check_sensitivity(model, longest.prompt, answer.token_ids, trace, answer.logits)
    assert len(refusals) == 2
