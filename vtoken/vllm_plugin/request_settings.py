"""What holds for one request: the engine's settings, and what it sets for itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vtoken.config import RequestOptions, VTokenConfig
from vtoken.core.budget import cadence_of, resolve_budget
from vtoken.core.cadence import Cadence
from vtoken.policies import Policy, check_settings, load_policies

REMEMBERED = 1024
"""Sets of options that need not be validated again when another request comes with the same."""


@dataclass(frozen=True)
class Terms:
    """On which terms a request is served.

    Attributes:
        config: the engine's settings with the request's own in their place.
        policy: place of its policy among those on offer.
        cadence: when it is reduced and observed.
        compressed: whether it is reduced at all.
    """

    config: VTokenConfig
    policy: int
    cadence: Cadence
    compressed: bool

    def budget(self, prompt_length: int) -> int:
        """In tokens; 0 if it is never reduced.

        Raises:
            ValueError: one sentence, for a count of tokens that such a prompt's protected tokens exceed.
        """
        if not self.compressed:
            return 0
        try:
            return resolve_budget(self.config, prompt_length)
        except ValueError as error:
            raise ValueError(f"vtoken: {error}.") from None


class RequestSettings:
    """The terms that an engine offers.

    Args:
        config: the engine's settings.

    Attributes:
        policies: those on offer, by name, the engine's own first.

    Raises:
        ValueError: one sentence, for a policy that cannot be had.
    """

    def __init__(self, config: VTokenConfig) -> None:
        self.config = config
        self.policies: dict[str, Policy] = load_policies(config)
        # Typed: a budget of 1 is a token, and one of 1.0 the whole prompt.
        self._own_terms = lru_cache(REMEMBERED, typed=True)(self._make_terms)
        self._engines = self._make_terms()

    def terms(self, extra_args: Mapping[str, Any] | None) -> Terms:
        """On which terms a request with these ``extra_args`` is served.

        Raises:
            ValueError: one sentence naming the option, its value and the remedy.
        """
        options = RequestOptions.from_extra_args(extra_args)
        if options.overrides:
            return self._own_terms(**options.overrides)
        if options.off or self.config.compress == "asked":
            return Terms(self.config, 0, self._engines.cadence, compressed=False)
        return self._engines

    def _make_terms(self, **overrides: Any) -> Terms:
        name = overrides.get("policy", self.config.policy)
        if name not in self.policies:
            raise ValueError(
                f"vtoken: option 'policy' = '{name}' is not on offer; ask for {' or '.join(self.policies)}, or start "
                f"the engine with it among its request_policies."
            )
        if name != self.config.policy:
            overrides["policy_options"] = self.config.request_policies[name]
        config = VTokenConfig(**{**self.config.model_dump(), "request_policies": {}, **overrides})
        policy = self.policies[name]
        check_settings(policy, config)
        needs = policy.needs
        cadence = cadence_of(config, needs.prompt_queries, needs.decode_queries, needs.computed_queries)
        return Terms(config, list(self.policies).index(name), cadence, compressed=True)
