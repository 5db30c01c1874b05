"""Every option is checked once, and every refusal is one sentence that names option, value and remedy."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from vtoken.config import RequestOptions, VTokenConfig, check_budget_floor
from vtoken.core.budget import longest_request, resolve_budget
from vtoken.core.cadence import Cadence
from vtoken.policies import ALL
from vtoken.vllm_plugin.plugin import parse_config
from vtoken.vllm_plugin.request_settings import RequestSettings

NUMBER = "must be a number: a count of tokens such as 512, or a share of the prompt such as 0.25."
SHARE = "must, as a share of the prompt, lie in (0, 1]; for a count of tokens give an integer."
COUNT = "must be at least 1 token; to keep all, set vtoken.off in a request, or run without vtoken."
OPTIONS = ", ".join(sorted(VTokenConfig.model_fields))

BAD_BUDGETS = [
    ("512", f"vtoken: option 'budget' = '512' is refused: {NUMBER}"),
    (True, f"vtoken: option 'budget' = True is refused: {NUMBER}"),
    (False, f"vtoken: option 'budget' = False is refused: {NUMBER}"),
    ([512], f"vtoken: option 'budget' = [512] is refused: {NUMBER}"),
    ({"tokens": 512}, f"vtoken: option 'budget' = {{'tokens': 512}} is refused: {NUMBER}"),
    (0, f"vtoken: option 'budget' = 0 is refused: {COUNT}"),
    (-1, f"vtoken: option 'budget' = -1 is refused: {COUNT}"),
    (0.0, f"vtoken: option 'budget' = 0.0 is refused: {SHARE}"),
    (-0.5, f"vtoken: option 'budget' = -0.5 is refused: {SHARE}"),
    (1.5, f"vtoken: option 'budget' = 1.5 is refused: {SHARE}"),
    (512.0, f"vtoken: option 'budget' = 512.0 is refused: {SHARE}"),
    (math.nextafter(1.0, 2.0), f"vtoken: option 'budget' = 1.0000000000000002 is refused: {SHARE}"),
    (math.nan, f"vtoken: option 'budget' = nan is refused: {SHARE}"),
    (math.inf, f"vtoken: option 'budget' = inf is refused: {SHARE}"),
    (-math.inf, f"vtoken: option 'budget' = -inf is refused: {SHARE}"),
]

FLOOR = "raise the budget or protect fewer tokens."

BAD_OPTIONS = [
    ({"budget": None}, f"vtoken: option 'budget' = None is refused: {NUMBER}"),
    (
        {"budget": 36},
        f"vtoken: option 'budget' = 36 is below sinks + recent + interval = 4 + 32 + 1 = 37, {FLOOR}",
    ),
    (
        {"budget": 1},
        f"vtoken: option 'budget' = 1 is below sinks + recent + interval = 4 + 32 + 1 = 37, {FLOOR}",
    ),
    (
        {"budget": 69, "sinks": 0, "recent": 64, "interval": 6},
        f"vtoken: option 'budget' = 69 is below sinks + recent + interval = 0 + 64 + 6 = 70, {FLOOR}",
    ),
    ({"sinks": -1}, "vtoken: option 'sinks' = -1 is refused: input should be greater than or equal to 0."),
    ({"sinks": 4.0}, "vtoken: option 'sinks' = 4.0 is refused: input should be a valid integer."),
    ({"sinks": "4"}, "vtoken: option 'sinks' = '4' is refused: input should be a valid integer."),
    ({"recent": -1}, "vtoken: option 'recent' = -1 is refused: input should be greater than or equal to 0."),
    ({"recent": True}, "vtoken: option 'recent' = True is refused: input should be a valid integer."),
    (
        {"interval": 0},
        "vtoken: option 'interval' = 0 is refused: input should be greater than or equal to 1.",
    ),
    ({"interval": 1.5}, "vtoken: option 'interval' = 1.5 is refused: input should be a valid integer."),
    ({"policy": 3}, "vtoken: option 'policy' = 3 is refused: input should be a valid string."),
    ({"reclaim": "drop"}, "vtoken: option 'reclaim' = 'drop' is refused: input should be 'fill', 'pack' or 'none'."),
    ({"theta_f": 1.0}, "vtoken: option 'theta_f' = 1.0 is refused: input should be less than 1."),
    ({"headroom": 0.0}, "vtoken: option 'headroom' = 0.0 is refused: input should be greater than 0."),
    ({"pack_blocks": 1}, "vtoken: option 'pack_blocks' = 1 is refused: input should be greater than or equal to 2."),
    (
        {"copies": "later"},
        "vtoken: option 'copies' = 'later' is refused: input should be 'async', 'inline' or 'force_sync'.",
    ),
    (
        {"budget": 40, "grace": 64},
        f"vtoken: option 'budget' = 40 is below sinks + grace + interval = 4 + 64 + 1 = 69, {FLOOR}",
    ),
    (
        {"prefill_evict": "always"},
        "vtoken: option 'prefill_evict' = 'always' is refused: input should be 'end' or 'chunked'.",
    ),
    (
        {"prefill_chunk": 0},
        "vtoken: option 'prefill_chunk' = 0 is refused: input should be greater than or equal to 1.",
    ),
    (
        {"score_layers": [-1]},
        "vtoken: option 'score_layers' = -1 is refused: input should be greater than or equal to 0.",
    ),
    (
        {"score_layers": []},
        "vtoken: option 'score_layers' = [] is refused: name at least one layer, or leave it out for all.",
    ),
    ({"policy_options": 3}, "vtoken: option 'policy_options' = 3 is refused: input should be a valid dictionary."),
    ({"record_trace": 1}, "vtoken: option 'record_trace' = 1 is refused: input should be a valid boolean."),
    ({"compress": "some"}, "vtoken: option 'compress' = 'some' is refused: input should be 'all' or 'asked'."),
    (
        {"request_policies": "h2o"},
        "vtoken: option 'request_policies' = 'h2o' is refused: input should be a valid dictionary.",
    ),
    (
        {"request_policies": {"h2o": 0.9}},
        "vtoken: option 'request_policies' = 0.9 is refused: input should be a valid dictionary.",
    ),
    (
        {"request_policies": {"snapkv": {"kernel_size": 3}}},
        "vtoken: option 'request_policies' gives other options to 'snapkv' than policy_options does, which is the "
        "engine's own policy and always on offer: give them there alone.",
    ),
    ({"bugdet": 512}, "vtoken: unknown option 'bugdet'; did you mean 'budget'?"),
    ({"xyzzy": 3}, f"vtoken: unknown option 'xyzzy'; the options are {OPTIONS}."),
]


def refusal(**options: object) -> str:
    with pytest.raises(ValueError) as caught:
        VTokenConfig(**options)
    assert type(caught.value) is ValueError, "pydantic's own error must not reach the user"
    return str(caught.value)


def request_refusal(extra_args: dict[str, object], config: VTokenConfig) -> str:
    with pytest.raises(ValueError) as caught:
        RequestSettings(config).terms(extra_args)
    assert type(caught.value) is ValueError
    return str(caught.value)


class TestRefusals:
    @pytest.mark.parametrize(("value", "sentence"), BAD_BUDGETS)
    def test_a_budget_that_means_nothing(self, value: object, sentence: str) -> None:
        assert refusal(budget=value) == sentence

    @pytest.mark.parametrize(("options", "sentence"), BAD_OPTIONS)
    def test_an_option_out_of_range_or_unknown(self, options: dict[str, object], sentence: str) -> None:
        assert refusal(**options) == sentence

    @pytest.mark.parametrize(("value", "sentence"), BAD_BUDGETS)
    def test_the_same_budget_asked_for_by_one_request(self, value: object, sentence: str) -> None:
        assert request_refusal({"vtoken.budget": value}, VTokenConfig()) == sentence

    def test_a_request_below_the_floor_gets_the_sentence_the_configuration_would(self) -> None:
        options = {"policy": "random", "sinks": 2, "recent": 8, "interval": 3}
        assert request_refusal({"vtoken.budget": 12}, VTokenConfig(**options)) == refusal(budget=12, **options)

    def test_every_refusal_is_one_line(self) -> None:
        sentences = [refusal(budget=value) for value, _ in BAD_BUDGETS]
        sentences += [refusal(**options) for options, _ in BAD_OPTIONS]
        for sentence in sentences:
            assert sentence.startswith("vtoken: ") and sentence[-1] in ".?" and "\n" not in sentence
            assert ". " not in sentence, "more than one sentence"


class TestAccepted:
    def test_defaults(self) -> None:
        config = VTokenConfig()
        assert config.model_dump() == {
            "policy": "snapkv",
            "policy_options": {},
            "request_policies": {},
            "compress": "all",
            "budget": 0.25,
            "sinks": 4,
            "recent": 32,
            "grace": 0,
            "protect_prefix": 0,
            "protect_prompt": False,
            "interval": 1,
            "observation_window": 32,
            "score_interval": 1,
            "score_layers": None,
            "reclaim": "fill",
            "shared_blocks": "smaller",
            "theta_f": 0.25,
            "low_watermark": 0.25,
            "check_interval": 16,
            "headroom": 0.02,
            "pack_blocks": 8,
            "sudden_rise": None,
            "copies": "async",
            "verify": False,
            "prefill_evict": "end",
            "prefill_chunk": 512,
            "history": 600,
            "record_trace": False,
            "allow_unverified": False,
        }
        assert config.protected == 37

    def test_what_is_dumped_can_be_read_back(self) -> None:
        config = VTokenConfig(budget=64, sinks=1, recent=30, interval=7, record_trace=True)
        assert VTokenConfig(**config.model_dump()) == config

    def test_a_configuration_is_frozen(self) -> None:
        with pytest.raises(ValueError, match="frozen"):
            VTokenConfig().sinks = 5  # type: ignore[misc]

    @pytest.mark.parametrize("budget", [37, 38, 512, 0.5, 1.0, 1e-9])
    def test_budgets_from_the_floor_up(self, budget: float) -> None:
        assert VTokenConfig(budget=budget).budget == budget
        assert RequestOptions.from_extra_args({"vtoken.budget": budget}).budget == budget

    def test_an_integer_and_a_share_of_one_are_different_budgets(self) -> None:
        config = VTokenConfig(budget=1, sinks=0, recent=0)
        assert resolve_budget(config, 90) == 1
        assert resolve_budget(VTokenConfig(budget=1.0, sinks=0, recent=0), 90) == 90

    def test_the_floor_alone(self) -> None:
        check_budget_floor(37, VTokenConfig())
        with pytest.raises(ValueError, match="= 37"):
            check_budget_floor(36, VTokenConfig())


class TestResolvedBudget:
    @pytest.mark.parametrize(
        ("share", "prompt", "tokens"),
        [
            (0.1, 30, 3),  # 0.1 * 30 is 3.0000000000000004 in floating point
            (0.7, 10, 7),  # and 0.7 * 10 is 7.000000000000001
            (0.1, 31, 4),
            (0.25, 1000, 250),
            (0.25, 1001, 251),
            (0.3, 10, 3),
            (1.0, 17, 17),
            (1 / 3, 9, 3),
            (1e-6, 1000, 1),
        ],
    )
    def test_a_share_is_rounded_up(self, share: float, prompt: int, tokens: int) -> None:
        config = VTokenConfig(budget=share, sinks=0, recent=0, interval=1)
        assert resolve_budget(config, prompt) == tokens

    def test_every_percentage_of_every_prompt_is_exact(self) -> None:
        for percent in range(1, 101):
            share = percent / 100
            config = VTokenConfig(budget=share, sinks=0, recent=0, interval=1)
            for prompt in range(1, 400, 7):
                exact = math.ceil(Fraction(Decimal(str(share))) * prompt)
                assert resolve_budget(config, prompt) == max(exact, 1), (share, prompt)

    def test_a_share_never_falls_below_what_is_protected(self) -> None:
        config = VTokenConfig(budget=0.25, sinks=4, recent=32, interval=5)
        assert resolve_budget(config, 16) == 41
        assert resolve_budget(config, 164) == 41
        assert resolve_budget(config, 165) == 42


OWN = "policy, budget, sinks, recent, protect_prefix, protect_prompt, off"
FLAG = "is refused: must be true or false, or 1 or 0."
INTEGER = "is refused: input should be a valid integer."
OFFER = "is not on offer; ask for snapkv or tova, or start the engine with it among its request_policies."
ENGINES = f"is refused: a request may set {OWN}, and all else is for the engine to be started with."

BAD_OWN: list[tuple[dict[str, object], str]] = [
    *(({name: value}, INTEGER) for name in ("sinks", "recent", "protect_prefix") for value in (2.0, "2", True, [4])),
    *(({name: -1}, "is refused: input should be greater than or equal to 0.") for name in ("sinks", "recent")),
    ({"protect_prefix": -1}, "is refused: input should be greater than or equal to 0."),
    ({"sinks": math.nan}, INTEGER),
    ({"sinks": 2**31}, "is refused: input should be less than or equal to 2147483647."),
    *(({"off": value}, FLAG) for value in (2, -1, 1.0, "yes", "1", [1], math.nan)),
    *(({"protect_prompt": value}, FLAG) for value in (2, "true")),
    *(({"policy": value}, "is refused: input should be a valid string.") for value in (3, ["h2o"])),
    *(({"policy": value}, OFFER) for value in ("h2o", "os:abort", "")),
    *(({name: None}, "is refused: leave it out for the engine's own.") for name in ("budget", "off", "policy")),
    *(({name: 2}, ENGINES) for name in ("interval", "policy_options", "request_policies")),
    ({"off": 1, "sinks": 3, "budget": 90}, "contradicts 'budget', 'sinks': leave out one or the other."),
    (
        {"recent": 31},
        "is refused by snapkv: raise it to observation_window = 32 or lower that, since the window's own tokens must "
        "stay.",
    ),
]
AGAINST_OTHERS: list[tuple[dict[str, object], str]] = [
    (
        {"recent": 96},
        "vtoken: option 'budget' = 100 is below sinks + recent + interval = 4 + 96 + 1 = 101, raise the budget or "
        "protect fewer tokens.",
    ),
    (
        {"policy": "tova", "recent": 1},
        "vtoken: option 'score_interval' = 3 is refused: a new token could be evicted before any query was observed "
        "for it; set recent to at least 2.",
    ),
]


class TestRequests:
    CONFIG = VTokenConfig(budget=100, request_policies=["tova"], score_interval=3, observation_window=32)

    @pytest.mark.parametrize(("own", "sentence"), BAD_OWN)
    def test_what_a_request_may_not_set(self, own: dict[str, object], sentence: str) -> None:
        (name, value), *_ = own.items()
        quoted = f"'{value}'" if "on offer" in sentence else repr(value)
        assert self.refused(own) == f"vtoken: option '{name}' = {quoted} {sentence}"

    @pytest.mark.parametrize(("own", "sentence"), AGAINST_OTHERS)
    def test_what_does_not_go_with_the_engines_settings(self, own: dict[str, object], sentence: str) -> None:
        assert self.refused(own) == sentence

    def refused(self, own: dict[str, object]) -> str:
        settings = RequestSettings(self.CONFIG)
        extra_args = {f"vtoken.{name}": value for name, value in own.items()}
        sentences = []
        for _ in range(2):  # no refusal is forgotten
            with pytest.raises(ValueError) as caught:
                settings.terms(extra_args)
            assert type(caught.value) is ValueError
            sentences.append(str(caught.value))
        assert sentences[0] == sentences[1] and "\n" not in sentences[0]
        return sentences[0]

    def test_an_unknown_option(self) -> None:
        assert request_refusal({"vtoken.bugdet": 99}, VTokenConfig()) == (
            "vtoken: unknown option 'bugdet'; did you mean 'budget'?"
        )
        for name in ("", "xyzzy"):
            assert request_refusal({f"vtoken.{name}": 99}, VTokenConfig()) == (
                f"vtoken: unknown option '{name}'; the options are {', '.join(sorted(OWN.split(', ')))}."
            )

    def test_nested_options_are_refused_rather_than_ignored(self) -> None:
        sentence = "vtoken: a request's options are flat; write 'vtoken.budget': 256 instead of nesting."
        for nested in ({"budget": 256}, "budget", None):
            assert request_refusal({"vtoken": nested}, VTokenConfig()) == sentence

    @pytest.mark.parametrize("extra_args", [None, {}, {"temperature": 1}, {"other.budget": "x"}, {3: 4}])
    def test_other_extra_args_are_none_of_our_business(self, extra_args: dict[Any, Any] | None) -> None:
        assert RequestOptions.from_extra_args(extra_args) == RequestOptions()
        terms = RequestSettings(VTokenConfig()).terms(extra_args)
        assert terms.config == VTokenConfig() and (terms.policy, terms.compressed) == (0, True)

    def test_a_request_overrules_the_engine(self) -> None:
        settings = RequestSettings(self.CONFIG)

        def budget(prompt: int = 1000, **own: object) -> int:
            return settings.terms({f"vtoken.{name}": value for name, value in own.items()}).budget(prompt)

        assert (budget(), budget(budget=64), budget(budget=0.5)) == (100, 64, 500)
        assert (budget(budget=0.001), budget(budget=0.001, sinks=30), budget(budget=0.001, recent=50)) == (37, 63, 55)
        assert budget(budget=0.001, protect_prompt=1) == 1000 + 33
        assert budget(protect_prompt=0) == budget(off=0) == 100 and budget(off=1) == budget(off=True) == 0
        with pytest.raises(
            ValueError, match=r"^vtoken: option 'budget' = 100 is below the protected prompt \+ recent "
        ):
            budget(prompt=68, protect_prompt=True)
        assert budget(prompt=67, protect_prompt=True) == 100

    def test_a_token_is_not_the_whole_prompt(self) -> None:
        """1 == 1.0, and a set of options that is known is not looked at again."""
        settings = RequestSettings(VTokenConfig(policy="random", sinks=0, recent=0))
        found = [settings.terms({"vtoken.budget": budget}).budget(90) for budget in (1, 1.0, 1, 1.0)]
        assert found == [1, 90, 1, 90]

    def test_equal_options_are_looked_at_once(self) -> None:
        settings = RequestSettings(self.CONFIG)
        first = settings.terms({"vtoken.sinks": 9, "vtoken.budget": 80})
        assert settings.terms({"vtoken.budget": 80, "x": 1, "vtoken.sinks": 9}) is first
        assert settings.terms({"vtoken.budget": 80}) is not first
        assert settings.terms({}) is settings.terms({"vtoken.off": 0})

    def test_the_cadence_is_that_of_its_policy(self) -> None:
        settings = RequestSettings(
            VTokenConfig(policy="h2o", recent=40, request_policies={"tova": {}, "random": {"seed": 3}})
        )
        assert list(settings.policies) == ["h2o", "tova", "random"]
        own = settings.terms({"vtoken.policy": "tova", "vtoken.protect_prefix": 7})
        assert own.policy == 1 and own.config.policy == "tova"
        assert own.cadence == Cadence(head=7, recent=40, prompt_queries=1, decode_queries=True, own_queries=1)
        random = settings.terms({"vtoken.policy": "random"})
        assert random.config.policy_options == {"seed": 3} and random.policy == 2
        assert random.cadence == Cadence(head=4, recent=40, own_queries=0)
        engines = Cadence(head=4, recent=40, prompt_queries=ALL, decode_queries=True, own_queries=32)
        assert settings.terms(None).cadence == settings.terms({"vtoken.policy": "h2o"}).cadence == engines

    def test_only_who_asks(self) -> None:
        settings = RequestSettings(VTokenConfig(compress="asked"))
        asking = [
            {"vtoken.budget": 0.5},
            {"vtoken.sinks": 4},
            {"vtoken.policy": "snapkv"},
            {"vtoken.protect_prompt": 0},
        ]
        assert all(settings.terms(extra_args).compressed for extra_args in asking)
        silent = [None, {}, {"vtoken.off": 0}, {"vtoken.off": 1}, {"other": 3}]
        assert not any(settings.terms(extra_args).compressed for extra_args in silent)

    def test_the_longest_request_where_only_some_are_compressed(self) -> None:
        chunked = {"budget": 128, "prefill_evict": "chunked", "prefill_chunk": 64}
        assert longest_request(VTokenConfig(**chunked), 1024) == 128 - 1 + 64
        assert longest_request(VTokenConfig(**chunked, compress="asked"), 1024) == 1024

    def test_names_alone(self) -> None:
        config = VTokenConfig(request_policies=["h2o", "snapkv"])
        assert config.request_policies == {"h2o": {}, "snapkv": {}}
        assert list(RequestSettings(config).policies) == ["snapkv", "h2o"]

    @pytest.mark.parametrize(
        ("policies", "sentence"),
        [
            (["h20"], "vtoken: unknown policy 'h20'; did you mean 'h2o'?"),
            (
                {"h2o": {"decay": 0.0}},
                "vtoken: policy_options = {'decay': 0.0} are refused by policy 'h2o': decay must lie in (0, 1].",
            ),
        ],
    )
    def test_a_policy_that_cannot_be_offered(self, policies: Any, sentence: str) -> None:
        with pytest.raises(ValueError) as caught:
            parse_config({"request_policies": policies})
        assert str(caught.value) == sentence

    def test_settings_that_suit_a_policy_on_offer_may_come_with_the_request(self) -> None:
        settings = RequestSettings(VTokenConfig(policy="random", recent=8, request_policies=["snapkv"]))
        assert settings.terms({"vtoken.policy": "snapkv", "vtoken.recent": 32}).policy == 1
        with pytest.raises(ValueError, match=r"^vtoken: option 'recent' = 8 is refused by snapkv: "):
            settings.terms({"vtoken.policy": "snapkv"})
