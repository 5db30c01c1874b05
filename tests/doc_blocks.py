"""What the documents show: code blocks, links and headings; and the commands of a block, without running them."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from vtoken.cli import app, parse_settings
from vtoken.config import VTokenConfig
from vtoken.launch import NAME, with_settings

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PROGRAMS = ("vtoken", "vllm", "python", "python3", "pip", "make")
"""What a block that is only looked at may call."""
PLACES = ("bin", ".venv/bin", "openvino-env/bin")
RECORDER = f"""#!{sys.executable} -IS
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, what it is said to be, and its lines."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, text: str) -> list[Block]:
    """All fenced blocks of a page, in its order."""
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["language"], textwrap.dedent(found["text"]))
        for found in FENCE.finditer(text)
    ]


def prose(text: str) -> str:
    """A page without its blocks."""
    return FENCE.sub("", text)


def links(text: str) -> list[str]:
    """What a page links to, or shows, that lies beside it."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)) if not re.match(r"https?:", link)]


def anchors(text: str) -> set[str]:
    """The headings of a page, as they are linked to."""
    headings = re.findall(r"^#+ (.+)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = re.split(rf"^#+ {re.escape(heading)}\n", text, maxsplit=1, flags=re.MULTILINE)[1]
    first = re.search(r"(^\|.*\n)+", section, flags=re.MULTILINE)
    assert first is not None
    rows = first.group().strip().splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def commands(script: str, directory: Path) -> list[list[str]]:
    """The commands that a bash script would call, as bash reads them, without running them; see PROGRAMS."""
    record = directory / "record"
    record.write_text("")
    for place in PLACES:
        (directory / place).mkdir(parents=True, exist_ok=True)
        for program in PROGRAMS:
            stand_in = directory / place / program
            stand_in.write_text(RECORDER)
            stand_in.chmod(0o755)
    path = f"{directory / 'bin'}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        env=os.environ | {"PATH": path, "RECORD": str(record)},
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in record.read_text().splitlines()]


def check(command: list[str]) -> None:
    """Raises an error unless the program takes these arguments: its own parser is asked, and vtoken of its settings."""
    match command:
        case ["vtoken", "serve", *arguments]:
            check_own("serve", arguments)
        case ["vllm", "serve", *arguments] | ["python", "-m", "vllm.entrypoints.openai.api_server", *arguments]:
            check_server(None, arguments)
        case ["vllm", "bench", "serve", *arguments]:
            check_load(arguments)
        case ["vtoken", "--version"] | ["python3", "-m", "venv", _]:
            pass
        case ["vtoken", name, *arguments]:
            check_own(name, arguments)
        case ["pip", name, *arguments]:
            check_pip(name, arguments)
        case ["make", *arguments]:
            check_make(arguments)
        case _:
            raise ValueError(f"nobody knows how to check {command}")


def check_own(name: str, arguments: list[str]) -> None:
    """A command of vtoken's, and the settings that it is given."""
    group: Any = typer.main.get_command(app)
    context = group.commands[name].make_context(name, list(arguments))
    given = {key: value for key, value in context.params.items() if key in VTokenConfig.model_fields}
    settings = {key: value for key, value in given.items() if value not in (None, [], ())}
    parse_settings(settings)
    if name == "serve":
        from vtoken.cli_options import read_settings

        check_server(read_settings(settings), context.args)


def check_server(settings: dict[str, Any] | None, arguments: list[str]) -> None:
    """Arguments of `vllm serve`, with vtoken's settings beside them or, if None, in --additional-config."""
    from vtoken.vllm_plugin.server import parse

    additional = parse(arguments).additional_config
    assert settings is not None or NAME in additional, f"{additional} does not configure vtoken"
    with_settings(additional, settings or {})


def check_load(arguments: list[str]) -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    parser.parse_args(arguments)


def check_pip(name: str, arguments: list[str]) -> None:
    from pip._internal.commands import create_command

    options, _ = create_command(name).parser.parse_args(arguments)
    for requirements in options.requirements:
        assert (ROOT / requirements).is_file(), requirements


def check_make(arguments: list[str]) -> None:
    """What make would do, and each of these commands in turn."""
    planned = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for line in planned.splitlines():
        match shlex.split(line.removeprefix("@")) if line.startswith(".venv/bin/") else []:
            case [".venv/bin/vtoken", *rest]:
                check(["vtoken", *rest])
            case [".venv/bin/python", "-m", "pytest", *rest]:
                for path in (part for part in rest if part.startswith("tests/")):
                    assert list(ROOT.glob(path)), path
