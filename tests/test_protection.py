"""Parts of a request that are never compressed."""

from collections.abc import Callable

import pytest
from stub_worker import StubEngine

from vtoken.config import VTokenConfig
from vtoken.core.budget import longest_request, resolve_budget
from vtoken.vllm_plugin.plugin import _check_request
from vtoken.vllm_plugin.request_settings import RequestSettings

MakeEngine = Callable[..., StubEngine]


def victims(engine: StubEngine, req_id: str) -> list[int]:
    return [token for forward in engine.runner.forwards for f in forward if f.req_id == req_id for token in f.victims]


class TestPrefix:
    @pytest.mark.parametrize("caching", [False, True])
    def test_the_oldest_that_are_not_protected_go_first(self, make: MakeEngine, caching: bool) -> None:
        engine = make(100, caching=caching, protect_prefix=20)
        engine.add("a", prompt=90, outputs=10, budget=40)
        engine.run()
        assert victims(engine, "a") == list(range(20, 20 + 51 + 9))

    def test_where_sinks_are_more(self, make: MakeEngine) -> None:
        engine = make(100, sinks=5, protect_prefix=3)
        engine.add("a", prompt=90, outputs=2, budget=40)
        engine.run()
        assert victims(engine, "a") == list(range(5, 5 + 51 + 1))

    def test_a_budget_that_it_exceeds(self) -> None:
        with pytest.raises(
            ValueError,
            match=r"^vtoken: option 'budget' = 64 is below protect_prefix \+ recent \+ interval = 60 \+ 32 \+ 1 = 93, "
            r"raise the budget or protect fewer tokens\.$",
        ):
            VTokenConfig(budget=64, protect_prefix=60)

    def test_a_share_is_never_below_it(self) -> None:
        assert resolve_budget(VTokenConfig(budget=0.1, protect_prefix=60), 200) == 60 + 32 + 1


class TestPrompt:
    @pytest.mark.parametrize("mode", ["fill", "pack", "none"])
    def test_only_generated_tokens_are_forgotten(self, make: MakeEngine, mode: str) -> None:
        engine = make(100, caching=True, protect_prompt=True, reclaim=mode)
        engine.add("a", prompt=50, outputs=30, budget=60)
        engine.add("b", prompt=50, outputs=30, budget=0.2)
        engine.run()
        assert victims(engine, "a") == list(range(50, 50 + 20))
        # A fifth would be 10 tokens; prompt, recent and interval are 57.
        assert victims(engine, "b") == list(range(50, 50 + 23))

    def test_a_request_whose_prompt_does_not_fit_ends_alone(self, make: MakeEngine) -> None:
        engine = make(100, protect_prompt=True)
        engine.runner.broken = {"long"}
        engine.add("long", prompt=60, outputs=10, budget=60)
        engine.add("a", prompt=50, outputs=10, budget=57)
        ends = {req_id: reason for step in engine.run() for req_id, reason in step.finished.items()}
        assert ends == {"long": "error", "a": "length"}

    def test_it_is_refused_at_the_front_end(self) -> None:
        settings = RequestSettings(VTokenConfig(budget=100, protect_prompt=True))
        _check_request(settings, {"prompt_token_ids": [1] * 67}, None)
        with pytest.raises(
            ValueError,
            match=r"^vtoken: option 'budget' = 100 is below the protected prompt \+ recent \+ interval = 68 \+ 32 "
            r"\+ 1 = 101, raise the budget or protect fewer tokens\.$",
        ):
            _check_request(settings, {"prompt_token_ids": [1] * 68}, None)

    def test_the_longest_request_is_that_of_a_count_of_tokens(self) -> None:
        """Prompts that leave no room are refused, but a preempted request has its outputs in its prefill."""
        config = VTokenConfig(budget=128, protect_prompt=True)
        assert longest_request(config, 1024) == longest_request(VTokenConfig(budget=128), 1024) == 1024
        chunked = {"prefill_evict": "chunked", "prefill_chunk": 64}
        assert longest_request(VTokenConfig(budget=128, protect_prompt=True, **chunked), 1024) == 128 - 1 + 64
