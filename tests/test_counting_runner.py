"""The counting runner reports what our worker does: the same blocks to the same requests, step by step."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin import SimulatedStep, make_simulated_engine
from vtoken.vllm_plugin.counting_runner import CountingRunner, counts_suffice

SIZES = {"block_size": 4, "max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 48}
Seen = tuple[SimulatedStep, int, dict[str, list[int]]]


def config(reclaim: str, **options: Any) -> VTokenConfig:
    return VTokenConfig(**{"policy": "random", "budget": 0.4, "sinks": 1, "recent": 3, "reclaim": reclaim} | options)


def drive(engine: Any, requests: list[tuple[list[int], int]], pause: int) -> list[Seen]:
    """Requests that arrive one after another; each step, the blocks held, and who holds which after it."""
    seen: list[Seen] = []

    def step() -> None:
        found = engine.step()
        names = [request.request_id for request in engine.scheduler.running]
        seen.append((found, engine.held_blocks, {name: engine.blocks_of(name) for name in names}))

    for n, (prompt, outputs) in enumerate(requests):
        engine.add_request(f"r{n}", prompt, outputs)
        for _ in range(pause):
            step()
    while engine.has_unfinished():
        step()
    return seen


def both(vtoken: VTokenConfig, requests: list[tuple[list[int], int]], pause: int, **sizes: Any) -> list[list[Seen]]:
    engines = [make_simulated_engine(vtoken, counting=counting, **SIZES, **sizes) for counting in (False, True)]
    assert [type(engine.runner) is CountingRunner for engine in engines] == [False, True]
    return [drive(engine, requests, pause) for engine in engines]


def prompts(lengths: list[int], shared: int = 0) -> list[tuple[list[int], int]]:
    return [([*range(shared), *range(1000 * n, 1000 * n + length)], 20 + 7 * n) for n, length in enumerate(lengths, 1)]


@pytest.mark.parametrize("caching", [False, True], ids=["", "caching"])
@pytest.mark.parametrize("reclaim", ["fill", "none"])
def test_the_same_blocks_after_every_step(reclaim: str, caching: bool) -> None:
    requests = prompts([50, 30, 41, 70, 22], shared=24)
    sizes = {"num_blocks": 60, "enable_prefix_caching": caching, "pause": 0}
    real, counted = both(config(reclaim, shared_blocks="keep"), requests, **sizes)
    assert counted == real
    # Whoever is preempted, for want of blocks in "none", finds some of its own when it comes back.
    assert sum(sum(step.begun.values()) for step, *_ in real) == ({"fill": 96, "none": 104}[reclaim] if caching else 0)
    other, _ = both(config(reclaim, shared_blocks="keep", policy_options={"seed": 1}), requests, **sizes)
    assert (other != real) == (reclaim == "none" or caching)  # it can tell where it matters who dies


_PROMPT = st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 40))
_OPTIONS = st.fixed_dictionaries(
    {
        "reclaim": st.sampled_from(["fill", "none"]),
        "policy": st.sampled_from(["random", "streaming_llm"]),
        "budget": st.sampled_from([0.2, 0.6, 16, 40]),
        "interval": st.sampled_from([1, 3]),
        "grace": st.sampled_from([0, 6]),
        "protect_prefix": st.sampled_from([0, 5]),
        "prefill_evict": st.sampled_from(["end", "chunked"]),
        "prefill_chunk": st.sampled_from([8, 20]),
        "shared_blocks": st.sampled_from(["smaller", "keep"]),
    }
)


@settings(deadline=None, max_examples=60)
@given(
    options=_OPTIONS,
    requests=st.lists(_PROMPT, min_size=1, max_size=9),
    caching=st.booleans(),
    num_blocks=st.sampled_from([40, 60, 200]),
    pause=st.integers(0, 6),
)
def test_it_agrees_with_our_worker(
    options: dict[str, Any], requests: list[tuple[int, int, int]], caching: bool, num_blocks: int, pause: int
) -> None:
    heads = [[], list(range(12)), list(range(40))]
    told = [([*heads[head], *range(900, 901 + own)], outputs) for head, own, outputs in requests]
    vtoken = VTokenConfig(sinks=1, recent=3, **options)
    real, counted = both(vtoken, told, pause, num_blocks=num_blocks, enable_prefix_caching=caching)
    assert counted == real


class TestSettings:
    @pytest.mark.parametrize(
        "options", [{"policy": "h2o"}, {"reclaim": "pack"}, {"record_trace": True}], ids=lambda one: next(iter(one))
    )
    def test_those_that_need_our_worker(self, options: dict[str, Any]) -> None:
        assert not counts_suffice(config(options.pop("reclaim", "fill"), **options))
        assert counts_suffice(config("fill")) and counts_suffice(config("none", policy="streaming_llm"))

    def test_our_worker_is_taken_then(self) -> None:
        engine = make_simulated_engine(config("pack"), num_blocks=60, counting=True, **SIZES)
        assert not isinstance(engine.runner, CountingRunner)

    def test_a_count_that_differs_is_an_error(self) -> None:
        engine: Any = make_simulated_engine(config("fill"), num_blocks=60, counting=True, **SIZES)
        engine.add_request("a", list(range(40)), 4)
        engine.step()
        engine.runner.requests["a"].block_ids[0].pop()
        with pytest.raises(RuntimeError, match="do not count the same blocks"):
            engine.step()
