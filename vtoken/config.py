"""Every option of vtoken: defined once, validated once, documented once."""

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

REQUEST_PREFIX = "vtoken."
MOST_TOKENS = 2**31 - 1


def _number(value: Any) -> Any:
    """Accept an int or a float as it is; pydantic would also take "512", True or 512.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number: a count of tokens such as 512, or a share of the prompt such as 0.25")
    if isinstance(value, float) and not (math.isfinite(value) and 0.0 < value <= 1.0):
        raise ValueError("must, as a share of the prompt, lie in (0, 1]; for a count of tokens give an integer")
    if isinstance(value, int) and value < 1:
        raise ValueError("must be at least 1 token; to keep all, set vtoken.off in a request, or run without vtoken")
    if isinstance(value, int) and value > MOST_TOKENS:
        raise ValueError(f"must be at most {MOST_TOKENS} tokens")
    return value


def _flag(value: Any) -> Any:
    """Accept a boolean, and 0 and 1, which is what vLLM's HTTP server makes of one."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError("must be true or false, or 1 or 0")
    return bool(value)


def _options_by_name(value: Any) -> Any:
    """["h2o", "tova"] -> {"h2o": {}, "tova": {}}."""
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return {name: {} for name in value}
    return value


Budget = Annotated[int | float, BeforeValidator(_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Policies = Annotated[dict[str, dict[str, Any]], BeforeValidator(_options_by_name)]


class _Options(BaseModel):
    """A frozen pydantic model whose refusals are one sentence that names setting, value and remedy."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ValueError(_sentence(error, type(self))) from None


def _sentence(error: ValidationError, model: type[BaseModel]) -> str:
    detail = error.errors()[0]
    name = str(detail["loc"][0]) if detail["loc"] else ""
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, model.model_fields, n=1)
        known = ", ".join(sorted(model.model_fields))
        hint = f"did you mean '{close[0]}'?" if close else f"the options are {known}."
        return f"vtoken: unknown option '{name}'; {hint}"
    if not name:
        return f"vtoken: {message}."
    return f"vtoken: option '{name}' = {detail['input']!r} is refused: {message[0].lower()}{message[1:]}."


class VTokenConfig(_Options):
    """Settings of the plugin, as given in vLLM's ``additional_config={"vtoken": {...}}``.

    Raises:
        ValueError: one sentence naming the option, its value and the remedy.
    """

    policy: str = Field(
        "snapkv",  # the smallest loss of likelihood at both budgets measured: docs/policies.md
        description="Which tokens a request may forget: the name of a policy, or 'module:Class' for one of your own.",
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the policy itself, such as decay 0.95 for h2o."
    )
    request_policies: Policies = Field(
        default_factory=dict,
        description="Further policies that a request may ask for, with their options: {'h2o': {'decay': 0.95}}, or "
        "their names alone.",
    )
    compress: Literal["all", "asked"] = Field(
        "all",
        description="Which requests are compressed: 'all' but those that set vtoken.off, or 'asked', only those that "
        "set something else of vtoken.",
    )
    budget: Budget = Field(
        0.25,
        description="Most tokens that one forward attends for a request once eviction has begun: a count of "
        "tokens, or a share of the original prompt (rounded up, never below what must be protected anyway).",
    )
    sinks: int = Field(4, ge=0, le=MOST_TOKENS, description="Leading tokens that are never evicted.")
    recent: int = Field(32, ge=0, le=MOST_TOKENS, description="Newest tokens that are never evicted.")
    grace: int = Field(
        0,
        ge=0,
        le=MOST_TOKENS,
        description="Forwards for which a generated token is never evicted, where that is longer than recent.",
    )
    protect_prefix: int = Field(
        0, ge=0, le=MOST_TOKENS, description="Leading tokens that are never evicted, where that is more than sinks."
    )
    protect_prompt: bool = Field(
        False, description="Never evict a token of the prompt: only generated tokens are forgotten."
    )
    interval: int = Field(
        1,
        ge=1,
        le=MOST_TOKENS,
        description="Evict whenever the length after the prompt reaches a multiple of this many tokens.",
    )
    observation_window: int = Field(
        32,
        ge=1,
        le=MOST_TOKENS,
        description="Last queries of a prompt that snapkv and scissorhands look at, and that h2o computes whatever is "
        "cached.",
    )
    score_interval: int = Field(
        1,
        ge=1,
        le=MOST_TOKENS,
        description="Observe attention in every so many decode steps: 1 is exact, more is cheaper.",
    )
    score_layers: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="Layers whose attention counts, by index; else all of them."
    )
    reclaim: Literal["fill", "pack", "none"] = Field(
        "fill",
        description="How holes become free blocks: 'fill' keeps every request dense; 'pack' copies sparse blocks "
        "together when memory runs short; 'none' frees a block once all its tokens are dead.",
    )
    shared_blocks: Literal["smaller", "keep"] = Field(
        "smaller",
        description="fill, with prefix caching: blocks that several requests share stay, their dead tokens masked, for "
        "as long as they are shared ('keep'), or until copying out makes the blocks held fewer ('smaller').",
    )
    theta_f: float = Field(
        0.25, ge=0.0, lt=1.0, description="pack: reclaim when more than this share of all held slots is dead or unused."
    )
    low_watermark: float = Field(
        0.25, ge=0.0, le=1.0, description="pack: reclaim when no more than this share of the pool's blocks is free."
    )
    check_interval: int = Field(
        16, ge=1, le=MOST_TOKENS, description="pack: look every so many steps whether reclaiming is due."
    )
    headroom: float = Field(
        0.02,
        gt=0.0,
        lt=1.0,
        description="pack: share of the pool's blocks that admission leaves free to copy into (rounded up).",
    )
    pack_blocks: int = Field(
        8, ge=2, le=MOST_TOKENS, description="pack: most blocks of one request that are packed at a time."
    )
    sudden_rise: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="pack: reclaim, whatever is free, as soon as F is above theta_f and has risen by this since then.",
    )
    copies: Literal["async", "inline", "force_sync"] = Field(
        "async",
        description="When tokens are copied: 'async' beside sampling and scheduling, 'inline' in order with the "
        "forwards, 'force_sync' as async, but waited for at once.",
    )
    verify: bool = Field(
        False, description="Check after each relocation that no token was lost, doubled or changed; slow."
    )
    prefill_evict: Literal["end", "chunked"] = Field(
        "end",
        description="When the prompt is reduced: 'end', once it is whole, or 'chunked', every prefill_chunk tokens, "
        "so that it never takes more than budget + prefill_chunk.",
    )
    prefill_chunk: int = Field(
        512, ge=1, le=MOST_TOKENS, description="Tokens between two evictions of a prompt where it is reduced in chunks."
    )
    history: int = Field(
        600,
        ge=0,
        le=MOST_TOKENS,
        description="Pictures of the block pool that the live page can go back to, one a second; 0 keeps none.",
    )
    record_trace: bool = Field(False, description="Keep each request's forwards and victims, for replay in tests.")
    allow_unverified: bool = Field(
        False, description="Also run where vtoken's tests have not been yet: on a GPU, or with other architectures."
    )

    def summary(self) -> str:
        """What an operator wants to see in a log: what is evicted of whom, and how blocks come back."""
        whose = "requests that ask for it are" if self.compress == "asked" else "requests are"
        kept = f"{self.budget} tokens" if isinstance(self.budget, int) else f"{self.budget:g} of their prompt"
        others = f"; requests may ask for {', '.join(self.request_policies)}" if self.request_policies else ""
        return f"{whose} kept to {kept} by policy {self.policy}, and blocks freed by '{self.reclaim}'{others}"

    @property
    def head(self) -> int:
        """Leading tokens of any request that no eviction may take."""
        return max(self.sinks, self.protect_prefix)

    @property
    def protected(self) -> int:
        """Tokens that no eviction may take, plus the room that one interval needs, for a prompt without protection."""
        return self.protected_with(0)

    def protected_with(self, prompt_length: int) -> int:
        """The same for a request with such a prompt."""
        head = max(self.head, prompt_length) if self.protect_prompt else self.head
        return head + max(self.recent, self.grace) + self.interval

    @model_validator(mode="after")
    def _options_go_together(self) -> "VTokenConfig":
        if self.score_layers == []:
            raise ValueError("option 'score_layers' = [] is refused: name at least one layer, or leave it out for all")
        if self.request_policies.get(self.policy, {}) not in ({}, self.policy_options):
            raise ValueError(
                f"option 'request_policies' gives other options to '{self.policy}' than policy_options does, which is "
                "the engine's own policy and always on offer: give them there alone"
            )
        if isinstance(self.budget, int):
            check_budget_floor(self.budget, self)
        return self


class RequestOptions(_Options):
    """What one request sets for itself, from ``SamplingParams.extra_args`` with keys ``vtoken.<option>``.

    None, or False, where it says nothing: the engine's settings hold.
    """

    policy: str | None = None
    budget: Budget | None = None
    sinks: int | None = Field(None, ge=0, le=MOST_TOKENS)
    recent: int | None = Field(None, ge=0, le=MOST_TOKENS)
    protect_prefix: int | None = Field(None, ge=0, le=MOST_TOKENS)
    protect_prompt: Flag | None = None
    off: Flag = False

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> "RequestOptions":
        """Pick the ``vtoken.`` keys and check each of them alone.

        Raises:
            ValueError: one sentence naming the option, its value and the remedy.
        """
        if REQUEST_PREFIX[:-1] in (extra_args or {}):
            raise ValueError("vtoken: a request's options are flat; write 'vtoken.budget': 256 instead of nesting.")
        options = {
            key.removeprefix(REQUEST_PREFIX): value
            for key, value in (extra_args or {}).items()
            if isinstance(key, str) and key.startswith(REQUEST_PREFIX)
        }
        for name, value in options.items():
            if value is None:
                raise ValueError(f"vtoken: option '{name}' = None is refused: leave it out for the engine's own.")
            if name in VTokenConfig.model_fields and name not in cls.model_fields:
                raise ValueError(
                    f"vtoken: option '{name}' = {value!r} is refused: a request may set {', '.join(cls.model_fields)}, "
                    "and all else is for the engine to be started with."
                )
        return cls(**options)

    @property
    def overrides(self) -> dict[str, Any]:
        """The engine's options that this request has other values for."""
        return {name: value for name, value in self if name != "off" and value is not None}

    @model_validator(mode="after")
    def _off_stands_alone(self) -> "RequestOptions":
        if self.off and self.overrides:
            others = ", ".join(f"'{name}'" for name in self.overrides)
            raise ValueError(f"option 'off' = 1 contradicts {others}: leave out one or the other")
        return self


def check_budget_floor(budget: int, config: VTokenConfig, prompt_length: int = 0) -> None:
    """Refuse a budget that the protected tokens exceed, of any request or of one with such a prompt."""
    protected = config.protected_with(prompt_length)
    if budget < protected:
        newest = "grace" if config.grace > config.recent else "recent"
        first, tokens = (
            ("protect_prefix", config.head) if config.protect_prefix > config.sinks else ("sinks", config.sinks)
        )
        if config.protect_prompt and prompt_length > config.head:
            first, tokens = "the protected prompt", prompt_length
        raise ValueError(
            f"option 'budget' = {budget} is below {first} + {newest} + interval = {tokens} + "
            f"{getattr(config, newest)} + {config.interval} = {protected}, raise the budget or protect fewer tokens"
        )
