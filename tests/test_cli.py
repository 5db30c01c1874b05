"""The command line: what it refuses, in one sentence and with exit code 2, and what it hands on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_demo import make_report
from typer.testing import CliRunner, Result

from vtoken import __version__, cli
from vtoken.evaluation import demo, plan
from vtoken.evaluation.plan import DemoOptions, Plan


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def refused(*arguments: str) -> str:
    """The sentence on stderr of a command that must be refused."""
    result = invoke("demo", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"vtoken {__version__}\n")


@pytest.mark.parametrize(("text", "value"), [("512", 512), ("0.25", 0.25), ("1", 1), ("1.0", 1.0), ("x", "x")])
def test_budget_is_a_count_or_a_share(text: str, value: Any) -> None:
    assert cli.parse_budget(text) == value
    assert type(cli.parse_budget(text)) is type(value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--budget", "abc"], "'budget' = 'abc'"),
        (["--budget", "0"], "'budget' = 0"),
        (["--budget", "-5"], "'budget' = -5"),
        (["--budget", "1.5"], "'budget' = 1.5"),
        (["--budget", "nan"], "'budget' = nan"),
        (["--budget", "30"], "'budget' = 30 is below sinks + recent"),
        (["--sinks", "-1"], "'sinks' = -1"),
        (["--recent", "-1"], "'recent' = -1"),
        (["--interval", "0"], "'interval' = 0"),
        (["--policy", "streaming_lm"], "'streaming_lm'; did you mean 'streaming_llm'?"),
        (["--prompts", "/no/such/file"], "prompt file /no/such/file does not exist"),
        (["--model", "/no/such/model"], "model directory /no/such/model does not exist"),
        (["--json", "/no/such/folder/report.json"], "JSON file /no/such/folder/report.json cannot be written"),
    ],
)
def test_bad_input(arguments: list[str], sentence: str) -> None:
    text = refused(*arguments)
    assert sentence in text
    assert text.startswith("vtoken: ")
    assert text.count("vtoken: ") == 1
    assert text.endswith(("?", "."))


@pytest.mark.parametrize(
    "arguments", [["--frob"], ["--requests", "0"], ["--blocks", "0"], ["--repeat", "0"], ["--sinks", "x"]]
)
def test_bad_usage(arguments: list[str]) -> None:
    assert invoke("demo", *arguments).exit_code == 2


def test_a_folder_is_no_json_file(tmp_path: Path) -> None:
    assert "cannot be written" in refused("--json", str(tmp_path))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "holds no config.json" in refused("--model", str(tmp_path))


def test_vllm_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtoken.vllm_plugin import plugin

    def refuse() -> None:
        raise ValueError("vtoken: vLLM is not installed; install it.")

    monkeypatch.setattr(plugin, "check_vllm_version", refuse)
    assert refused() == "vtoken: vLLM is not installed; install it."


def test_a_model_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtoken.evaluation import model
    from vtoken.vllm_plugin import plugin

    def fail() -> Path:
        raise RuntimeError("The package index cannot be reached.")

    monkeypatch.setattr(plugin, "check_vllm_version", lambda: None)
    monkeypatch.setattr(model, "ensure_model", fail)
    assert refused() == "vtoken: The package index cannot be reached."


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Stand-ins for everything that starts an engine; keeps what they were called with."""
    from vtoken.vllm_plugin import plugin

    calls: dict[str, Any] = {"report": make_report(), "model": tmp_path}
    (tmp_path / "config.json").write_text("{}")

    def stub_plan(model: Path, config: Any, options: DemoOptions) -> Plan:
        calls.update(config=config, options=options)
        return Plan(model, {"block_size": 32}, config, [], [], 8, ["a note"])

    def stub_run(plan: Plan, repeat: int, console: Any) -> Any:
        calls["repeat"] = repeat
        if isinstance(calls["report"], Exception):
            raise calls["report"]
        return calls["report"]

    monkeypatch.setattr(plugin, "check_vllm_version", lambda: None)
    monkeypatch.setattr(plan, "make_plan", stub_plan)
    monkeypatch.setattr(demo, "check_engine", lambda plan: calls.update(checked=True))
    monkeypatch.setattr(demo, "run_demo", stub_run)
    return calls


def test_demo_hands_its_options_on(stubbed: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = (
        "--requests 3 --max-tokens 4 --blocks 50 --repeat 2 --eager --budget 512 --sinks 5 --recent 6 --interval 7"
    )
    result = invoke("demo", "--model", str(stubbed["model"]), "--json", str(report), *options.split())
    assert result.exit_code == 0, result.output
    assert stubbed["options"] == DemoOptions(None, 3, 4, 50, True)
    assert (stubbed["repeat"], stubbed["checked"]) == (2, True)
    config = stubbed["config"]
    assert (config.budget, config.sinks, config.recent, config.interval) == (512, 5, 6, 7)
    assert json.loads(report.read_text())["num_blocks"] == 240
    assert "a note" in result.stdout
    assert 'engine arguments of both runs: {"block_size": 32}' in result.stdout
    assert "needles found" in result.stdout


def test_nothing_evicted_says_so_and_fails(stubbed: dict[str, Any]) -> None:
    stubbed["report"] = make_report(evicted=0)
    result = invoke("demo", "--model", str(stubbed["model"]))
    assert result.exit_code == 1
    assert "nothing was evicted" in result.stderr
    assert "needles found" in result.stdout


def test_a_run_that_breaks_off_fails_without_a_traceback(stubbed: dict[str, Any]) -> None:
    stubbed["report"] = RuntimeError("the native run broke off: out of memory")
    result = invoke("demo", "--model", str(stubbed["model"]))
    assert (result.exit_code, result.stderr) == (1, "vtoken: the native run broke off: out of memory\n")


def test_a_refusal_at_start_up_is_bad_input(stubbed: dict[str, Any]) -> None:
    stubbed["report"] = ValueError("vtoken: sliding-window attention is not supported yet.")
    result = invoke("demo", "--model", str(stubbed["model"]))
    assert (result.exit_code, result.stderr) == (2, f"{stubbed['report']}\n")


def test_exit_code_of_the_real_command() -> None:
    command = [sys.executable, "-m", "vtoken.cli", "demo", "--budget", "3"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.count("\n") == 1
    assert "'budget' = 3 is below" in process.stderr
