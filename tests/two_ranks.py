"""Runs engines of two tensor-parallel ranks, one after the other, and prints what they did as JSON.

A program of its own: the ranks are forked from it, which spares each of them a minute of imports, and a process that
has run an engine or OpenMP threads must not be forked. Reads ``[groups, runs]`` from stdin, see ``compile_kernels`` and
``Run``, and prints the rounds of each run as a line of JSON.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from engines import Job, generate, running

from vtoken.config import VTokenConfig


@dataclass(frozen=True)
class Run:
    """One engine: its model, vtoken's options (None: native), vLLM's, and what it is asked, once per round.

    A round is the name of what is done to rank 1 before (see ``Harm``), or None.
    """

    model: str
    jobs: list[list[Any]]
    vtoken: dict[str, Any] | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    rounds: list[str | None] = field(default_factory=lambda: [None])
    logprobs: int | None = None


class Harm:
    """Each is run in every worker, and spoils rank 1, once: the next time that the first request can be hurt."""

    @staticmethod
    def other_victim(worker: Any) -> int:
        """Rank 1 evicts another token than the one that it is told to."""
        ours = worker.model_runner.vtoken
        stock = ours._choose_victims

        def choose(dying: Any) -> Any:
            victims = stock(dying)
            name = ours._plan.req_ids[int(dying[0])]
            if ours._plan.counts.evict[dying[0]] == 1:
                ours._choose_victims = stock
                victims[0] = next(token for token in ours.table.live_tokens(name) if token != victims[0])
            return victims

        if worker.rank == 1:
            ours._choose_victims = choose
        return worker.rank

    @staticmethod
    def failed_copy(worker: Any) -> int:
        """Some tokens do not arrive on rank 1, which knows it."""
        from vtoken.kernels.copy_engine import CopyFailed

        def launch(sources: Any, destinations: Any) -> None:
            if len(sources) > 2:
                copies.launch = stock
                raise CopyFailed(destinations) from OSError("no such memory")
            stock(sources, destinations)

        copies = worker.model_runner.vtoken._copies
        stock = copies.launch
        if worker.rank == 1:
            copies.launch = launch
        return worker.rank

    @staticmethod
    def swapped_copy(worker: Any) -> int:
        """Two tokens change places on rank 1, and nobody says so."""

        def launch(sources: Any, destinations: Any) -> None:
            if len(sources) > 2:
                copies.launch = stock
                destinations = np.concatenate([destinations[1::-1], destinations[2:]])
            stock(sources, destinations)

        copies = worker.model_runner.vtoken._copies
        stock = copies.launch
        if worker.rank == 1:
            copies.launch = launch
        return worker.rank

    @staticmethod
    def other_epoch(worker: Any) -> int:
        """Rank 1 counts another eviction than the scheduler, and refuses the request."""
        ours = worker.model_runner.vtoken
        stock = ours.place_tokens

        def place_tokens(*args: Any) -> Any:
            row = int(ours.table.find_rows(ours._plan.req_ids[:1])[0])
            if ours.table.epoch[row] == 3:
                ours.place_tokens = stock
                ours.table.epoch[row] = 4
            return stock(*args)

        if worker.rank == 1:
            ours.place_tokens = place_tokens
        return worker.rank

    @staticmethod
    def exception(worker: Any) -> int:
        """Rank 1 breaks off after its last collective of a step, of which nobody but its log is told."""

        def reclaim(due: Any) -> Any:
            raise OSError("rank 1 only")

        if worker.rank == 1:
            worker.model_runner.vtoken._reclamation.reclaim = reclaim
        return worker.rank


def run(wanted: Run) -> list[dict[str, Any]]:
    """What each round was answered, or the sentence with which it ended the engine."""
    config = None if wanted.vtoken is None else VTokenConfig(record_trace=True, **wanted.vtoken)
    engine_args = {"skip_tokenizer_init": True, "tensor_parallel_size": 2, **wanted.engine_args}
    results = []
    with running(Path(wanted.model), config, **engine_args) as engine:
        rpc = engine.llm_engine.collective_rpc
        for harm in wanted.rounds:
            if harm is not None:
                assert rpc(getattr(Harm, harm)) == [0, 1]
            try:
                results.append(_round(engine, wanted))
            except Exception as failure:
                results.append({"failure": str(failure)})
                break
    return results


def _round(engine: Any, wanted: Run) -> dict[str, Any]:
    errors: dict[str, str] = {}
    with _errors_into(errors, engine):
        answers = generate(engine, [Job(*job) for job in wanted.jobs], wanted.logprobs)
    result = {
        "tokens": {name: answer.token_ids for name, answer in answers.items()},
        "logits": {name: answer.logits for name, answer in answers.items()},
        "errors": errors,
    }
    if wanted.vtoken is not None:
        traces = engine.llm_engine.collective_rpc("take_vtoken_traces")
        result["traces"] = [{engine._external_id[name]: trace for name, trace in each.items()} for each in traces]
        result["moved"] = engine.snapshot().tokens_moved
    return result


@contextmanager
def _errors_into(errors: dict[str, str], engine: Any) -> Iterator[None]:
    """Collect every error that the answering rank reports."""
    scheduler = getattr(engine._scheduler, "vtoken", None)
    if scheduler is None:
        yield
        return
    stock = scheduler.settle

    def settle(plan: Any, report: Any) -> dict[str, str]:
        errors.update({engine._external_id[name]: text for name, text in report.errors.items()})
        return stock(plan, report)

    scheduler.settle = settle
    try:
        yield
    finally:
        scheduler.settle = stock


def compile_kernels(groups: list[int]) -> None:
    """Compile what looks at attention, by query heads per KV head, before the ranks are forked, and not in each."""
    import torch

    from vtoken.kernels.cpu.observer import AttentionObserver
    from vtoken.kernels.layout import vec_views

    block_size, head_size = 32, 32
    for group in groups:
        views = vec_views(torch.zeros(1, 1, block_size, 2 * head_size))
        AttentionObserver(*views, num_query_heads=group, num_layers=1, scale=1.0, holes=True)


def main() -> None:
    import vllm.model_executor.models.llama  # noqa: F401
    from vllm.v1.executor import multiproc_executor

    import vtoken.vllm_plugin.compat  # noqa: F401

    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # whoever started us may be bound to one core
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    answers, sys.stdout = sys.stdout, sys.stderr
    groups, runs = json.load(sys.stdin)
    compile_kernels(groups)
    for wanted in runs:
        print(json.dumps(run(Run(**wanted))), file=answers, flush=True)


if __name__ == "__main__":
    main()
