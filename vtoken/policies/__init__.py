"""Eviction policies: one small file each, and a way to look them up, your own included."""

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Iterable
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from vtoken.config import VTokenConfig
from vtoken.policies.base import ALL, Needs, Observation, Policy, PolicyBatch
from vtoken.policies.h2o import H2O
from vtoken.policies.key_norm import KeyNorm
from vtoken.policies.random import Random
from vtoken.policies.scissorhands import Scissorhands
from vtoken.policies.snapkv import SnapKV
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.policies.tova import TOVA

POLICIES: dict[str, type[Policy]] = {
    "h2o": H2O,
    "key_norm": KeyNorm,
    "random": Random,
    "scissorhands": Scissorhands,
    "snapkv": SnapKV,
    "streaming_llm": StreamingLLM,
    "tova": TOVA,
}
ENGINE_OPTION = "observation_window"
"""A policy's field of this name takes the engine's option."""

__all__ = [
    "ALL",
    "POLICIES",
    "Needs",
    "Observation",
    "Policy",
    "PolicyBatch",
    "check_settings",
    "load_policies",
    "load_policy",
]


def load_policy(config: VTokenConfig) -> Policy:
    """The policy that ``config.policy`` names, with ``config.policy_options``, if the settings suit it.

    Raises:
        ValueError: one sentence for the user, about the name, an option, or the settings.
    """
    policy = make_policy(config)
    check_settings(policy, config)
    return policy


def load_policies(config: VTokenConfig) -> dict[str, Policy]:
    """The engine's own policy, and then those that requests may ask for beside it, by name.

    Whether the settings suit one of the latter depends on the request that asks for it.

    Raises:
        ValueError: as ``load_policy``.
    """
    others = {name: options for name, options in config.request_policies.items() if name != config.policy}
    return {config.policy: load_policy(config)} | {
        name: make_policy(config.model_copy(update={"policy": name, "policy_options": options}))
        for name, options in others.items()
    }


def make_policy(config: VTokenConfig) -> Policy:
    """As ``load_policy``, whatever the other settings are."""
    policy_class = _own_class(config.policy) if ":" in config.policy else _built_in(config.policy)
    policy = _instance(policy_class, config)
    try:
        needs = policy.needs
    except ValueError as error:
        raise ValueError(f"vtoken: what policy '{config.policy}' needs is refused: {error}.") from None
    if not isinstance(needs, Needs):
        raise ValueError(
            f"vtoken: 'needs' of policy '{config.policy}' is {needs!r}; return vtoken.policies.Needs(...)."
        )
    if needs.attention and policy_class.observe is Policy.observe:
        raise ValueError(f"vtoken: policy '{config.policy}' asks for attention; give its class a method 'observe'.")
    return policy


def check_settings(policy: Policy, config: VTokenConfig) -> None:
    """Refuse settings that a policy cannot take.

    A policy may have a method ``check(config)`` that raises ValueError, in one clause, for those.

    Raises:
        ValueError: one sentence for the user.
    """
    try:
        policy.check(config)
    except ValueError as error:
        raise ValueError(f"vtoken: {error}.") from None
    if policy.needs.decode_queries and max(config.recent, config.grace) < config.score_interval - 1:
        raise ValueError(
            f"vtoken: option 'score_interval' = {config.score_interval} is refused: a new token could be evicted "
            f"before any query was observed for it; set recent to at least {config.score_interval - 1}."
        )


def _built_in(name: str) -> type[Policy]:
    if name in POLICIES:
        return POLICIES[name]
    hint = _did_you_mean(name, POLICIES) or (
        f"the policies are {', '.join(sorted(POLICIES))}, and 'module:Class' is one of your own."
    )
    raise ValueError(f"vtoken: unknown policy '{name}'; {hint}")


def _own_class(name: str) -> type[Policy]:
    """The class that "module:Class" means, checked to be a policy."""
    module_name, _, class_name = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        raise ValueError(f"vtoken: policy '{name}' is not of the form 'module:Class', such as 'my_policies:MaxMass'.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            hint = f"there is no module '{missing}'; put its directory on PYTHONPATH."
        else:
            reason = " ".join(str(error).split())
            hint = f"importing '{module_name}' raised {type(error).__name__} ({reason}); correct that module."
        raise ValueError(f"vtoken: policy '{name}' was not found: {hint}") from error
    found = getattr(module, class_name, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        hint = _did_you_mean(class_name, classes) or "write the name of the class after the colon."
        raise ValueError(f"vtoken: policy '{name}' was not found: '{module_name}' has no '{class_name}'; {hint}")
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(f"vtoken: policy '{name}' is no policy; derive it from vtoken.policies.Policy.")
    if inspect.isabstract(found):
        raise ValueError(f"vtoken: policy '{name}' says nothing about priorities; give its class a method 'priority'.")
    if "__dataclass_fields__" not in vars(found):
        raise ValueError(f"vtoken: policy '{name}' is no dataclass; put @dataclass(frozen=True) above its class.")
    return found


def _instance(policy_class: type[Policy], config: VTokenConfig) -> Policy:
    """The policy with its options, each checked against the type of its field."""
    fields = {field.name: field for field in dataclasses.fields(policy_class) if field.init}  # type: ignore[arg-type]
    names, given = [name for name in fields if name != ENGINE_OPTION], dict(config.policy_options)
    known = f"its options are {', '.join(names)}" if names else "it has no options"
    types = get_type_hints(policy_class, include_extras=True)
    for name, value in given.items():
        if name == ENGINE_OPTION and name in fields:
            raise ValueError(f"vtoken: option '{name}' is the engine's; set it beside policy_options, not in it.")
        if name not in names:
            hint = _did_you_mean(name, names) or f"{known}."
            raise ValueError(f"vtoken: unknown option '{name}' of policy '{config.policy}'; {hint}")
        try:
            given[name] = TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            message = error.errors()[0]["msg"].replace("Input should", "it should", 1)
            raise ValueError(
                f"vtoken: option '{name}' = {value!r} of policy '{config.policy}' is refused: {message}; {known}."
            ) from None
    for name in names:
        field = fields[name]
        if name not in given and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"vtoken: policy '{config.policy}' needs the option '{name}'; set it in policy_options.")
    if ENGINE_OPTION in fields:
        given[ENGINE_OPTION] = config.observation_window
    try:
        return policy_class(**given)
    except ValueError as error:
        raise ValueError(
            f"vtoken: policy_options = {config.policy_options!r} are refused by policy '{config.policy}': {error}."
        ) from None


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close: list[Any] = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean '{close[0]}'?" if close else ""
