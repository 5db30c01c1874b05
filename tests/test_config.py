"""Every option is checked once, and every refusal is one sentence that names option, value and remedy."""

import math
from decimal import Decimal
from fractions import Fraction

import pytest

from vtoken.config import RequestOptions, VTokenConfig, check_budget_floor
from vtoken.core.budget import resolve_budget

NUMBER = "must be a number: a count of tokens such as 512, or a share of the prompt such as 0.25."
SHARE = "must, as a share of the prompt, lie in (0, 1]; for a count of tokens give an integer."
COUNT = "must be at least 1 token; to keep everything, run without vtoken."
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

    def test_a_request_may_only_set_its_budget(self) -> None:
        config = VTokenConfig()
        assert request_refusal({"vtoken.sinks": 4}, config) == (
            "vtoken: unknown option 'sinks'; the options are budget."
        )
        assert request_refusal({"vtoken.bugdet": 99}, config) == (
            "vtoken: unknown option 'bugdet'; did you mean 'budget'?"
        )

    def test_a_request_below_the_floor_gets_the_sentence_the_configuration_would(self) -> None:
        config = VTokenConfig(sinks=2, recent=8, interval=3)
        assert request_refusal({"vtoken.budget": 12}, config) == refusal(budget=12, sinks=2, recent=8, interval=3)

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
        assert RequestOptions.from_extra_args({"vtoken.budget": budget}, VTokenConfig()).budget == budget

    def test_an_integer_and_a_share_of_one_are_different_budgets(self) -> None:
        config = VTokenConfig(budget=1, sinks=0, recent=0)
        assert resolve_budget(config, 90) == 1
        assert resolve_budget(VTokenConfig(budget=1.0, sinks=0, recent=0), 90) == 90

    @pytest.mark.parametrize("extra_args", [None, {}, {"temperature": 1}, {"other.budget": "x"}])
    def test_other_extra_args_are_none_of_our_business(self, extra_args: dict[str, object] | None) -> None:
        assert RequestOptions.from_extra_args(extra_args, VTokenConfig()).budget is None

    def test_nested_options_are_refused_rather_than_ignored(self) -> None:
        with pytest.raises(ValueError) as refusal:
            RequestOptions.from_extra_args({"vtoken": {"budget": 256}}, VTokenConfig())
        assert str(refusal.value) == (
            "vtoken: a request's options are flat; write 'vtoken.budget': 256 instead of nesting."
        )

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

    def test_a_request_overrules_the_engine(self) -> None:
        config = VTokenConfig(budget=100)
        assert resolve_budget(config, 1000) == 100
        assert resolve_budget(config, RequestOptions(budget=64), 1000) == 64
        assert resolve_budget(config, RequestOptions(budget=0.5), 1000) == 500
        assert resolve_budget(config, RequestOptions(budget=0.001), 1000) == 37
