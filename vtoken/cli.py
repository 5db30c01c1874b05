"""The ``vtoken`` command."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from vtoken import __version__
from vtoken.config import VTokenConfig

REFUSED = 2
FAILED = 1

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


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


@app.command()
def demo(
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with 'prompt' or 'messages'; else modules of Python's library."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    model: Annotated[Path | None, typer.Option(help="Model directory; else SmolLM2-135M, fetched once.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Number of requests.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Output tokens per request.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Block budget; else four full requests.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each kind, in turn; the table shows medians.")] = 1,
    eager: Annotated[bool, typer.Option("--eager", help="Leave out vLLM's compilation.")] = False,
    policy: Annotated[str | None, typer.Option(help="Which tokens may be forgotten.")] = None,
    budget: Annotated[str | None, typer.Option(help="Tokens kept (512), or a share of the prompt (0.25).")] = None,
    sinks: Annotated[int | None, typer.Option(help="Leading tokens that are never evicted.")] = None,
    recent: Annotated[int | None, typer.Option(help="Newest tokens that are never evicted.")] = None,
    interval: Annotated[int | None, typer.Option(help="Evict every so many tokens.")] = None,
) -> None:
    """Run the same work under native vLLM and under vtoken, on the same small block budget, and compare."""
    from vtoken.evaluation.plan import DemoOptions

    settings = {"policy": policy, "budget": budget, "sinks": sinks, "recent": recent, "interval": interval}
    options = DemoOptions(prompts, requests, max_tokens, blocks, eager)
    try:
        code = _demo(settings, options, model, json_file, repeat)
    except ValueError as error:
        _refuse(error)
    except RuntimeError as error:
        typer.echo(f"vtoken: {error}", err=True)
        raise typer.Exit(FAILED) from None
    raise typer.Exit(code)


def _demo(settings: dict[str, Any], options: Any, model: Path | None, json_file: Path | None, repeat: int) -> int:
    """Check everything, run, report. Returns the exit code; ValueError for what the user has to change."""
    config = parse_settings(settings)
    if json_file is not None:
        check_writable(json_file)
    if options.prompts is not None and not options.prompts.exists():
        raise ValueError(f"prompt file {options.prompts} does not exist; give the path of a JSON-lines file.")
    from vtoken.evaluation.demo import check_engine, run_demo
    from vtoken.evaluation.plan import check_model_directory, make_plan
    from vtoken.evaluation.report import table, write_json

    if model is not None:
        check_model_directory(model)
    check_vllm()
    console = Console()
    plan = make_plan(model or _own_model(), config, options)
    for note in plan.notes:
        console.print(note)
    console.print(f"{plan.model}: {len(plan.workloads)} requests, then {len(plan.needles)} needles")
    console.print("engine arguments of both runs:", json.dumps(plan.engine_args), soft_wrap=True)
    console.print("vtoken's settings:", json.dumps(config.model_dump()), soft_wrap=True)
    if model is not None:
        check_engine(plan)
    report = run_demo(plan, repeat, console)
    console.print(table(report))
    if json_file is not None:
        write_json(report, json_file)
    if report.nothing_evicted:
        typer.echo("vtoken: nothing was evicted; use longer prompts or a smaller --budget.", err=True)
        return FAILED
    return 0


def parse_settings(settings: dict[str, Any]) -> VTokenConfig:
    """The settings given on the command line, the rest as by default. Raises ValueError with one sentence."""
    given = {name: value for name, value in settings.items() if value is not None}
    if "budget" in given:
        given["budget"] = parse_budget(given["budget"])
    config = VTokenConfig(**given)
    from vtoken.policies import load_policy

    load_policy(config)
    return config


def parse_budget(text: str) -> int | float | str:
    """ "512" is a count of tokens, "0.25" a share; anything else is left for the settings to refuse."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def check_vllm() -> None:
    """Raises ValueError, in one sentence, unless a vLLM that vtoken knows is installed."""
    from vtoken.vllm_plugin.plugin import check_vllm_version

    check_vllm_version()


def check_writable(path: Path) -> None:
    """Raises ValueError, in one sentence, unless a file can be written there."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"JSON file {path} cannot be written; give a file name in an existing, writable folder.")


def _own_model() -> Path:
    from vtoken.evaluation.model import ensure_model

    try:
        return ensure_model()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _refuse(error: ValueError) -> NoReturn:
    text = str(error)
    typer.echo(text if text.startswith("vtoken:") else f"vtoken: {text}", err=True)
    raise typer.Exit(REFUSED) from None


if __name__ == "__main__":
    main()
