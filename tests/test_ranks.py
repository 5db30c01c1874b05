"""A model on two tensor-parallel ranks evicts what it evicts on one, and no rank is right alone."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
from engines import Answer, Job, generate, prompts, running
from programs import run_program
from tiny_models import tiny_model

from vtoken.config import VTokenConfig
from vtoken.core.trace import Trace
from vtoken.vllm_plugin import layers
from vtoken.vllm_plugin.engine import Engine
from vtoken.vllm_plugin.worker import EvictionWorker, Start

EVERYTHING = bool(os.environ.get("VTOKEN_TEST_EVERYTHING"))
TOLERANCE = 1e-3
OPTIONS = {"budget": 64, "verify": True}
PACK = {"reclaim": "pack", "check_interval": 1, "theta_f": 0.0, "low_watermark": 1.0, "headroom": 0.1}
CACHING = {"enable_prefix_caching": True}
TIGHT = {"max_model_len": 384, "num_gpu_blocks_override": 16}
# Number of KV heads, vtoken's options (None: native) and vLLM's.
CASES: dict[str, tuple[int, dict[str, Any] | None, dict[str, Any]]] = {
    "native": (4, None, {}),
    "streaming_llm": (4, {"policy": "streaming_llm"}, {}),
    "h2o, shared blocks, one KV head": (1, {"policy": "h2o"}, CACHING),
    "snapkv, pack": (4, {"policy": "snapkv", **PACK}, {}),
    "key_norm, none, one KV head, a small pool": (1, {"policy": "key_norm", "reclaim": "none"}, TIGHT),
}
if EVERYTHING:
    CASES |= {
        f"{policy}, {reclaim}, {heads} KV heads, caching {bool(args)}": (heads, {"policy": policy, **options}, args)
        for policy in ("streaming_llm", "h2o", "snapkv", "key_norm", "tova", "scissorhands")
        for reclaim, options in {"fill": {}, "pack": PACK, "none": {"reclaim": "none"}}.items()
        for heads in (4, 2, 1)
        for args in ({}, CACHING)
    }
ENGINE_ARGS = {"skip_tokenizer_init": True, "max_num_batched_tokens": 96}


def jobs() -> list[Job]:
    """Four requests, the last of which begins as the first one does."""
    given = prompts((300, 77, 129, 40), 512)
    given[3] = given[0][:96] + given[3]
    return [Job(f"r{n}", prompt, 20) for n, prompt in enumerate(given)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of KV heads: random Llamas with four query heads."""
    counts = sorted({heads for heads, _, _ in CASES.values()})
    return {n: tiny_model(tmp_path_factory.mktemp(f"heads{n}"), num_heads=4, num_kv_heads=n) for n in counts}


def on_one_rank(model: Path, options: dict[str, Any] | None, engine_args: dict[str, Any]) -> tuple[Any, Any]:
    config = None if options is None else VTokenConfig(record_trace=True, **OPTIONS, **options)
    with running(model, config, **ENGINE_ARGS, **engine_args) as engine:
        answers = generate(engine, jobs(), logprobs=-1)
        return answers, engine.take_traces() if config else {}


def difference(here: list[dict[int, float]], there: list[dict[int, float]]) -> float:
    """The largest between any two logits of the same output token and vocabulary entry."""
    assert len(here) == len(there)
    return max(abs(a[token] - b[token]) for a, b in zip(here, there, strict=True) for token in a)


def plain(logits: list[dict[str, float]]) -> list[dict[int, float]]:
    return [{int(token): value for token, value in row.items()} for row in logits]


def asked(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "jobs": [[job.name, job.prompt, job.max_tokens] for job in jobs()], **more}


def test_two_ranks_do_what_one_does(models: dict[int, Path]) -> None:
    """Victims, tokens and, as far as the model itself allows, logits; the dense replay agrees as well."""
    wanted = [
        asked(
            models[heads],
            vtoken=None if options is None else OPTIONS | options,
            engine_args=ENGINE_ARGS | engine_args,
            logprobs=-1,
        )
        for heads, options, engine_args in CASES.values()
    ]
    groups = sorted({4 // 2 // max(heads // 2, 1) for heads, _, _ in CASES.values()})  # of a rank
    rounds = run_program("two_ranks.py", [groups, wanted])
    apart: dict[str, float] = {}
    for (case, (heads, options, engine_args)), (got,) in zip(CASES.items(), rounds, strict=True):
        alone, traces = on_one_rank(models[heads], options, engine_args)
        logits = {name: plain(rows) for name, rows in got["logits"].items()}
        assert got["tokens"] == {name: answer.token_ids for name, answer in alone.items()}, case
        apart[case] = max(difference(logits[name], answer.logits) for name, answer in alone.items())
        assert not got["errors"]
        if options is None:
            continue
        first, second = ({name: Trace.from_dict(trace) for name, trace in each.items()} for each in got["traces"])
        assert first == second == traces, case
        assert sum(len(victims) for life in first["r3"].incarnations for victims in life.victims) > 80
        if engine_args is CACHING:
            assert first["r3"].incarnations[0].prefix_hit >= 32
        if options.get("reclaim") != "none":
            assert got["moved"] > 20
        reference = oracle.load_reference(models[heads])
        for job in jobs():
            answer = Answer(got["tokens"][job.name], logits[job.name])
            oracle.check(reference, job.prompt, answer.token_ids, first[job.name], answer.logits, atol=TOLERANCE)
    assert max(apart.values()) <= TOLERANCE
    assert max(apart.values()) <= max(10 * apart["native"], 1e-4)


# What is done to rank 1: whom it hurts, and what is said of the first of them.
HARMS = {
    "other_victim": (["r0"], "vtoken: the ranks of the model do not agree about request "),
    "failed_copy": (["r0", "r1"], "since a copy of its tokens to other slots failed (OSError('no such memory'))."),
    "swapped_copy": (["r0"], "vtoken: I1: a relocation of request "),
    "other_epoch": (["r0"], "tokens, 2 blocks and epoch 3, but the worker holds "),
}


def test_what_is_wrong_on_one_rank_ends_its_requests_alone(models: dict[int, Path]) -> None:
    """Before their end no token is wrong, and the other requests are as ever.

    Without ``verify`` another victim goes unseen, and the comparison with one rank sees it.
    """
    verified = asked(
        models[4],
        vtoken={"policy": "random", **OPTIONS},
        engine_args=ENGINE_ARGS,
        rounds=[None, *HARMS, None, "exception"],
    )
    blind = {**verified, "vtoken": {"policy": "random", "budget": 64}, "rounds": [None, "other_victim"], "logprobs": -1}
    (intact, *harmed, again, broken), (right, wrong) = run_program("two_ranks.py", [[], [verified, blind]])
    expected = intact["tokens"]
    assert not intact["errors"] and again["tokens"] == expected and not again["errors"]
    for (harm, (hurt, sentence)), got in zip(HARMS.items(), harmed, strict=True):
        assert sorted(got["errors"]) == hurt and sentence in got["errors"][hurt[0]], harm
        for name, tokens in got["tokens"].items():
            assert tokens == expected[name][: len(tokens)], harm
            assert (len(tokens) < 20) == (name in hurt), harm
        if harm != "other_victim":
            assert got["traces"][0] == got["traces"][1], harm
    assert "vtoken: rank 1 of the model failed in the step before" in broken["failure"]

    assert not right["errors"] and not wrong["errors"]
    assert right["traces"][0] == right["traces"][1] and wrong["traces"][0] != wrong["traces"][1]
    off = [difference(plain(right["logits"][n])[:8], plain(wrong["logits"][n])[:8]) for n in expected]
    assert max(off) > 10 * TOLERANCE


def test_rows_do_not_depend_on_the_order_of_a_set() -> None:
    """Ids of requests that are over come as a set, whose order differs from process to process."""

    def rows(ended: tuple[str, ...]) -> dict[str, int]:
        worker = EvictionWorker(VTokenConfig(policy="streaming_llm"), 16, copies=None)
        for step, over, new in ((1, (), "abc"), (2, ended, "defg")):
            worker.begin_step(SimpleNamespace(step=step), over, {name: Start([1]) for name in new})
        return {name: int(worker.table.find_rows([name])[0]) for name in worker.table.req_ids}

    assert rows(("a", "c", "b")) == rows(("c", "b", "a"))


@pytest.mark.parametrize("heads, held, norm", [(4, 2, 3.0), (2, 1, 3.0), (1, 1, 1.5)])
def test_a_kv_head_that_several_ranks_hold_counts_once(
    monkeypatch: pytest.MonkeyPatch, heads: int, held: int, norm: float
) -> None:
    monkeypatch.setattr(layers.key_norms, "KeyNorms", lambda *of: lambda slots: np.full(len(slots), 3, np.float32))
    config = SimpleNamespace(model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads))
    spec, two = SimpleNamespace(num_kv_heads=held, head_size=8), SimpleNamespace(size=2)
    assert layers._key_norms(config, None, None, spec, two)(np.arange(3)).tolist() == [norm] * 3


def test_traces_that_differ_between_ranks_are_none() -> None:
    said: list[Any] = [{"r": {"incarnations": []}}, {"r": {"incarnations": []}}]
    cache = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
    engine = Engine(SimpleNamespace(vllm_config=cache, collective_rpc=lambda method: said), {})
    assert engine.take_traces() == {"r": Trace()}
    said[1] = {}
    with pytest.raises(RuntimeError, match="the ranks of the model have evicted different tokens"):
        engine.take_traces()
