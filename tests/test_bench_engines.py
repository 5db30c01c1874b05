"""Engines that live on in processes of their own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.bench import Bench, in_any_order
from vtoken.evaluation.bench.engines import EnginePool, EngineSpec
from vtoken.evaluation.bench.load import RUN_LOAD
from vtoken.evaluation.bench.requests import BenchRequests
from vtoken.evaluation.bench.serve import find

HERE = "test_bench_engines:"


class Stub:
    """Stands for an engine's process."""

    def __init__(self, spec: EngineSpec, settle: Callable[[], object]) -> None:
        self.spec, self.closed = spec, False

    def close(self) -> None:
        self.closed = True


def spec(copy: int = 0, vtoken: VTokenConfig | None = None, **engine_args: Any) -> EngineSpec:
    return EngineSpec("model", vtoken, engine_args, copy)


def test_equal_specs_share_an_engine_and_others_do_not() -> None:
    pool = EnginePool(Stub)  # type: ignore[arg-type]
    one = pool.get(spec(vtoken=VTokenConfig(), seed=0))
    assert pool.get(spec(vtoken=VTokenConfig(), seed=0)) is one
    others = [
        pool.get(other)
        for other in (spec(seed=0), spec(1, VTokenConfig(), seed=0), spec(vtoken=VTokenConfig(budget=0.5), seed=0))
    ]
    assert len({id(engine) for engine in [one, *others]}) == 4 == pool.started


def test_the_engine_used_longest_ago_is_ended() -> None:
    pool = EnginePool(Stub, most_alive=2)  # type: ignore[arg-type]
    first, second = pool.get(spec(1)), pool.get(spec(2))
    pool.get(spec(1))
    third = pool.get(spec(3))
    assert [engine.closed for engine in (first, second, third)] == [False, True, False]  # type: ignore[attr-defined]
    pool.close()
    assert first.closed and third.closed  # type: ignore[attr-defined]


def test_repeats_take_turns() -> None:
    bench = Bench(Path(), None, None, EnginePool(), Console(quiet=True), wanted_repeats=3)  # type: ignore[arg-type]
    turns = list(bench.interleaved("abc", "letters"))
    assert [repeat for repeat, _ in turns] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [sorted(letter for _, letter in turns[n : n + 3]) for n in (0, 3, 6)] == [["a", "b", "c"]] * 3
    bench.wanted_repeats = None
    assert len(list(bench.interleaved("ab", "letters"))) == 10
    bench.quick = True
    assert len(list(bench.interleaved("ab", "letters"))) == 4


def test_nobody_always_follows_the_same_one() -> None:
    orders = [in_any_order("abcdef", repeat) for repeat in range(5)]
    assert orders == [in_any_order("abcdef", repeat) for repeat in range(5)]
    followers = {
        letter: {order[n + 1] for order in orders for n in range(5) if order[n] == letter} for letter in "abcdef"
    }
    assert min(len(found) for found in followers.values()) > 1


def test_compiled_engines_are_counted() -> None:
    pool = EnginePool(Stub)  # type: ignore[arg-type]
    for copy, eager in enumerate((True, False, True)):
        pool.get(spec(copy, enforce_eager=eager))
    pool.get(spec(1, enforce_eager=False))
    assert (pool.started, pool.compiled) == (3, 1)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    with EnginePool() as engines:
        yield engines


def bench_on(model: Path, pool: EnginePool) -> Bench:
    from vtoken.evaluation.plan import load_model_description

    text_config, _ = load_model_description(model) if (model / "tokenizer.json").exists() else (_config(model), None)
    return Bench(model, text_config, BenchRequests(None, 512), pool, Console(quiet=True), quick=True)


def _config(model: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(model))


def test_tasks_run_on_one_engine_until_one_breaks(tiny: Callable[[str], Path], pool: EnginePool) -> None:
    bench = bench_on(tiny("llama-gqa"), pool)
    config = VTokenConfig(policy="streaming_llm", budget=64, request_policies={"random": {}})
    arguments = {"num_blocks": 24, "max_model_len": 256, "skip_tokenizer_init": True}
    engine = bench.engine(config, **arguments)
    assert (engine.num_blocks, engine.block_size) == (24, 32)
    work = {"request_id": "r", "prompt_token_ids": list(range(100)), "max_tokens": 4}
    own = {**work, "request_id": "s", "extra_args": {"vtoken.budget": 80, "vtoken.policy": "random"}}
    told = engine.do(RUN_LOAD, workloads=[work, own], concurrency=1)
    # 100 tokens down to 63 and 79, then one for each of the three that follow.
    assert told["tokens_evicted"] == (37 + 3) + (21 + 3)
    again = bench.engine(config, **arguments)
    assert again is engine and again.do(RUN_LOAD, workloads=[work])["tokens_evicted"] == 40
    with pytest.raises(RuntimeError, match="exit code 1"):
        engine.do(HERE + "no_such_task")


def test_what_an_engine_refuses_is_one_sentence(tiny: Callable[[str], Path], pool: EnginePool) -> None:
    with pytest.raises(ValueError, match=r"^vtoken: .*no_such_policy"):
        bench_on(tiny("llama-gqa"), pool).engine(
            VTokenConfig(policy="no_such_policy"), skip_tokenizer_init=True
        ).ready()


def test_a_name_of_a_task_is_a_function() -> None:
    assert find("os:getpid") is os.getpid
    with pytest.raises(AttributeError):
        find("os:no_such_function")


def test_no_process_is_left(tiny: Callable[[str], Path]) -> None:
    with EnginePool() as engines:
        engine = bench_on(tiny("llama-gqa"), engines).engine(
            None, num_blocks=8, max_model_len=64, skip_tokenizer_init=True
        )
        process = engine._process
        assert engine.num_blocks == 8 and process.is_alive()
    assert not process.is_alive() and process.exitcode == 0
