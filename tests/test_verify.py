"""`verify=True`: what a faulty relocation does to a request ends that request, and no other."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from engines import Answer, Job, generate, prompts, running
from oracle_runs import Tiny

from vtoken.config import VTokenConfig
from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import CopyEngine

OPTIONS: dict[str, dict[str, Any]] = {
    "fill": {"policy": "random"},
    "pack": {
        "policy": "random",
        "reclaim": "pack",
        "check_interval": 1,
        "theta_f": 0.0,
        "low_watermark": 1.0,
        "headroom": 0.1,
    },
}
JOBS = [Job(f"r{n}", prompt, 20) for n, prompt in enumerate(prompts((300, 50), 512))]  # r1 stays below the budget


class Engine:
    """A real engine and its inner parts, with every error that the worker reported."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        core = engine.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.worker = self.runner.vtoken
        self.errors: dict[str, str] = {}
        scheduler, names = core.scheduler.vtoken, engine._external_id
        stock = scheduler.settle

        def settle(plan: Any, report: Any) -> dict[str, str]:
            self.errors |= {names[req_id]: sentence for req_id, sentence in report.errors.items()}
            return stock(plan, report)

        scheduler.settle = settle


@contextmanager
def engine_with(tiny: Tiny, mode: str) -> Iterator[Engine]:
    config = VTokenConfig(budget=64, verify=True, **OPTIONS[mode])
    with running(tiny("llama-gqa"), config, skip_tokenizer_init=True) as engine:
        yield Engine(engine)


class Harmful(CopyEngine):
    """Does something else than was ordered, the first time that there is something to do."""

    def __init__(self, engine: Engine, harm: Callable[[Engine, Ints, Ints], tuple[Ints, Ints]]) -> None:
        self._engine, self._inner, self._harm, self.done = engine, engine.worker._copies, harm, False

    def launch(self, sources: Ints, destinations: Ints) -> None:
        if len(sources) > 2 and not self.done:
            self.done = True
            sources, destinations = self._harm(self._engine, sources, destinations)
        self._inner.launch(sources, destinations)

    def wait(self) -> None:
        self._inner.wait()

    def finish(self) -> None:
        self._inner.finish()


def swap_a_pair(engine: Engine, sources: Ints, destinations: Ints) -> tuple[Ints, Ints]:
    return sources, np.concatenate([destinations[1::-1], destinations[2:]])


def lose_one(engine: Engine, sources: Ints, destinations: Ints) -> tuple[Ints, Ints]:
    return sources[1:], destinations[1:]


def stop_halfway(engine: Engine, sources: Ints, destinations: Ints) -> tuple[Ints, Ints]:
    """The first layer only: the copy is made here, and undone in the others."""
    layers = [layer.kv_cache for layer in engine.runner.compilation_config.static_forward_context.values()]
    before = [cache.clone() for cache in layers[1:]]
    engine.worker._copies._inner.launch(sources, destinations)
    engine.worker._copies._inner.finish()
    for cache, old in zip(layers[1:], before, strict=True):
        cache.copy_(old)
    return sources[:0], destinations[:0]


@pytest.fixture(scope="module")
def intact(tiny: Tiny) -> Callable[[str], dict[str, Answer]]:
    """What each mode answers if nobody does any harm."""

    @functools.cache
    def answers(mode: str) -> dict[str, Answer]:
        with engine_with(tiny, mode) as engine:
            expected = generate(engine.engine, JOBS)
            assert not engine.errors and engine.engine.snapshot().tokens_moved > 20
        return expected

    return answers


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize(
    "harm, layer", [(swap_a_pair, 0), (lose_one, 0), (stop_halfway, 1)], ids=["swapped pair", "lost token", "half done"]
)
def test_a_faulty_copy_ends_its_request(tiny: Tiny, intact: Any, harm: Any, layer: int, mode: str) -> None:
    expected = intact(mode)
    with engine_with(tiny, mode) as engine:
        engine.worker._copies = Harmful(engine, harm)
        answers = generate(engine.engine, JOBS)
        assert engine.worker._copies.done
        assert engine.engine.snapshot().held_blocks == 0
    assert list(engine.errors) == ["r0"]
    assert "changed the K/V of token " in engine.errors["r0"] and f" in layer {layer}: slot " in engine.errors["r0"]
    assert answers["r1"].token_ids == expected["r1"].token_ids
    # What was computed before the copy stays; nothing that was computed from it is seen.
    assert answers["r0"].token_ids == expected["r0"].token_ids[: len(answers["r0"].token_ids)] != []
    assert len(answers["r0"].token_ids) < 3


def harmed_table(engine: Engine, harm: Callable[[Any, int], None]) -> None:
    reclamation, table, done = engine.worker._reclamation, engine.worker.table, []
    stock = reclamation.reclaim

    def reclaim(*args: Any) -> Any:
        reclaimed = stock(*args)
        if reclaimed.moved and not done:
            done.append(True)
            harm(table, int(table.rows([r for r in table.req_ids if engine.engine._external_id[r] == "r0"])[0]))
        return reclaimed

    reclamation.reclaim = reclaim


def forget_a_token(table: Any, row: int) -> None:
    """The counts, which the next step would find to be wrong, stay as they were."""
    token = int(table.logical_at[row, 3])
    table.physical_of[row, token] = table.logical_at[row, 3] = -1


def share_a_slot(table: Any, row: int) -> None:
    one, other = table.logical_at[row, 3:5].tolist()
    table.physical_of[row, other] = table.physical_of[row, one]


@pytest.mark.parametrize(
    "harm, complaint",
    [(forget_a_token, "I1: a relocation of request .* lost tokens"), (share_a_slot, "I2: token .* shares slot")],
)
def test_a_faulty_table_ends_its_request(tiny: Tiny, harm: Any, complaint: str) -> None:
    with engine_with(tiny, "fill") as engine:
        harmed_table(engine, harm)
        answers = generate(engine.engine, JOBS)
    assert list(engine.errors) == ["r0"]
    assert len(answers["r1"].token_ids) == 20
    import re

    assert re.search(complaint, engine.errors["r0"])


def test_a_request_that_is_over_is_not_accused(tiny: Tiny) -> None:
    """The first token, after which it is reduced, is its last one; its name is used again at once."""
    with engine_with(tiny, "fill") as engine:
        engine.worker._copies = Harmful(engine, lose_one)
        short = [Job("r0", JOBS[0].prompt, 1)]
        generate(engine.engine, short)
        assert engine.worker._copies.done
        again = generate(engine.engine, short)
    assert not engine.errors and len(again["r0"].token_ids) == 1
