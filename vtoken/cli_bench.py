"""``vtoken bench``."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

TABLE_WIDTH = 140
OUT = Path("bench-results")
TO_SHOW = ("matplotlib", "scipy")
TO_MEASURE = (*TO_SHOW, "rouge_score")


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment, or 'all': see below.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: shows that all works, not what it is worth.")
    ] = False,
    workload: Annotated[
        Path | None,
        typer.Option(help="JSON lines with 'prompt' or 'messages', in the place of the data directory's prompts."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Directory with chat.jsonl, long.jsonl and text/; else VTOKEN_DATA, or Python's library."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for NAME.json, .md, .svg and .png, and for report.html.")] = OUT,
    repeat: Annotated[int | None, typer.Option(min=2, help="Repeats of each variant that is timed.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure nothing: tables and figures of the results in --out.")
    ] = False,
    openvino_python: Annotated[
        Path | None,
        typer.Option(envvar="VTOKEN_OPENVINO_PYTHON", help="peers: a Python that has openvino-genai."),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model directory; else SmolLM2-135M, fetched once.")] = None,
) -> None:
    """Measure one experiment of the evaluation, or all of them, each with every raw run, a table and a figure.

    characterize: how much is trapped in blocks after eviction; memory: blocks held by each way of reclaiming; sla:
    throughput at a bound on latency; throughput: output tokens/s on equal blocks; capacity: requests that fit at once;
    overhead: what the indirection costs; sensitivity: one setting at a time; prefix: shared prompts; quality: what
    eviction costs; bursty: mass evictions; contention: other work on the same cores; hostscale: bookkeeping of
    thousands of requests; peers: OpenVINO GenAI beside it (not part of all).
    """
    from vtoken.cli import check_vllm, failures, own_model
    from vtoken.evaluation.bench.catalogue import load_experiments
    from vtoken.evaluation.bench.session import Wishes, measure_all, show_again

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, TABLE_WIDTH)
    with failures():
        experiments = load_experiments(name)
        check_libraries(TO_SHOW if again else TO_MEASURE)
        make_folder(out)
        if again:
            held = show_again(experiments, out, console)
        else:
            check_inputs(workload, data, model)
            check_vllm()
            wishes = Wishes(model or own_model(), out, quick, repeat, workload, data, openvino_python)
            held = measure_all(experiments, wishes, console)
    if not held:
        typer.echo("vtoken: something that must hold did not; see the lines marked FAILED above.", err=True)
        raise typer.Exit(1)


def make_folder(path: Path) -> None:
    """Raises ValueError, in one sentence, unless files can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {path} cannot be written ({error.strerror}); give another directory.") from None


def check_libraries(needed: Sequence[str], command: str = "vtoken bench") -> None:
    """Raises ValueError, in one sentence, unless they are installed."""
    missing = [library for library in needed if find_spec(library) is None]
    if missing:
        raise ValueError(f"{command} needs {' and '.join(missing)}; run: pip install 'vtoken[bench]'")


def check_inputs(workload: Path | None, data: Path | None, model: Path | None) -> None:
    """Raises ValueError, in one sentence, for files and directories that are not there."""
    from vtoken.evaluation.plan import check_model_directory
    from vtoken.evaluation.questions import data_directory

    if workload is not None and not workload.is_file():
        raise ValueError(f"--workload {workload} does not exist; give the path of a JSON-lines file.")
    data_directory(data)
    if model is not None:
        check_model_directory(model)
