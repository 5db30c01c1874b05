"""The three ways of reclaiming compute the same from the same victims, and the comparison could have said otherwise."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import ENGINE_ARGS, prompts
from oracle_runs import Tiny

from vtoken.config import VTokenConfig
from vtoken.core.token_scores import prompt_hash
from vtoken.core.trace import Incarnation, Trace
from vtoken.evaluation.agreement import ModeRun, compare, compare_texts, replaying, run_mode
from vtoken.evaluation.prompt_file import read_prompt_file
from vtoken.evaluation.questions import data_directory
from vtoken.evaluation.recorded_victims import RecordedVictims, write_victims
from vtoken.evaluation.workloads import Workload, load_tokenizer
from vtoken.policies import PolicyBatch

WORKS = [Workload(f"r{n}", prompt, 40) for n, prompt in enumerate(prompts((220, 90, 130), 512))]
ARGS = {**ENGINE_ARGS, "skip_tokenizer_init": True, "max_num_seqs": 2}
PACKING = {"reclaim": "pack", "low_watermark": 1.0, "check_interval": 1, "theta_f": 0.0, "headroom": 0.1}


def config(**options: Any) -> VTokenConfig:
    return VTokenConfig(**{"budget": 64, **options})


@pytest.fixture(scope="module", params=["h2o", "random", "streaming_llm"])
def recorded(tiny: Tiny, request: pytest.FixtureRequest) -> ModeRun:
    return run_mode(tiny("llama-gqa"), config(policy=request.param), WORKS, ARGS)


@pytest.mark.parametrize("options", [{"reclaim": "none"}, PACKING], ids=["none", "pack"])
def test_replayed_victims_give_the_same_logits(
    tiny: Tiny, tmp_path: Path, recorded: ModeRun, options: dict[str, Any]
) -> None:
    given = {req_id: run.token_ids for req_id, run in recorded.runs.items()}
    again = config(**{**replaying(recorded.config, recorded, WORKS, tmp_path / "v.json").model_dump(), **options})
    other = run_mode(tiny("llama-gqa"), again, WORKS, ARGS, given)
    agreement = compare(recorded, other)
    assert agreement.outputs == 120 and agreement.requests == 3
    assert agreement.holds(1e-3), agreement
    assert other.tokens_evicted == recorded.tokens_evicted == sum(len(w.prompt_token_ids) - 63 + 39 for w in WORKS)
    assert (other.tokens_moved > 0) == (options["reclaim"] == "pack")

    # Controls: a logit that is off, and another token that is likeliest by more than a rounding error.
    run = other.runs["r1"]
    token = max(run.logits[5], key=run.logits[5].__getitem__)
    for change in (0.01, -5.0):
        logits = [dict(row) for row in run.logits]
        logits[5][token] += change
        wrong = compare(recorded, replace(other, runs={**other.runs, "r1": replace(run, logits=logits)}))
        assert not wrong.holds(1e-3)
    assert wrong.other_choices == agreement.other_choices + 1 and wrong.widest_tie > 1e-3


@pytest.mark.slow
def test_chat_prompts_on_the_real_model(smollm2: Path, tmp_path: Path) -> None:
    directory = data_directory()
    if directory is None:
        pytest.skip("there are no workloads: VTOKEN_DATA names no directory with chat.jsonl")
    works = read_prompt_file(directory / "chat.jsonl", load_tokenizer(smollm2), 10**9, 24, limit=12)
    works = [Workload(w.request_id, w.prompt_token_ids, 24) for w in works if 150 < len(w.prompt_token_ids) < 700][:2]
    recorded = run_mode(smollm2, config(policy="h2o", budget=0.5), works, ENGINE_ARGS)
    given = {req_id: run.token_ids for req_id, run in recorded.runs.items()}
    again = replaying(recorded.config, recorded, works, tmp_path / "v.json")
    for options in ({"reclaim": "none"}, PACKING):
        other = run_mode(smollm2, config(**{**again.model_dump(), **options}), works, ENGINE_ARGS, given)
        agreement = compare(recorded, other)
        assert (agreement.requests, agreement.outputs) == (2, 48) and agreement.holds(1e-3), agreement


def test_runs_with_other_victims_are_not_compared(tiny: Tiny) -> None:
    one, two = (run_mode(tiny("llama-gqa"), config(policy=p), WORKS[:1], ARGS) for p in ("random", "streaming_llm"))
    with pytest.raises(RuntimeError, match="other victims or outputs"):
        compare(one, two)


def batch(prompt: list[int], tokens: list[int], length: int) -> PolicyBatch:
    ints = np.array(tokens, dtype=np.int64)
    one = np.array([0])
    return PolicyBatch(np, ints, one + len(tokens), one + length, one + prompt_hash(prompt), np.zeros(len(tokens)))


def test_recorded_victims_have_the_lowest_priority(tmp_path: Path) -> None:
    file = tmp_path / "victims.json"
    write_victims(file, [([7, 8, 9], Trace([Incarnation(0, [2, 1, 1], [[], [1], [0, 2]], [])]))])
    policy = RecordedVictims(str(file))
    assert policy.priority(batch([7, 8, 9], [2, 0, 1], 3)).tolist() == [1, 1, 0]
    assert policy.priority(batch([7, 8, 9], [2, 0, 3], 4)).tolist() == [0, 0, 1]
    for prompt, length in (([7, 8, 9], 2), ([7, 8], 3)):
        with pytest.raises(ValueError, match=f"holds no eviction at {length} tokens for this prompt"):
            policy.priority(batch(prompt, [0, 1], length))


def test_a_preempted_request_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="preempted"):
        write_victims(tmp_path / "v.json", [([1], Trace([Incarnation(), Incarnation()]))])


def test_texts_are_compared() -> None:
    found = compare_texts(["a b c d", "x y"], ["a b c d", "x z"], [(4, 4), (2, 3)])
    assert (found.requests, found.identical, found.rouge_l, found.median_length_ratio) == (2, 1, 0.75, 1.25)


def test_equal_prompts_with_other_victims_are_not_recorded(tmp_path: Path) -> None:
    one, two = (Trace([Incarnation(0, [3], [[victim]], [])]) for victim in (0, 1))
    write_victims(tmp_path / "v.json", [([1, 2, 3], one), ([1, 2, 3], one)])
    with pytest.raises(ValueError, match="same prompt forgot different tokens"):
        write_victims(tmp_path / "v.json", [([1, 2, 3], one), ([1, 2, 3], two)])


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    for victim in (0, 1):
        write_victims(file, [([1, 2, 3], Trace([Incarnation(0, [3], [[victim]], [])]))])
        os.utime(file, ns=(victim, victim))
        assert RecordedVictims(str(file)).priority(batch([1, 2, 3], [0, 1, 2], 3)).tolist().index(0) == victim
