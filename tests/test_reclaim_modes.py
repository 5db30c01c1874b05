"""Naive eviction and packing on the real engine: masked attention reads exactly the live tokens, wherever they lie."""

import os
from pathlib import Path
from typing import Any

import oracle
import pytest
from engines import block_counts, generate, running
from oracle_runs import OUTPUTS, TINY, Tiny, check, run, settings, tiny_jobs
from victim_oracle import SCORES

from vtoken.core.trace import Trace

S = 32
EVERYTHING = bool(os.environ.get("VTOKEN_TEST_EVERYTHING"))
EAGER_PACKING = {"reclaim": "pack", "check_interval": 1, "theta_f": 0.0, "low_watermark": 1.0, "headroom": 0.1}
MODES: dict[str, dict[str, Any]] = {"none": {"reclaim": "none"}, "pack": EAGER_PACKING}


def naive_block_counts(trace: Trace) -> list[int]:
    """Blocks at each forward if tokens are appended, and a full block goes once all of its tokens are dead."""
    (life,) = trace.incarnations
    blocks: list[set[int]] = []
    counts, length, room = [], 0, 0
    for new, victims in zip(life.new_tokens, life.victims, strict=True):
        for token in range(length, length + new):
            if room == 0:
                blocks.append(set())
                room = S
            blocks[-1].add(token)
            room -= 1
        length += new
        counts.append(len(blocks))
        blocks = [block - set(victims) for block in blocks]
        last = [blocks.pop()] if room else []
        blocks = [block for block in blocks if block] + last
    return counts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name, policy",
    [
        ("llama-gqa", "streaming_llm"),
        ("llama-gqa", "random"),
        ("llama-gqa", "h2o"),
        ("llama-gqa", "scissorhands"),
        ("llama-mha", "h2o"),
        ("llama-mqa", "tova"),
        ("qwen3", "key_norm"),
    ],
)
def test_both_oracles_agree(tiny: Tiny, name: str, policy: str, mode: str) -> None:
    jobs = tiny_jobs()
    answers, traces = run(tiny(name), jobs, -1, engine_args=TINY, policy=policy, **MODES[mode])
    compared = check(oracle.load_reference(tiny(name)), jobs, answers, traces, SCORES[policy])
    assert compared == sum(len(job.prompt) - 63 + OUTPUTS - 1 for job in jobs)
    for trace in traces.values():
        if mode == "none":
            assert block_counts(trace) == naive_block_counts(trace)
        else:
            held, naive = block_counts(trace), naive_block_counts(trace)
            assert max(held[-OUTPUTS // 2 :]) <= 3 and all(h <= n for h, n in zip(held, naive, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "scissorhands", "streaming_llm"])
def test_prompts_that_go_on_behind_holes(tiny: Tiny, policy: str, mode: str) -> None:
    jobs = tiny_jobs()
    chunks = {"prefill_evict": "chunked", "prefill_chunk": 40}
    answers, traces = run(tiny("llama-gqa"), jobs, -1, engine_args=TINY, policy=policy, **chunks, **MODES[mode])
    assert check(oracle.load_reference(tiny("llama-gqa")), jobs, answers, traces, SCORES[policy], chunk=40) > 0


def test_layers_that_do_not_count_are_masked_too(tiny: Tiny) -> None:
    jobs = tiny_jobs()
    answers, traces = run(
        tiny("llama-gqa"), jobs, -1, engine_args=TINY, policy="h2o", score_layers=[1], **MODES["none"]
    )
    reference = oracle.load_reference(tiny("llama-gqa"))
    for job in jobs:
        oracle.check(reference, job.prompt, answers[job.name].token_ids, traces[job.name], answers[job.name].logits)


@pytest.mark.parametrize("copies", ["async", "inline", "force_sync"])
def test_every_way_of_copying(tiny: Tiny, copies: str) -> None:
    """Random victims leave holes everywhere, so that packing never has nothing to do."""
    jobs, reference = tiny_jobs(), oracle.load_reference(tiny("llama-gqa"))
    with running(
        tiny("llama-gqa"), settings(policy="random", copies=copies, verify=True, **EAGER_PACKING), **TINY
    ) as engine:
        answers, traces = generate(engine, jobs, logprobs=-1), engine.take_traces()
        snapshot = engine.snapshot()
    assert snapshot.tokens_moved > 100 and snapshot.held_blocks == 0
    assert check(reference, jobs, answers, traces, SCORES["random"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_compiled(tiny: Tiny, mode: str) -> None:
    if mode == "none" and not EVERYTHING:  # the same attention, and what packing moves has been through it
        pytest.skip("runs with VTOKEN_TEST_EVERYTHING=1")
    jobs = tiny_jobs()
    compiled = TINY | {"enforce_eager": False}
    answers, traces = run(tiny("llama-gqa"), jobs, -1, engine_args=compiled, policy="h2o", **MODES[mode])
    assert check(oracle.load_reference(tiny("llama-gqa")), jobs, answers, traces, SCORES["h2o"]) > 0


def test_a_mask_that_hides_one_token_too_few_shows(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a dead token that is attended once more."""
    from vtoken.kernels.cpu.observer import AttentionObserver

    stock = AttentionObserver.begin

    def begin(self: Any, queries: Any, block_table: Any) -> None:
        for row in queries.live:
            row[(~row).nonzero()[0][:1]] = True
        stock(self, queries, block_table)

    monkeypatch.setattr(AttentionObserver, "begin", begin)
    jobs = tiny_jobs()
    answers, traces = run(tiny("llama-gqa"), jobs, -1, engine_args=TINY, policy="random", **MODES["none"])
    with pytest.raises(AssertionError, match="logits differ"):
        check(oracle.load_reference(tiny("llama-gqa")), jobs, answers, traces, SCORES["random"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_real_model(smollm2: Path, mode: str) -> None:
    from engines import Job, prompts

    jobs = [Job(f"r{n}", prompt, OUTPUTS) for n, prompt in enumerate(prompts((240, 133), 40000))]
    answers, traces = run(smollm2, jobs, 20, policy="h2o", budget=96, **MODES[mode])
    compared = check(oracle.load_reference(smollm2), jobs, answers, traces, SCORES["h2o"])
    assert compared == 240 + 133 - 2 * 95 + 2 * (OUTPUTS - 1)
