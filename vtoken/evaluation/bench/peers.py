"""Peers: the same model, prompts and blocks under native vLLM, vtoken, and OpenVINO GenAI with its cache eviction."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench import peers_report as report
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import Bench
from vtoken.evaluation.bench.load import RUN_LOAD, as_arguments
from vtoken.evaluation.bench.openvino_engine import Eviction, OpenVINOEngine, PipelineSpec, check_interpreter, export
from vtoken.evaluation.bench.tables import Table
from vtoken.evaluation.plan import BLOCK_SIZE
from vtoken.evaluation.workloads import Workload, needle_requests
from vtoken.vllm_plugin.compiler import missing_compiler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPEATS_OF_MOST = 3
"""At the largest batch, where a run takes over a minute."""
FULL_REQUESTS = 5
START, RECENT, WINDOW = 32, 128, 8  # OpenVINO's own defaults; start and recent in whole blocks
OPENVINO_BATCHED_TOKENS = 256  # its default
OURS: dict[str, dict[str, Any]] = {
    "streaming_llm": {"policy": "streaming_llm"},
    # What OpenVINO ranks by: attention of the prompt's last queries, then what each new query adds.
    "snapkv": {"policy": "snapkv", "sinks": START, "recent": RECENT, "observation_window": WINDOW},
}

Go = Callable[[Sequence[Workload]], dict[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """Tokens of each request, the budget, and how many requests come at once."""

    prompt: int
    outputs: int
    budget: int
    batches: Sequence[int]

    @property
    def num_blocks(self) -> int:
        return FULL_REQUESTS * -(-(self.prompt + self.outputs) // BLOCK_SIZE)

    @property
    def middle(self) -> int:
        """The batch at which the single looks are taken."""
        return self.batches[len(self.batches) // 2]


FULL = Sizes(prompt=1000, outputs=256, budget=512, batches=(8, 16, 32))
QUICK = Sizes(prompt=448, outputs=24, budget=256, batches=(6,))


class Peers(Experiment):
    """All requests of a batch come at once; every engine decides by itself how many of them run."""

    name: ClassVar[str] = "peers"
    question: ClassVar[str] = (
        "On the same few blocks, how much does vtoken produce beside native vLLM and beside OpenVINO GenAI, which has "
        "a cache eviction of its own?"
    )
    in_all: ClassVar[bool] = False

    def measure(self, bench: Bench) -> list[Run]:
        sizes = QUICK if bench.quick else FULL
        python = check_interpreter(bench.openvino)
        with bench.console.status("exporting the model to OpenVINO's format"):
            model = str(export(python, bench.model))
        works = bench.requests.exactly(max(sizes.batches), sizes.prompt, sizes.outputs)
        with ExitStack() as stack:
            runs, engines = [], {}
            with bench.progress("peers: starting engines", len(report.VARIANTS)) as tick:
                for variant in report.VARIANTS:
                    if variant in OURS or variant in (report.NATIVE, report.AGAIN):
                        go, about = _vllm(bench, variant, sizes)
                    else:
                        go, about = _openvino(stack, python, model, variant, sizes)
                    engines[variant] = go
                    runs.append({"kind": "engine", "variant": variant, **vars(sizes), **about})
                    tick()
            # First, so that the timed runs find every engine warm.
            runs += _looks(bench, sizes, works[: min(sizes.batches)], engines)
            for batch in sizes.batches:
                of_most = batch == max(sizes.batches) and not bench.quick and not bench.wanted_repeats
                repeats = REPEATS_OF_MOST if of_most else bench.repeats
                turns = bench.interleaved(report.measured_at(batch, sizes.batches), f"peers: batch {batch}", repeats)
                for repeat, variant in turns:
                    found = engines[variant](works[:batch])
                    if batch != sizes.middle or repeat:
                        del found["outputs"]
                    runs.append({"kind": "timed", "variant": variant, "batch": batch, "repeat": repeat, **found})
            return runs

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        return report.tables(runs)

    def figure(self, runs: Sequence[Run]) -> "Figure":
        return report.figure(runs)

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        return report.checks(runs)


def _looks(bench: Bench, sizes: Sizes, works: Sequence[Workload], engines: dict[str, Go]) -> list[Run]:
    """Prompts alone, and hidden numbers: once for each variant."""
    prompts = [replace(work, max_tokens=1) for work in works]
    tokenizer, shorter = bench.requests.tokenizer, sizes.prompt * 3 // 4
    needles = [
        replace(needle, request_id=f"{length}-{needle.request_id}")
        for length in (sizes.prompt, shorter)
        for needle in needle_requests(tokenizer, length, seed=length)
    ]
    runs = []
    variants = [variant for variant in engines if variant != report.AGAIN]
    with bench.progress("peers: prompts alone, and needles", 2 * len(variants)) as tick:
        for variant in variants:
            outputs = engines[variant](needles)["outputs"]
            hits = sum(
                any(answer in tokenizer.decode(outputs[needle.request_id]) for answer in needle.answers or [])
                for needle in needles
            )
            runs.append({"kind": "needles", "variant": variant, "needles": len(needles), "found": hits})
            tick()
            # After the needles, which leave the engine warm.
            found = engines[variant](prompts)
            about = {"requests": len(prompts), "tokens": sum(len(work.prompt_token_ids) for work in prompts)}
            runs.append({"kind": "prompts", "variant": variant, "seconds": found["seconds"], **about})
            tick()
    return runs


def _vllm(bench: Bench, variant: str, sizes: Sizes) -> tuple[Go, dict[str, Any]]:
    """Native vLLM, or vLLM with vtoken, compiled where a compiler is at hand."""
    config = VTokenConfig(budget=sizes.budget, **OURS[variant]) if variant in OURS else None
    engine = bench.engine(
        config,
        num_blocks=sizes.num_blocks,
        max_model_len=-(-(sizes.prompt + sizes.outputs) // BLOCK_SIZE) * BLOCK_SIZE,
        copy=int(variant == report.AGAIN),
        max_num_seqs=max(sizes.batches),
        enforce_eager=missing_compiler() is not None,
    )

    def go(works: Sequence[Workload]) -> dict[str, Any]:
        found: dict[str, Any] = engine.do(RUN_LOAD, workloads=as_arguments(works), outputs=True)
        return {name: value for name, value in found.items() if name not in ("tpot_ms", "ttft_ms")}

    args = engine.spec.engine_args
    return go, {
        "num_blocks": engine.num_blocks,
        "bytes_per_block": args["kv_cache_memory_bytes"] // args["num_gpu_blocks_override"],
        "settings": config.model_dump(exclude_defaults=True) if config else {},
    }


def _openvino(stack: ExitStack, python: Any, model: str, variant: str, sizes: Sizes) -> tuple[Go, dict[str, Any]]:
    """OpenVINO GenAI, in float32 and with the same number of blocks."""
    spec = PipelineSpec(
        model=model,
        num_blocks=sizes.num_blocks,
        max_num_seqs=max(sizes.batches),
        max_num_batched_tokens=OPENVINO_BATCHED_TOKENS,
        threads=len(os.sched_getaffinity(0)),
        kv_cache_precision="u8" if variant == report.OPENVINO_U8 else "f32",
        eviction=None if variant == report.OPENVINO else Eviction(START, RECENT, sizes.budget),
    )
    engine = OpenVINOEngine(python, spec)
    stack.callback(engine.close)
    return engine.run, {**engine.about, "settings": {**spec.to_json(), "model": None}}
