"""Every policy on the real engine: the logits are those of its victims, and the victims are those of its formula."""

import os
from pathlib import Path
from typing import Any

import oracle
import pytest
from engines import Job, generate, prompts, running
from oracle_runs import OUTPUTS, TINY, Tiny, check, run, settings, tiny_jobs
from victim_oracle import SCORES, h2o_fading, h2o_sum

MODELS = ["llama-gqa", "llama-mha", "llama-mqa", "qwen2", "qwen3"]


@pytest.mark.parametrize("policy", SCORES)
@pytest.mark.parametrize("name", MODELS)
def test_tiny_models(tiny: Tiny, name: str, policy: str) -> None:
    jobs = tiny_jobs()
    answers, traces = run(tiny(name), jobs, -1, engine_args=TINY, policy=policy)
    reference = oracle.load_reference(tiny(name))
    compared = check(reference, jobs, answers, traces, SCORES[policy])
    assert compared == sum(len(job.prompt) - 63 + OUTPUTS - 1 for job in jobs)
    if name == "llama-gqa":
        oracle.check_sensitivity(reference, jobs[0].prompt, answers["r0"].token_ids, traces["r0"], answers["r0"].logits)


EVERYTHING = bool(os.environ.get("VTOKEN_TEST_EVERYTHING"))  # half an hour more: all policies on all models, compiled
COMPILED = [("llama-gqa", "h2o"), ("llama-gqa", "key_norm"), ("qwen3", "h2o")]


@pytest.mark.slow
@pytest.mark.parametrize("policy", SCORES)
@pytest.mark.parametrize("name", MODELS)
def test_compiled(tiny: Tiny, name: str, policy: str) -> None:
    if not (EVERYTHING or (name, policy) in COMPILED):
        pytest.skip("runs with VTOKEN_TEST_EVERYTHING=1")
    jobs = tiny_jobs()
    answers, traces = run(tiny(name), jobs, -1, engine_args=TINY | {"enforce_eager": False}, policy=policy)
    assert check(oracle.load_reference(tiny(name)), jobs, answers, traces, SCORES[policy]) > 0


@pytest.mark.parametrize(
    "options, score",
    [
        ({"policy": "h2o", "policy_options": {"average": False}}, h2o_sum),
        ({"policy": "h2o", "policy_options": {"decay": 0.9}}, h2o_fading),
        ({"policy": "h2o", "interval": 5, "budget": 70}, SCORES["h2o"]),
        ({"policy": "tova", "interval": 7, "budget": 70}, SCORES["tova"]),
    ],
    ids=["sum", "fading", "interval", "tova interval"],
)
def test_options(tiny: Tiny, options: dict, score: Any) -> None:
    jobs = tiny_jobs()
    answers, traces = run(tiny("llama-gqa"), jobs, -1, engine_args=TINY, **options)
    assert check(oracle.load_reference(tiny("llama-gqa")), jobs, answers, traces, score) > 0


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "scissorhands", "key_norm"])
def test_prompts_reduced_in_chunks(tiny: Tiny, policy: str) -> None:
    jobs = tiny_jobs()
    chunks = {"prefill_evict": "chunked", "prefill_chunk": 40, "policy": policy}
    answers, traces = run(tiny("llama-gqa"), jobs, -1, engine_args=TINY, **chunks)
    assert max(traces["r0"].incarnations[0].num_blocks) == -(-(63 + 40) // 32)
    assert check(oracle.load_reference(tiny("llama-gqa")), jobs, answers, traces, SCORES[policy], chunk=40) > 0
    with running(tiny("llama-gqa"), settings(**chunks), skip_tokenizer_init=True) as engine:
        for job in jobs:  # alone, and in parts of other sizes: the same tokens
            assert generate(engine, [job])[job.name].token_ids == answers[job.name].token_ids


def test_another_policys_victims_are_refused(tiny: Tiny) -> None:
    jobs = tiny_jobs()
    reference = oracle.load_reference(tiny("llama-gqa"))
    for policy in ("h2o", "snapkv", "scissorhands"):
        answers, traces = run(tiny("llama-gqa"), jobs, -1, engine_args=TINY, policy=policy)
        for other in SCORES.keys() - {policy}:
            with pytest.raises(AssertionError, match="was taken, and"):
                check(reference, jobs, answers, traces, SCORES[other])


@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize("policy", SCORES)
def test_the_real_model(smollm2: Path, policy: str, eager: bool) -> None:
    if not (EVERYTHING or (eager and policy == "h2o")):
        pytest.skip("runs with VTOKEN_TEST_EVERYTHING=1")
    jobs = [Job(f"r{n}", prompt, OUTPUTS) for n, prompt in enumerate(prompts((240, 133), 40000))]
    answers, traces = run(smollm2, jobs, 20, policy=policy, budget=96, engine_args={"enforce_eager": eager})
    reference = oracle.load_reference(smollm2)
    assert check(reference, jobs, answers, traces, SCORES[policy]) == 240 + 133 - 2 * 95 + 2 * (OUTPUTS - 1)
    oracle.check_sensitivity(
        reference, jobs[1].prompt, answers["r1"].token_ids, traces["r1"], answers["r1"].logits, candidates=3
    )
