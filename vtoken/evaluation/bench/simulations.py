"""Runs on engines without a model, in processes of their own: such an engine needs one core and nothing else."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from vtoken.evaluation.bench.base import Run
from vtoken.evaluation.bench.burner import usable_cores


def simulate(
    task: Callable[..., Run], arguments: Sequence[Mapping[str, Any]], tick: Callable[[], None], processes: int = 1
) -> list[Run]:
    """Call ``task`` once with each of these arguments, and return its results in that order.

    Args:
        task: a function of a module, which returns plain JSON values.
        arguments: by name, likewise.
        tick: called whenever one is done.
        processes: at a time; one where times are measured.

    Raises:
        Exception: what a task has raised; those not begun are then left out.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        futures: list[Future[Run]] = [pool.submit(task, **one) for one in arguments]
        try:
            for future in as_completed(futures):
                future.result()
                tick()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def cores() -> int:
    """That this process may use."""
    return len(usable_cores())


def _prepare() -> None:
    """Before vLLM is imported: one thread is enough, and what vLLM says about speed is about a model."""
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    logging.getLogger("vllm").setLevel(logging.ERROR)  # where vLLM is told not to configure it
