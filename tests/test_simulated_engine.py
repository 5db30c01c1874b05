"""The engine without a model schedules, evicts and frees as the one with a model does, step by step."""

from pathlib import Path
from typing import Any

import pytest
from engines import prompts, running

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin import PoolSnapshot, make_simulated_engine

NUM_BLOCKS = 20
SIZES = {"block_size": 32, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
PROMPTS = prompts([150, 90, 200, 40, 120], vocab=500)
OUTPUTS = [90, 120, 60, 130, 70]


def settings(reclaim: str, **options: Any) -> VTokenConfig | None:
    if reclaim == "native":
        return None
    return VTokenConfig(
        **{"policy": "streaming_llm", "budget": 64, "sinks": 2, "recent": 8, "reclaim": reclaim, "theta_f": 0.05}
        | options
    )


def simulated(vtoken: VTokenConfig | None, **sizes: Any) -> Any:
    return make_simulated_engine(vtoken, **{"num_blocks": NUM_BLOCKS, **SIZES, **sizes})


def drive(engine: Any) -> list[PoolSnapshot]:
    """Requests that arrive one after another, on a pool that is too small for all of them; the pool after each step."""
    seen: list[PoolSnapshot] = []
    for n, (prompt, outputs) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        own = {"vtoken.budget": 96} if n == 1 else None
        engine.add_request(f"r{n}", prompt, outputs, extra_args=own)
        seen += [step(engine) for _ in range(5)]
    while engine.has_unfinished():
        seen.append(step(engine))
    return seen


def step(engine: Any) -> PoolSnapshot:
    engine.step()
    return engine.snapshot()


@pytest.mark.parametrize("reclaim", ["native", "none", "pack", "fill"])
def test_a_model_would_hold_the_same_blocks(tiny_gqa: Path, reclaim: str) -> None:
    args = {"num_gpu_blocks_override": NUM_BLOCKS + 1, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.1}
    with running(tiny_gqa, settings(reclaim), **SIZES, **args) as real:
        assert real.num_blocks == NUM_BLOCKS
        found = drive(real)
    ours = drive(simulated(settings(reclaim)))
    assert ours == found
    assert (found[-1].tokens_evicted > 300) == (reclaim != "native")
    assert (found[-1].preemptions > 0) == (reclaim == "native")
    assert (found[-1].tokens_moved > 0) == (reclaim in ("pack", "fill"))
    others = [one for one in ("native", "none", "pack", "fill") if one != reclaim]
    assert all(drive(simulated(settings(other))) != found for other in others)


class TestRandomVictims:
    def test_they_depend_on_the_seed_alone(self) -> None:
        def held(seed: int) -> list[int]:
            config = settings("none", policy="random", policy_options={"seed": seed})
            return [one.held_blocks for one in drive(simulated(config, num_blocks=400, block_size=4))]

        assert held(1) == held(1)
        assert held(1) != held(2)


class TestSteps:
    def test_they_tell_what_happened(self) -> None:
        engine = simulated(settings("fill"), num_blocks=40, block_size=16)
        engine.add_request("a", list(range(300)), 3)
        engine.add_request("b", list(range(5)), 1)
        steps = [engine.step() for _ in range(4)]
        assert [one.scheduled for one in steps] == [{"a": 256}, {"a": 44, "b": 5}, {"a": 1}, {"a": 1}]
        assert [one.produced for one in steps] == [[], ["a", "b"], ["a"], ["a"]]
        assert [one.finished for one in steps] == [{}, {"b": "length"}, {}, {"a": "length"}]
        assert not any(one.preempted for one in steps) and not engine.has_unfinished()
        assert engine.held_blocks == 0

    def test_whoever_lacks_blocks_is_preempted(self) -> None:
        engine = simulated(None, num_blocks=17, block_size=16, max_model_len=272)
        for name in ("a", "b"):
            engine.add_request(name, list(range(100)), 150)
        steps = []
        while engine.has_unfinished():
            steps.append(engine.step())
        assert [name for one in steps for name in one.preempted] == ["b"]
        assert engine.preemptions == 1
        assert sum(len(one.produced) for one in steps) == 300

    def test_a_request_can_be_aborted(self) -> None:
        engine = simulated(settings("fill"))
        engine.add_request("a", list(range(100)), 50)
        engine.step()
        assert (engine.running, engine.held_blocks, len(engine.blocks_of("a"))) == (1, 2, 2)
        engine.abort("a")
        engine.step()
        assert (engine.running, engine.held_blocks, engine.blocks_of("a")) == (0, 0, [])


class TestPrefixCaching:
    @pytest.mark.parametrize("config", [None, settings("fill"), settings("none")], ids=["native", "fill", "none"])
    def test_equal_beginnings_are_computed_once(self, config: VTokenConfig | None) -> None:
        engine = simulated(config, enable_prefix_caching=True)
        shared = list(range(128))
        engine.add_request("a", [*shared, 1000], 1)
        engine.step()
        engine.add_request("b", [*shared, 1001, 1002], 40)
        engine.add_request("c", [*range(1, 129), 1001], 40)  # nothing in common
        first = engine.step()
        assert first.scheduled == {"b": 2, "c": 129}
        while engine.has_unfinished():
            engine.step()
        assert engine.held_blocks == 0


class TestRefusals:
    @pytest.mark.parametrize("policy", ["h2o", "key_norm"])
    def test_policies_that_need_a_model(self, policy: str) -> None:
        with pytest.raises(ValueError, match=rf"policy '{policy}' looks at attention or keys.*choose one"):
            simulated(VTokenConfig(policy=policy))

    def test_they_are_found_among_those_that_requests_may_ask_for(self) -> None:
        with pytest.raises(ValueError, match="policy 'tova'"):
            simulated(settings("fill", request_policies={"tova": {}}))

    def test_verify(self) -> None:
        with pytest.raises(ValueError, match="option 'verify' = True is refused without a model"):
            simulated(settings("fill", verify=True))

    def test_a_pool_that_is_too_small(self) -> None:
        with pytest.raises(ValueError, match=r"num_blocks = 15 .* give the pool 16 blocks or lower max_model_len"):
            simulated(None, num_blocks=15)
        assert simulated(None, num_blocks=16).num_blocks == 16
        assert simulated(settings("fill", prefill_evict="chunked", prefill_chunk=64), num_blocks=4).num_blocks == 4

    @pytest.mark.parametrize("length", [0, 512])
    def test_prompts_of_impossible_length(self, length: int) -> None:
        with pytest.raises(ValueError, match=f"has a prompt of {length} tokens, and max_model_len is 512"):
            simulated(None).add_request("a", [1] * length, 1)

    def test_settings_of_a_request(self) -> None:
        engine: Any = simulated(settings("fill"))
        with pytest.raises(ValueError, match="option 'budget' = 0"):
            engine.add_request("a", [1] * 20, 1, extra_args={"vtoken.budget": 0})
        assert not engine.has_unfinished()
