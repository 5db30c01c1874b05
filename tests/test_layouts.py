"""The same tokens and the same block counts, however vLLM arranges processes and compiles the model."""

from pathlib import Path

import pytest
from engines import Job, block_counts, generate, prompts, running

from vtoken.config import VTokenConfig

BUDGETS = (64, 0.5, 48)
PROMPTS = prompts((300, 129, 64), 512)
JOBS = [Job(f"r{n}", PROMPTS[n], 40, budget=BUDGETS[n]) for n in range(3)]


def one_at_a_time(model: Path, **options: object) -> dict[str, tuple[list[int], list[int]]]:
    config = VTokenConfig(policy="streaming_llm", budget=64, sinks=4, recent=16, record_trace=True)
    with running(model, config, skip_tokenizer_init=True, **options) as engine:
        answers: dict[str, list[int]] = {}
        for job in JOBS:
            answers |= {name: answer.token_ids for name, answer in generate(engine, [job]).items()}
        traces = engine.take_traces()
    return {name: (tokens, block_counts(traces[name])) for name, tokens in answers.items()}


@pytest.fixture(scope="module")
def in_process(tiny_gqa: Path) -> dict[str, tuple[list[int], list[int]]]:
    return one_at_a_time(tiny_gqa)


def test_the_block_counts_are_what_the_budgets_say(in_process: dict) -> None:
    assert [in_process[job.name][1] for job in JOBS] == [[10] + [2] * 39, [5] + [3] * 39, [2] + [2] * 39]


def test_multiprocess(tiny_gqa: Path, in_process: dict) -> None:
    assert one_at_a_time(tiny_gqa, multiprocess=True) == in_process


@pytest.mark.slow
def test_compiled(tiny_gqa: Path, in_process: dict) -> None:
    assert one_at_a_time(tiny_gqa, enforce_eager=False) == in_process
