"""The only room that imports vLLM. ``make_engine`` is what the rooms above need of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtoken.vllm_plugin.engine import Engine, PoolSnapshot, Progress, make_engine
    from vtoken.vllm_plugin.simulated_engine import SimulatedEngine, SimulatedStep, make_simulated_engine

__all__ = [
    "Engine",
    "PoolSnapshot",
    "Progress",
    "SimulatedEngine",
    "SimulatedStep",
    "make_engine",
    "make_simulated_engine",
]

_SIMULATED = ("SimulatedEngine", "SimulatedStep", "make_simulated_engine")


def __getattr__(name: str) -> Any:
    # vLLM takes seconds to import and may be missing: both only matter to those who ask for an engine.
    if name in __all__:
        module = "simulated_engine" if name in _SIMULATED else "engine"
        return getattr(import_module(f"vtoken.vllm_plugin.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
