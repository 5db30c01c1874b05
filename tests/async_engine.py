"""Real engines whose results come one step late: vLLM's own queue of steps, over a CPU runner that answers at once.

On a CPU vLLM has no asynchronous scheduling. Here it is switched on once the platform has switched it off, for
scheduler and engine core; the runner stays as it is, and appends its own tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engines import running

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin import compat, plugin


@contextmanager
def running_late(model: Path, vtoken: VTokenConfig, **engine_args: Any) -> Iterator[Any]:
    """An engine with asynchronous scheduling that is shut down afterwards."""
    configure, init = plugin.configure, compat.VTokenCPUModelRunner.__init__

    def configure_late(vllm_config: Any, options: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        configure(vllm_config, options)

    def init_at_once(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = False
        try:
            init(self, vllm_config, *args, **kwargs)
        finally:
            vllm_config.scheduler_config.async_scheduling = True

    with (
        patch.object(plugin, "configure", configure_late),
        patch.object(compat.VTokenCPUModelRunner, "__init__", init_at_once),
        running(model, vtoken, **engine_args) as engine,
    ):
        core = engine.llm_engine.engine_core.engine_core
        assert core.step_fn == core.step_with_batch_queue and core.batch_queue_size == 2
        assert type(core.scheduler) is compat.VTokenAsyncScheduler
        yield engine
