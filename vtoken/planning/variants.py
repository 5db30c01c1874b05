"""The same workload under native vLLM, naive eviction and vtoken, each in a process of its own."""

import gc
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from queue import Empty
from typing import Any, Literal

from vtoken.config import VTokenConfig
from vtoken.core.budget import resolve_budget
from vtoken.evaluation.bench.simulations import cores
from vtoken.planning.pool import Pool
from vtoken.planning.prefixes import PrefixHashes
from vtoken.planning.replay import Observed, replay
from vtoken.planning.step_time import StepTime
from vtoken.planning.summary import at_once, queue, series
from vtoken.planning.trace import Workload

VARIANTS: dict[str, Literal["none", "fill"] | None] = {"native": None, "none": "none", "fill": "fill"}
"""By name, the way of reclaiming; None for vLLM without vtoken."""
PHASES = ("trace", "at once")
SLOWEST_FIRST = ("none", "fill", "native")
LISTEN_SECONDS = 0.2
FEWEST_AT_ONCE, MOST_AT_ONCE, TIMES_OVER = 64, 4000, 3

_progress: Any = None  # of a process that works: where it says how far it is

Ticks = Callable[[str, str, int], None]
"""variant, phase, output tokens since the last time"""


@dataclass(frozen=True)
class Setting:
    """All that the variants have in common, and what vtoken is told."""

    vtoken: dict[str, Any]
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    step_time: StepTime

    def config(self, variant: str) -> VTokenConfig | None:
        """What vtoken is told in a variant."""
        reclaim = VARIANTS[variant]
        return VTokenConfig(**self.vtoken, reclaim=reclaim) if reclaim else None

    def limited_by_blocks_alone(self, requests: int) -> "Setting":
        """The same, where so many requests may run, and a step may compute all that the pool holds."""
        most = max(self.num_blocks * self.block_size, requests, self.max_num_batched_tokens)
        return replace(self, max_num_seqs=requests, max_num_batched_tokens=most)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def processes() -> int:
    """How many to run at a time: each needs a core."""
    return min(cores(), len(VARIANTS))


def sample_size(workload: Workload, config: VTokenConfig, pool: Pool) -> int:
    """Requests that it takes to see how many fit: enough to take the pool's place several times over.

    Raises:
        ValueError: one clause, for a budget that one of them cannot have.
    """
    kept = [min(arrival.total, resolve_budget(config, arrival.prompt)) for arrival in workload.arrivals]
    fewest = sum(-(-tokens // pool.block_size) for tokens in kept)
    fit = pool.num_blocks * len(workload.arrivals) // fewest
    return min(max(TIMES_OVER * fit, FEWEST_AT_ONCE), MOST_AT_ONCE)


def run_all(
    setting: Setting, workloads: Mapping[str, Workload], ticks: Ticks, at_a_time: int
) -> dict[str, dict[str, Any]]:
    """Replay the workload of each phase under each variant.

    Args:
        workloads: by phase, "trace" and "at once".
        ticks: told about progress.
        at_a_time: processes.

    Returns:
        by variant and phase, what ``summary`` makes of it; "series" is that of the trace.

    Raises:
        Exception: what a process has raised; those not begun are then left out.
    """
    context = get_context("spawn")
    said = context.Queue()
    with ProcessPoolExecutor(at_a_time, mp_context=context, initializer=_prepare, initargs=(said,)) as pool:
        futures: dict[Future[dict[str, Any]], str] = {
            pool.submit(_run, setting, variant, phase, workloads[phase]): variant
            for phase in PHASES
            for variant in SLOWEST_FIRST
        }
        try:
            running = set(futures)
            while running:
                done, running = wait(running, timeout=LISTEN_SECONDS, return_when="FIRST_COMPLETED")
                for future in done:
                    future.result()
                _pass_on(said, ticks)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        _pass_on(said, ticks)
    found: dict[str, dict[str, Any]] = {variant: {} for variant in VARIANTS}
    for future, variant in futures.items():
        found[variant] |= future.result()
    return found


def make_engine(setting: Setting, variant: str, workload: Workload) -> Any:
    """The engine of a variant, for these requests. Raises ValueError, in one sentence, for settings it refuses."""
    from vtoken.vllm_plugin import make_simulated_engine

    hasher = PrefixHashes(workload.arrivals, setting.block_size) if setting.enable_prefix_caching else None
    return make_simulated_engine(
        setting.config(variant),
        num_blocks=setting.num_blocks,
        block_size=setting.block_size,
        max_model_len=setting.max_model_len,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        enable_prefix_caching=setting.enable_prefix_caching,
        block_hasher=hasher,
        counting=True,
    )


def _pass_on(said: Any, ticks: Ticks) -> None:
    while True:
        try:
            ticks(*said.get_nowait())
        except Empty:
            return


def _prepare(said: Any) -> None:
    """Before vLLM is imported: one thread is enough, and what vLLM says about speed is about a model."""
    global _progress  # noqa: PLW0603 - what an initializer is for
    _progress = said
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    logging.getLogger("vllm").setLevel(logging.ERROR)  # where vLLM is told not to configure it


def _run(setting: Setting, variant: str, phase: str, workload: Workload) -> dict[str, Any]:
    if phase == "at once":
        setting = setting.limited_by_blocks_alone(len(workload.arrivals))
    engine = make_engine(setting, variant, workload)
    gc.collect()
    gc.freeze()  # as vLLM does when it has started
    seen: Observed = replay(engine, workload, setting.step_time, lambda tokens: _progress.put((variant, phase, tokens)))
    gc.unfreeze()
    if phase == "at once":
        return {"at_once": at_once(seen)}
    return {"queue": queue(seen, workload), "series": series(seen.steps)}
