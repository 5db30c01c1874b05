"""Requests with settings of their own, together: each forgets what it forgets alone, and the stub sees every slot."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stub_worker import StubEngine

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin import compat

MakeEngine = Callable[..., StubEngine]
RNG = np.random.default_rng(11)
PROMPTS = {
    name: RNG.integers(0, 61, length).tolist() for name, length in zip("abcdefg", range(70, 140, 10), strict=True)
}
OUTPUTS = 20


def victims(engine: StubEngine, req_id: str) -> list[list[int]]:
    """What a request forgot, forward by forward."""
    return [sorted(f.victims) for forward in engine.runner.forwards for f in forward if f.req_id == req_id]


def together(engine: StubEngine, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, list[list[int]]]:
    for req_id, own in wanted.items():
        engine.add(req_id, tokens=PROMPTS[req_id], outputs=OUTPUTS, **own)
    ends = {req_id: reason for step in engine.run() for req_id, reason in step.finished.items()}
    assert ends == dict.fromkeys(wanted, "length")
    return {req_id: victims(engine, req_id) for req_id in wanted}


class TestProtection:
    """Under the policy that forgets the oldest, what is protected can be read off the victims."""

    WANTED: Mapping[str, Mapping[str, Any]] = {
        "a": {},
        "b": {"sinks": 9},
        "c": {"budget": 50, "recent": 30},
        "d": {"protect_prefix": 17, "sinks": 1},
        "e": {"budget": 125, "protect_prompt": 1},
        "f": {"off": 1},
        "g": {"budget": 0.5, "sinks": 0},
    }

    @pytest.mark.parametrize("mode", ["fill", "pack", "none"])
    @pytest.mark.parametrize("caching", [False, True])
    def test_each_has_its_own(self, make: MakeEngine, mode: str, caching: bool) -> None:
        engine = make(200, reclaim=mode, caching=caching, budget=40)
        found = together(engine, self.WANTED)
        first = {"a": 2, "b": 9, "c": 2, "d": 17, "e": 110, "f": 0, "g": 0}
        kept = {"a": 40, "b": 40, "c": 50, "d": 40, "e": 125, "f": 999, "g": 65}
        for req_id, forwards in found.items():
            end = len(PROMPTS[req_id]) + OUTPUTS - 1
            gone = [token for forward in forwards for token in forward]
            assert gone == list(range(first[req_id], first[req_id] + max(end - kept[req_id] + 1, 0))), req_id

    def test_a_request_that_is_off_is_stock(self, make: MakeEngine) -> None:
        """Its hits reach into its last block, it is promised nothing, and its peak is its length."""
        engine = make(60, caching=True, budget=40)
        for name in ("first", "second"):
            engine.add(name, tokens=PROMPTS["g"], outputs=4, off=1)
            engine.run()
        engine.add("third", tokens=PROMPTS["g"], outputs=4)
        engine.run()
        assert engine.runner.hits == [("first", 0), ("second", 128), ("third", 128)]
        assert victims(engine, "second") == [[]] * 4 != victims(engine, "third")

    def test_asked_only(self, make: MakeEngine) -> None:
        engine = make(60, budget=40, compress="asked")
        asking = {"a": {}, "b": {"off": 0}, "c": {"budget": 50}, "d": {"sinks": 2}, "e": {"off": 1}}
        found = together(engine, asking)
        assert {req_id for req_id, forwards in found.items() if any(forwards)} == {"c", "d"}

    def test_a_request_that_is_off_and_never_fits(self, make: MakeEngine) -> None:
        engine = make(7, budget=40)
        engine.runner.broken = {"a"}
        engine.add("a", tokens=PROMPTS["a"], outputs=40, off=1)
        engine.add("b", tokens=PROMPTS["b"], outputs=10, budget=40)
        ends = {req_id: reason for step in engine.run() for req_id, reason in step.finished.items()}
        assert ends == {"a": "error", "b": "length"}

    def test_swapped(self, make: MakeEngine) -> None:
        """Negative control: the settings of two requests are exchanged on their way to the worker."""
        engine = make(200, budget=40)
        admit = engine.scheduler.vtoken.admit
        other = {"b": {"vtoken.protect_prefix": 17}, "d": {"vtoken.sinks": 9}}
        engine.scheduler.vtoken.admit = lambda req_id, *args: admit(req_id, *args[:2], other[req_id])
        for req_id, own in (("b", {"sinks": 9}), ("d", {"protect_prefix": 17})):
            engine.add(req_id, tokens=PROMPTS[req_id], outputs=5, **own)
        with pytest.raises(AssertionError):
            engine.run()


OPTIONS: dict[str, Any] = {
    "policy": "h2o",
    "policy_options": {"decay": 0.9},
    "request_policies": {
        "scissorhands": {"history": 20},
        "snapkv": {"kernel_size": 3},
        "random": {"seed": 5},
        "tova": {},
        "key_norm": {},
        "streaming_llm": {},
    },
    "budget": 40,
    "observation_window": 8,
    "recent": 8,
    "record_trace": True,
}
MIXED: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"policy": "scissorhands", "sinks": 7},
    "c": {"policy": "snapkv", "budget": 50, "recent": 12},
    "d": {"policy": "random", "budget": 0.4},
    "e": {"off": 1},
    "f": {"policy": "tova", "protect_prefix": 17, "recent": 0},
    "g": {"policy": "key_norm", "budget": 142, "protect_prompt": True},
    "h": {"policy": "streaming_llm", "sinks": 0},
    "i": {"recent": 20, "budget": 45},
}
PROMPTS |= {name: RNG.integers(0, 61, length).tolist() for name, length in zip("hi", (75, 95), strict=True)}


def alone(make: MakeEngine, req_id: str, **options: Any) -> list[list[int]]:
    """The victims of one of these requests in an engine of its own, whose settings are the request's."""
    own = dict(MIXED[req_id])
    if own.pop("off", 0):
        return [[]] * OUTPUTS
    policy = own.pop("policy", OPTIONS["policy"])
    others = {"policy": policy, "policy_options": {**OPTIONS["request_policies"], "h2o": {"decay": 0.9}}[policy]}
    engine = make(200, **{**OPTIONS, "request_policies": {}, **options, **others, **own})
    return together(engine, {req_id: {}})[req_id]


def not_empty(forwards: list[list[int]]) -> list[list[int]]:
    """How a prompt was cut into forwards does not count."""
    return [victims for victims in forwards if victims]


CHUNKED = {"prefill_evict": "chunked", "prefill_chunk": 48}


class TestPolicies:
    @pytest.mark.parametrize(
        "options",
        [{}, CHUNKED, {"reclaim": "pack", "interval": 3, **CHUNKED}, {"reclaim": "none"}],
        ids=["fill", "fill in chunks", "pack", "none"],
    )
    def test_each_forgets_what_it_forgets_alone(self, make: MakeEngine, options: dict[str, Any]) -> None:
        engine = make(200, seqs=16, batched=64, **{**OPTIONS, **options})
        found = together(engine, MIXED)
        for req_id, forwards in found.items():
            assert not_empty(forwards) == not_empty(alone(make, req_id, **options)), req_id
        assert sum(any(forwards) for forwards in found.values()) == len(MIXED) - 1

    def test_with_a_prefix_cache(self, make: MakeEngine) -> None:
        """The queries that a policy looks at are computed by whoever has that policy: hits end where they begin."""
        engine = make(200, caching=True, **OPTIONS)
        trunk = PROMPTS["g"]
        engine.add("first", tokens=trunk, outputs=2, off=1)
        engine.run()
        for policy in ("scissorhands", "streaming_llm", "tova"):
            engine.add(policy, tokens=trunk[:113], outputs=OUTPUTS, policy=policy)
        engine.add("off", tokens=trunk[:113], outputs=OUTPUTS, off=1)
        engine.run()
        # 113 less 8 observed queries lie in the seventh block, less one in the eighth.
        assert dict(engine.runner.hits) == {
            "first": 0, "scissorhands": 96, "streaming_llm": 112, "tova": 112, "off": 112,
        }  # fmt: skip

    def test_after_a_preemption_and_under_a_used_name(self, make: MakeEngine) -> None:
        """The worker is told again, and forgets with the request."""

        def life(engine: StubEngine, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, list[list[int]]]:
            for req_id, own in wanted.items():
                engine.add(req_id, tokens=PROMPTS[req_id], outputs=OUTPUTS, **own)
            for _ in range(6):
                engine.step()
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.run()
            return {req_id: not_empty(victims(engine, req_id)) for req_id in wanted}

        engine = make(200, **OPTIONS)
        found = life(engine, {req_id: MIXED[req_id] for req_id in "abc"})
        assert engine.preemptions == 3
        for req_id, forwards in found.items():
            assert forwards == life(make(200, **OPTIONS), {req_id: MIXED[req_id]})[req_id]
            assert len(forwards[0]) > 1 < len(forwards[6])  # each prompt was reduced twice
        before = len(victims(engine, "b"))
        engine.add("b", tokens=PROMPTS["b"], outputs=OUTPUTS)
        engine.run()
        assert victims(engine, "b")[before:] == together(make(200, **OPTIONS), {"b": {}})["b"]

    def test_what_a_request_is_told(self, make: MakeEngine) -> None:
        engine = make(200, **OPTIONS)
        for req_id, own in MIXED.items():
            engine.add(req_id, tokens=PROMPTS[req_id], outputs=OUTPUTS, **own)
        told = {req_id: each for step in engine.run() for req_id, each in step.told.items()}
        assert told.keys() == MIXED.keys()
        for req_id, each in told.items():
            forwards = [f for forward in engine.runner.forwards for f in forward if f.req_id == req_id]
            evicted, peak = sum(f.evicted for f in forwards), max(len(f.blocks) for f in forwards)
            assert each == {"tokens_evicted": evicted, "peak_blocks": peak}
        assert told["e"] == {"tokens_evicted": 0, "peak_blocks": -(-(110 + OUTPUTS - 1) // 16)}
        assert engine.scheduler.vtoken.stats.tokens_evicted == sum(each["tokens_evicted"] for each in told.values())

    def test_what_a_preempted_request_is_told(self, make: MakeEngine) -> None:
        """Evictions of the life that ended, and the most blocks of all of them."""
        engine = make(200, **OPTIONS)
        engine.add("g", tokens=PROMPTS["g"], outputs=OUTPUTS, budget=60)
        for _ in range(6):
            engine.step()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        (told,) = [step.told["g"] for step in engine.run() if step.told]
        assert told == {"tokens_evicted": 130 + OUTPUTS - 1 - 59, "peak_blocks": -(-136 // 16)}


class TestControls:
    """Each of these faults is seen."""

    @pytest.fixture
    def engine(self, make: MakeEngine) -> StubEngine:
        return make(200, seqs=16, batched=64, **OPTIONS)

    def test_two_policies_are_exchanged(self, make: MakeEngine, engine: StubEngine) -> None:
        scheduler = engine.scheduler.vtoken
        plan, places = scheduler.plan, list(OPTIONS["request_policies"])

        def exchanged(scheduled: Any) -> Any:
            made = plan(scheduled)
            swap = {"c": 1 + places.index("tova"), "f": 1 + places.index("snapkv")}
            made.policies.update({req_id: swap[req_id] for req_id in made.policies.keys() & swap})
            return made

        scheduler.plan = exchanged
        found = together(engine, MIXED)
        wrong = [r for r in found if not_empty(found[r]) != not_empty(alone(make, r))]
        assert wrong == ["c", "f"]

    def test_the_engines_settings_for_all(self, engine: StubEngine) -> None:
        ledger = engine.manager.ledger
        ledger._cadence_of = lambda rows: ledger.cadence
        with pytest.raises(AssertionError, match="a token was forgotten that is protected"):
            together(engine, MIXED)

    def test_queries_weighted_as_the_engine_has_it(self, engine: StubEngine) -> None:
        """A sum of masses that fade is not what another policy is promised."""
        keeper = engine.runner.vtoken._scores
        keeper.manner = lambda rows: (keeper._each_query[keeper._scores.policy[rows]], 0.9)
        ends: dict[str, str] = {}
        engine.runner.broken = {"c"}
        for req_id in "ac":
            engine.add(req_id, tokens=PROMPTS[req_id], outputs=OUTPUTS, **MIXED[req_id])
        for step in engine.run():
            ends |= step.finished
        assert ends == {"a": "length", "c": "error"}


class TestStartUp:
    """What is made ready is made ready for all policies on offer."""

    @pytest.mark.parametrize(
        ("others", "observed", "normed"),
        [(["random"], False, False), (["random", "tova"], True, False), (["key_norm"], False, True)],
    )
    def test_what_is_measured(self, make: MakeEngine, others: list[str], observed: bool, normed: bool) -> None:
        engine = make(50, request_policies=others, record_trace=True)
        keeper = engine.runner.vtoken._scores
        assert (engine.runner.recorder is not None, keeper._observer is not None) == (observed, observed)
        assert (keeper._key_norms is not None) == normed

    @pytest.mark.parametrize(
        ("others", "scored"),
        [([], 0), (["random"], 0), (["key_norm"], 4), (["tova", "key_norm"], 24), (["tova", "scissorhands"], 12 * 33)],
    )
    def test_memory_for_the_most_demanding(self, others: list[str], scored: int) -> None:
        """A slot of two layers with 50 bytes each leaves room for what is kept of its token."""
        config = VTokenConfig(policy="streaming_llm", request_policies=others)
        layer = SimpleNamespace(page_size_bytes=50 * 16, block_size=16, num_kv_heads=1)
        runner = SimpleNamespace(
            get_kv_cache_spec=lambda: {"a": layer, "b": layer},
            device=SimpleNamespace(type="cuda"),
            vllm_config=SimpleNamespace(additional_config=SimpleNamespace(vtoken=config)),
        )
        assert compat._beside_scores(10**9, runner) == int(10**9 * 100 / (100 + scored))
