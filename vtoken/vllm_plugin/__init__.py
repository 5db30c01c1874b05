"""The only room that imports vLLM. ``make_engine`` is what the rooms above need of it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtoken.vllm_plugin.engine import Engine, PoolSnapshot, Progress, make_engine

__all__ = ["Engine", "PoolSnapshot", "Progress", "make_engine"]


def __getattr__(name: str) -> Any:
    # vLLM takes seconds to import and may be missing: both only matter to those who ask for an engine.
    if name in __all__:
        from vtoken.vllm_plugin import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
