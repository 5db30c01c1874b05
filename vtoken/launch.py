"""vLLM's arguments for an engine with vtoken, from one flat list of options."""

from typing import Any

NAME = "vtoken"
"""Our name among vLLM's plugins, and our key in its ``additional_config``."""


def engine_args(model: str, **options: Any) -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM`` and ``vllm.EngineArgs``: ``LLM(**engine_args("MODEL", budget=512))``.

    Args:
        model: directory or name, as vLLM takes it.
        options: vtoken's settings (``VTokenConfig``) by name, and any others for vLLM, side by side.

    Raises:
        ValueError: one sentence, for a setting of vtoken that is refused.
    """
    from vtoken.config import VTokenConfig

    settings = {name: value for name, value in options.items() if name in VTokenConfig.model_fields}
    others = {name: value for name, value in options.items() if name not in settings}
    return {"model": model, **others, "additional_config": with_settings(others.get("additional_config"), settings)}


def with_settings(additional_config: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    """vLLM's ``additional_config`` with vtoken's settings in it.

    Raises:
        ValueError: one sentence, for settings that are refused, or that are there already.
    """
    from vtoken.config import VTokenConfig
    from vtoken.policies import load_policies

    given = dict(additional_config or {})
    if NAME in given and settings:
        raise ValueError(
            f"vtoken: option '{next(iter(settings))}' and additional_config['{NAME}'] = {given[NAME]!r} are both "
            "given; put all settings into one of the two."
        )
    wanted = given.get(NAME, settings)
    if not isinstance(wanted, VTokenConfig):
        load_policies(VTokenConfig(**wanted))
    return {**given, NAME: wanted}
