"""Requests with settings of their own, together: each forgets what it forgets alone, and the stub sees every slot."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from stub_worker import StubEngine

MakeEngine = Callable[..., StubEngine]
RNG = np.random.default_rng(11)
PROMPTS = {name: RNG.integers(0, 61, length).tolist() for name, length in zip("abcdefg", range(70, 140, 10), strict=True)}
OUTPUTS = 20


def victims(engine: StubEngine, req_id: str) -> list[list[int]]:
    """What a request forgot, forward by forward."""
    return [sorted(f.victims) for forward in engine.runner.forwards for f in forward if f.req_id == req_id]


def together(engine: StubEngine, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, list[list[int]]]:
    for req_id, own in wanted.items():
        engine.add(req_id, tokens=PROMPTS[req_id], outputs=OUTPUTS, **own)
    engine.run()
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
