"""The front end's view of the engines: what their workers tell when they are asked between two steps."""

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from vtoken.core.history import Recording
from vtoken.vllm_plugin.monitor import Counts

logger = init_logger(f"vllm.{__name__}")

PATIENCE = 2.0
"""Seconds to wait for counts before the last ones are told again: a long step keeps an engine from answering."""


class Watch:
    """Asks the workers of all engines that a front end has.

    Args:
        client: vLLM's ``EngineClient``.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._asking: asyncio.Task[list[Counts]] | None = None
        self._known: list[Counts] = []
        self._since = 0.0

    @property
    def model_name(self) -> str:
        """As vLLM's metrics have it."""
        name: str = self._client.vllm_config.model_config.served_model_name
        return name

    @property
    def age(self) -> float:
        """Seconds since the counts that were told last were true."""
        return asyncio.get_running_loop().time() - self._since if self._known else 0.0

    async def counts(self, patience: float = PATIENCE) -> list[Counts]:
        """Of each engine, as of now or, where the engines do not answer in time, of when they last did."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_counts())
        await asyncio.wait({self._asking}, timeout=patience)
        return self._known

    async def recordings(self, since: Sequence[int]) -> list[Recording]:
        """What engines have recorded. Raises what vLLM raises if one of them is dead.

        Args:
            since: the number of the last frame known of each engine; all frames of those that are not named.
        """
        told = await self._ask("recall_vtoken", list(since))
        names = [f"engine {n}" for n in range(len(told))] if len(told) > 1 else ["engine"]
        return [Recording(**{**workers[0], "name": name}) for name, workers in zip(names, told, strict=True)]

    async def _ask_counts(self) -> list[Counts]:
        try:
            told = await self._ask("count_vtoken")
        except Exception:
            logger.exception("vtoken: the engine does not tell its counts.")
            self._known = []  # an engine that is dead holds nothing
            return []
        self._known = [_of_engine([Counts(**worker) for worker in workers]) for workers in told]
        self._since = asyncio.get_running_loop().time()
        return self._known

    async def _ask(self, method: str, *args: Any) -> list[list[dict[str, Any]]]:
        """The answer of each worker of each engine."""
        if self._client.vllm_config.parallel_config.data_parallel_size == 1:
            return [await self._client.collective_rpc(method, args=args)]
        # Of several engines collective_rpc passes on the first one's answer alone.
        answers: list[list[dict[str, Any]]] = await self._client.engine_core.call_utility_all_async(
            "collective_rpc", method, None, args, {}
        )
        return answers


def _of_engine(workers: list[Counts]) -> Counts:
    """Workers of one engine do the same, each with its own heads: only bytes add up."""
    copied = sum(worker.copied_bytes for worker in workers)
    return Counts(**{**workers[0].to_json(), "copied_bytes": copied})
