"""``vtoken plan``."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vtoken.cli_bench import TABLE_WIDTH
from vtoken.cli_options import OF_SERVERS, settings_options

POLICY = "random"
OF_A_REAL_ENGINE = (
    *OF_SERVERS,
    "policy",
    "reclaim",
    "observation_window",
    "score_interval",
    "score_layers",
    "theta_f",
    "low_watermark",
    "check_interval",
    "headroom",
    "pack_blocks",
    "sudden_rise",
    "copies",
    "verify",
    "record_trace",
    "history",
    "allow_unverified",
)
"""Options of vtoken that a plan has no use for, or sets itself."""
GPU_PANEL, ENGINE_PANEL = "The GPU, and how fast it is", "The engine, as for vLLM"
STAND_IN = (
    "Policies that look at attention cannot be simulated. How many blocks vtoken frees does not depend on which tokens "
    "die, unless requests share them; with naive eviction it does, and '{policy}' stands in for yours: {how}."
)
HOW = {
    "random": "victims are scattered, as those of H2O and SnapKV are",
    "streaming_llm": "victims are the oldest tokens, the best case for whole blocks",
}


def _on(panel: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **options)


@settings_options(without=OF_A_REAL_ENGINE)
def plan(
    settings: dict[str, Any],
    model: Annotated[str, typer.Argument(help="A model's config.json, its directory, or a Hugging Face name.")],
    workload: Annotated[
        Path,
        typer.Argument(
            help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens; or JSON lines with input_length, output_length "
            "and perhaps timestamp (ms) and hash_ids (of 512-token chunks)."
        ),
    ],
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    speed_up: Annotated[float, typer.Option(min=0.001, help="They arrive so many times as fast.")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the queue over time: .png, .svg or .pdf.")] = None,
    gpu: Annotated[str, _on(GPU_PANEL, help="A10G, L4, L40S, A100-40, A100-80, H100 or H200.")] = "A100-80",
    memory: Annotated[float | None, _on(GPU_PANEL, min=0.1, help="GiB, instead of the data sheet's.")] = None,
    bandwidth: Annotated[float | None, _on(GPU_PANEL, min=1, help="GB/s of its memory, likewise.")] = None,
    flops: Annotated[float | None, _on(GPU_PANEL, min=0.1, help="Dense TFLOP/s, likewise.")] = None,
    efficiency: Annotated[float, _on(GPU_PANEL, min=0.01, max=1, help="Share of both that is reached.")] = 0.6,
    step_overhead: Annotated[float, _on(GPU_PANEL, min=0, help="ms per step beside that.")] = 1.0,
    blocks: Annotated[int | None, _on(ENGINE_PANEL, min=1, help="Blocks, instead of what fits into memory.")] = None,
    gpu_memory_utilization: Annotated[float, _on(ENGINE_PANEL, min=0.01, max=1)] = 0.92,
    reserve: Annotated[float, _on(ENGINE_PANEL, min=0, help="GiB for activations, graphs and libraries.")] = 2.0,
    weights: Annotated[float | None, _on(ENGINE_PANEL, min=0, help="GiB of weights, where quantized.")] = None,
    dtype: Annotated[str | None, _on(ENGINE_PANEL, help="Of weights and K/V; else the model's.")] = None,
    block_size: Annotated[int, _on(ENGINE_PANEL, min=1)] = 16,
    max_model_len: Annotated[int | None, _on(ENGINE_PANEL, min=2, help="Else the model's.")] = None,
    max_num_seqs: Annotated[int | None, _on(ENGINE_PANEL, min=1, help="Else as vllm serve for the GPU.")] = None,
    max_num_batched_tokens: Annotated[int | None, _on(ENGINE_PANEL, min=1, help="Likewise.")] = None,
    enable_prefix_caching: Annotated[
        bool, _on(ENGINE_PANEL, "--enable-prefix-caching", help="Share blocks of prompts with equal hash_ids.")
    ] = False,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="random or streaming_llm, in the place of your policy: those that look at attention need a model. "
            "random scatters its victims, as H2O and SnapKV do; it only matters for naive eviction.",
            rich_help_panel="What is evicted, and when",
        ),
    ] = POLICY,
) -> None:
    """Plan capacity without a GPU: how many requests fit at once, and what the queue of a workload looks like.

    The same requests meet native vLLM, naive eviction and vtoken: vLLM's real scheduler and block pool, without a
    model, along a virtual clock. Counts are exact, given the times of steps, and these are an estimate.
    """
    from vtoken.cli import failures

    asked = dict(locals())
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, TABLE_WIDTH)
    with failures():
        _plan(asked, console)


def _plan(asked: dict[str, Any], console: Console) -> None:
    """Check everything, run, report. Raises ValueError for what the user has to change."""
    from vtoken.cli import check_vllm, check_writable, parse_settings

    config = parse_settings({**asked["settings"], "policy": asked["policy"]})
    if asked["policy"] not in HOW:
        raise ValueError(
            f"--policy {asked['policy']} needs a model; give random or streaming_llm as a stand-in for it."
        )
    for kind, path in (("JSON", asked["json_file"]), ("Figure", asked["figure"])):
        if path is not None:
            check_writable(path, kind)
    if asked["figure"] is not None:
        _check_figure(asked["figure"])
    check_vllm()
    from vtoken.planning.gpu import find_gpu, serving_defaults
    from vtoken.planning.model_size import read_model
    from vtoken.planning.pool import given_pool, pool_in
    from vtoken.planning.prefixes import PrefixHashes
    from vtoken.planning.report import PlanReport, heading, tables
    from vtoken.planning.step_time import step_time_of
    from vtoken.planning.trace import read_workload, within
    from vtoken.planning.variants import Setting, processes, run_all, sample_size

    gpu = find_gpu(asked["gpu"], asked["memory"], asked["bandwidth"], asked["flops"])
    arrivals = read_workload(asked["workload"], asked["requests"], asked["speed_up"])
    model = read_model(asked["model"], asked["dtype"], asked["weights"])
    block_size, longest = asked["block_size"], asked["max_model_len"] or model.max_model_len
    if asked["blocks"] is not None:
        pool = given_pool(model, asked["blocks"], block_size)
    else:
        pool = pool_in(model, gpu.memory, asked["gpu_memory_utilization"], asked["reserve"], block_size)
    if pool.tokens < longest:
        raise ValueError(
            f"{pool.num_blocks} blocks hold {pool.tokens} tokens, and vLLM starts only where one request of "
            f"{longest} tokens fits; give --max-model-len {pool.tokens} or less, or a larger pool."
        )
    workload = within(arrivals, longest)
    if asked["enable_prefix_caching"]:
        PrefixHashes(workload.arrivals, block_size)  # refuses a block size that does not suit
    sequences, batched = serving_defaults(gpu)
    setting = Setting(
        config.model_dump(exclude={"reclaim"}, exclude_defaults=True),
        pool.num_blocks,
        block_size,
        longest,
        asked["max_num_seqs"] or sequences,
        asked["max_num_batched_tokens"] or batched,
        asked["enable_prefix_caching"],
        step_time_of(model, gpu, asked["efficiency"], asked["step_overhead"]),
    )
    sample = sample_size(workload, config, pool)
    for line in heading(model, gpu, pool, workload, str(asked["workload"])):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(STAND_IN.format(policy=config.policy, how=HOW[config.policy]), soft_wrap=True, highlight=False)
    if asked["enable_prefix_caching"] and not workload.shares:
        console.print("The workload has no hash_ids, so that no two prompts have anything in common.", soft_wrap=True)
    start = time.monotonic()
    phases = {"trace": workload, "at once": workload.at_once(sample)}
    with _progress(console, {phase: one.output_tokens for phase, one in phases.items()}) as ticks:
        found = run_all(setting, phases, ticks, processes())
    seconds = time.monotonic() - start
    report = PlanReport(model, gpu, pool, setting, workload, str(asked["workload"]), sample, found, seconds)
    for table in tables(report):
        console.print(table)
    console.print(f"{seconds:.0f} s for {3 * sum(one.output_tokens for one in phases.values()):,} output tokens")
    if asked["json_file"] is not None:
        asked["json_file"].write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    if asked["figure"] is not None:
        from vtoken.planning.figure import write_figure

        write_figure(report, asked["figure"])


def _check_figure(path: Path) -> None:
    from vtoken.cli_bench import check_libraries
    from vtoken.planning.figure import FORMATS

    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--figure {path} is of no kind that can be drawn; let it end in {', '.join(FORMATS)}.")
    check_libraries(["matplotlib"], "vtoken plan --figure")


@contextmanager
def _progress(console: Console, tokens: dict[str, int]) -> Iterator[Any]:
    """A bar for each variant, over the output tokens of all phases."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from vtoken.planning.report import HEADINGS

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars = {name: progress.add_task(title, total=sum(tokens.values())) for name, title in HEADINGS.items()}
        yield lambda variant, _phase, produced: progress.advance(bars[variant], produced)
