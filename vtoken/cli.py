"""The ``vtoken`` command."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from vtoken import __version__
from vtoken.cli_bench import bench
from vtoken.cli_options import OF_SERVERS, read_settings, settings_options
from vtoken.cli_plan import plan
from vtoken.cli_serve import ANY_OF_VLLM, serve
from vtoken.config import VTokenConfig

REFUSED = 2
FAILED = 1
TABLE_WIDTH = 120

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(bench)
app.command()(plan)
app.command(context_settings=ANY_OF_VLLM, options_metavar="MODEL [OPTIONS of vtoken and of vllm serve]")(serve)


def main() -> None:
    """Entry point of the ``vtoken`` command."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vtoken {__version__}")
        raise typer.Exit


@app.callback()
def vtoken(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Token-level KV-cache eviction for vLLM that hands emptied blocks back to the allocator."""


JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]
Model = Annotated[Path | None, typer.Option(help="Model directory; else SmolLM2-135M, fetched once.")]


@app.command()
@settings_options()
def demo(
    settings: dict[str, Any],
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with 'prompt' or 'messages'; else modules of Python's library."),
    ] = None,
    json_file: JsonFile = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page that shows the block pool, beside a third run without reclamation."),
    ] = None,
    model: Model = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Number of requests.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Output tokens per request.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Block budget; else four full requests.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each kind, in turn; the table shows medians.")] = 1,
    eager: Annotated[bool, typer.Option("--eager", help="Leave out vLLM's compilation.")] = False,
) -> None:
    """Run the same work under native vLLM and under vtoken, on the same small block budget, and compare."""
    from vtoken.evaluation.plan import DemoOptions

    options = DemoOptions(prompts, requests, max_tokens, blocks, eager)
    with failures():
        code = _demo(settings, options, model, json_file, html_file, repeat)
    raise typer.Exit(code)


@app.command()
@settings_options(without=("policy", "budget", *OF_SERVERS))
def quality(
    settings: dict[str, Any],
    policies: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Policies; else all built-in ones. 'none' is native vLLM alone."),
    ] = None,
    budgets: Annotated[
        str, typer.Option(metavar="NUMBER,...", help="Tokens kept (512), or shares of the prompt (0.25).")
    ] = "0.25,0.5",
    needles: Annotated[int | None, typer.Option(min=0, help="Hidden numbers to ask for; else all.")] = None,
    documents: Annotated[int | None, typer.Option(min=0, help="References to score; else all.")] = None,
    passages: Annotated[int, typer.Option(min=0, help="Passages of plain texts whose continuation is scored.")] = 6,
    max_prompt: Annotated[int, typer.Option(min=1, help="Only prompts of at most so many tokens.")] = 2500,
    data: Annotated[
        Path | None,
        typer.Option(help="Directory with needle.jsonl and long.jsonl; else VTOKEN_DATA, or Python's library."),
    ] = None,
    json_file: JsonFile = None,
    model: Model = None,
) -> None:
    """Ask the same questions under native vLLM and under each policy: hidden numbers, and likely continuations.

    Likelihoods are those of given texts, forced token by token in decode steps after the prompt was reduced.
    """
    from vtoken.evaluation.questions import Wishes

    with failures():
        _quality(settings, policies, budgets, Wishes(needles, documents, passages, max_prompt, data), model, json_file)


def _demo(
    settings: dict[str, Any],
    options: Any,
    model: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    repeat: int,
) -> int:
    """Check everything, run, report. Returns the exit code; ValueError for what the user has to change."""
    from vtoken.evaluation.plan import check_model_directory, make_plan, naive_of

    config = parse_settings(settings)
    naive = None if html_file is None else naive_of(config)
    for kind, file in (("JSON", json_file), ("HTML", html_file)):
        if file is not None:
            check_writable(file, kind)
    if options.prompts is not None and not options.prompts.exists():
        raise ValueError(f"prompt file {options.prompts} does not exist; give the path of a JSON-lines file.")
    from vtoken.evaluation.demo import check_engine, run_demo
    from vtoken.evaluation.demo_page import demo_page
    from vtoken.evaluation.report import table, write_json

    if model is not None:
        check_model_directory(model)
    check_vllm()
    console = Console()
    plan = replace(make_plan(model or own_model(), config, options), naive=naive)
    for note in plan.notes:
        console.print(note)
    console.print(f"{plan.model}: {len(plan.workloads)} requests, then {len(plan.needles)} needles")
    runs = "both runs" if naive is None else "all three runs"
    console.print(f"engine arguments of {runs}:", json.dumps(plan.engine_args), soft_wrap=True)
    console.print("vtoken's settings:", json.dumps(config.model_dump()), soft_wrap=True)
    if model is not None:
        check_engine(plan, config)
    if naive is not None:
        check_engine(plan, naive)
    report = run_demo(plan, repeat, console)
    console.print(table(report))
    if json_file is not None:
        write_json(report, json_file)
    if html_file is not None:
        html_file.write_text(demo_page(report), encoding="utf-8")
    if report.nothing_evicted:
        typer.echo("vtoken: nothing was evicted; use longer prompts or a smaller --budget.", err=True)
        return FAILED
    return 0


def _quality(
    settings: dict[str, Any],
    policies: str | None,
    budgets: str,
    wishes: Any,
    model: Path | None,
    json_file: Path | None,
) -> None:
    """Check everything, run, report. Raises ValueError for what the user has to change."""
    configs = quality_configs(settings, policies, budgets)
    if json_file is not None:
        check_writable(json_file)
    from vtoken.evaluation.plan import check_model_directory
    from vtoken.evaluation.quality import check_quality_engines, make_quality_plan, run_quality
    from vtoken.evaluation.quality_report import quality_table
    from vtoken.evaluation.report import write_json

    if model is not None:
        check_model_directory(model)
    check_vllm()
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, TABLE_WIDTH)
    plan = make_quality_plan(model or own_model(), configs, wishes)
    console.print(f"{plan.model}: {len(plan.questions)} {plan.note}", soft_wrap=True)
    console.print("engine arguments of all runs:", json.dumps(plan.engine_args), soft_wrap=True)
    if model is not None:
        check_quality_engines(plan)
    report = run_quality(plan, console, save=lambda report: write_json(report, json_file) if json_file else None)
    console.print(quality_table(report))


def quality_configs(settings: dict[str, Any], policies: str | None, budgets: str) -> list[VTokenConfig]:
    """Every policy with every budget; "none" is native vLLM, which is measured anyway. Raises ValueError."""
    from vtoken.policies import POLICIES

    names = list(POLICIES) if policies is None else [name.strip() for name in policies.split(",")]
    pairs = [(name, budget.strip()) for name in names if name != "none" for budget in budgets.split(",")]
    return [parse_settings({**settings, "policy": name, "budget": budget}) for name, budget in pairs]


def parse_settings(settings: dict[str, Any]) -> VTokenConfig:
    """The settings given on the command line, the rest as by default. Raises ValueError with one sentence."""
    config = VTokenConfig(**read_settings(settings))
    from vtoken.policies import load_policies

    load_policies(config)
    return config


def check_vllm() -> None:
    """Raises ValueError, in one sentence, unless a vLLM that vtoken knows is installed."""
    from vtoken.vllm_plugin.plugin import check_vllm_version

    check_vllm_version()


def check_writable(path: Path, kind: str = "JSON") -> None:
    """Raises ValueError, in one sentence, unless a file can be written there."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{kind} file {path} cannot be written; give a file name in an existing, writable folder.")


def own_model() -> Path:
    """SmolLM2's directory. Raises ValueError, in one sentence, where it cannot be fetched."""
    from vtoken.evaluation.model import ensure_model

    try:
        return ensure_model()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


@contextmanager
def failures() -> Iterator[None]:
    """One sentence and an exit code, for what the user has to change and for a run that broke off."""
    try:
        yield
    except ValueError as error:
        _refuse(error)
    except RuntimeError as error:
        typer.echo(f"vtoken: {error}", err=True)
        raise typer.Exit(FAILED) from None


def _refuse(error: ValueError) -> NoReturn:
    text = str(error)
    typer.echo(text if text.startswith("vtoken:") else f"vtoken: {text}", err=True)
    raise typer.Exit(REFUSED) from None


if __name__ == "__main__":
    main()
