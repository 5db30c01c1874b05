"""The demo's plan, the processes it starts, and its report."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer
from fake_engine import FakeEngine
from rich.console import Console

from vtoken.config import VTokenConfig
from vtoken.evaluation import child, demo, plan, run_one
from vtoken.evaluation.child import RunSpec, run_child
from vtoken.evaluation.measure import RunResult
from vtoken.evaluation.plan import DemoOptions, Plan, make_plan
from vtoken.evaluation.report import DemoReport, table, write_json
from vtoken.evaluation.workloads import Workload

RESULT = RunResult(206, 190.5, 0.01, 0, 0, 0, 4, 3.9, 0, 1024, 60.0, 30.0, 200.0, 4000.0, 14000.0, 6)
SPEC = RunSpec("model", {"seed": 0}, None, [Workload("r", [1, 2], 3)], [Workload("n", [4], 5, ["6"])])


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A model that needs no files: 2 layers, 3 KV heads of 64."""
    description = SimpleNamespace(
        max_position_embeddings=8192,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        hidden_size=576,
    )
    monkeypatch.setattr(plan, "load_model_description", lambda model: (description, ByteTokenizer()))
    monkeypatch.setattr(plan, "model_dtype", lambda: "float32")
    monkeypatch.setattr(plan, "missing_compiler", lambda: None)
    return description


def planned(**options: Any) -> Plan:
    return make_plan(Path("model"), VTokenConfig(), DemoOptions(**options))


@pytest.mark.usefixtures("described")
def test_default_plan_holds_four_full_requests() -> None:
    made = planned()
    assert max(work.total_tokens for work in made.workloads) == 1651 + 256
    assert made.num_blocks == 4 * 60
    assert made.engine_args == {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 60 * 32,
        "max_num_seqs": 64,
        "num_gpu_blocks_override": 241,
        "kv_cache_memory_bytes": 241 * 32 * 2 * 2 * 3 * 64 * 4,
        "distributed_executor_backend": "uni",
        "seed": 0,
    }
    assert [len(work.prompt_token_ids) for work in made.needles] == [1536] * 6
    assert made.notes == []


@pytest.mark.usefixtures("described")
def test_plan_without_a_compiler_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(eager=True).engine_args["enforce_eager"] is True
    monkeypatch.setattr(plan, "missing_compiler", lambda: "g++")
    made = planned()
    assert made.engine_args["enforce_eager"] is True
    assert "g++" in made.notes[0]


@pytest.mark.usefixtures("described")
def test_plan_refuses_a_block_budget_below_one_request() -> None:
    assert planned(blocks=60).num_blocks == 60
    with pytest.raises(ValueError, match=r"59 blocks holds 1888 tokens.*needs 1907; use --blocks 60 or more"):
        planned(blocks=59)


def test_plan_refuses_a_context_that_is_too_short(described: SimpleNamespace) -> None:
    described.max_position_embeddings = 1024
    with pytest.raises(ValueError, match="needs 1907 tokens, but the context of model is 1024"):
        planned()


def test_a_damaged_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^the model in .* cannot be read \([^\n]*\.$"):
        make_plan(tmp_path, VTokenConfig(), DemoOptions())


def scripted(lines: str) -> list[str]:
    """A stand-in for a run: reads its spec, then does as told."""
    prelude = "import json, os, sys, time\nspec = json.loads(sys.stdin.readline())\n"
    prelude += "def emit(**event): print(json.dumps(event), flush=True)\n"
    return [sys.executable, "-c", prelude + lines]


def test_child_gets_its_spec_and_passes_events_on() -> None:
    events: list[dict[str, Any]] = []
    echo = "emit(event='result', spec=spec, plugins=os.environ['VLLM_PLUGINS'])"
    run_child(SPEC, events.append, scripted(echo))
    run_child(replace(SPEC, vtoken=VTokenConfig()), events.append, scripted(echo))
    native, vtoken = events
    assert (native["plugins"], vtoken["plugins"]) == ("", "vtoken")
    assert native["spec"] == {
        "model": "model",
        "engine_args": {"seed": 0},
        "vtoken": None,
        "workloads": [
            {"request_id": "r", "prompt_token_ids": [1, 2], "max_tokens": 3, "answers": None, "extra_args": None}
        ],
        "needles": [
            {"request_id": "n", "prompt_token_ids": [4], "max_tokens": 5, "answers": ["6"], "extra_args": None}
        ],
        "frames": 0,
    }
    assert VTokenConfig(**vtoken["spec"]["vtoken"]) == VTokenConfig()


def test_child_environment_drops_the_kv_cache_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    assert "VLLM_CPU_KVCACHE_SPACE" not in child.environment(plugin=True)


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("emit(event='refused', message='no such thing.'); sys.exit(2)", ValueError, r"^no such thing\.$"),
        ("emit(event='failed', message='r0 failed'); sys.exit(1)", RuntimeError, r"^r0 failed$"),
        ("sys.exit('the last words')", RuntimeError, r"^the process ended with exit code 1\nthe last words$"),
        ("os.kill(os.getpid(), 9)", RuntimeError, r"^the process ended with exit code -9$"),
    ],
)
def test_child_that_breaks_off(script: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_child(SPEC, lambda event: None, scripted(script))


def test_an_interrupted_parent_ends_its_child() -> None:
    pids: list[int] = []

    def interrupt(event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(SPEC, interrupt, scripted("emit(event='x', pid=os.getpid()); time.sleep(600)"))
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_run_ends_when_its_parent_is_gone() -> None:
    script = (
        "import threading, time; from vtoken.evaluation.run_one import _end_with_parent\n"
        "threading.Thread(target=_end_with_parent, daemon=True).start(); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 1


class EngineWithEnd(FakeEngine):
    ended = False

    def shutdown(self) -> None:
        self.ended = True


def run_one_events(monkeypatch: pytest.MonkeyPatch, engine: EngineWithEnd, spec: RunSpec) -> tuple[int, list]:
    import vtoken.vllm_plugin.engine as real

    monkeypatch.setattr(real, "make_engine", lambda model, config, **engine_args: engine)
    monkeypatch.setattr(run_one, "load_tokenizer", lambda model: ByteTokenizer())
    events: list[dict[str, Any]] = []
    code = run_one.run(spec.to_json(), lambda **event: events.append(event))
    assert engine.ended
    return code, events


def test_run_one(monkeypatch: pytest.MonkeyPatch) -> None:
    code, events = run_one_events(monkeypatch, EngineWithEnd(4, 8), SPEC)
    assert code == 0
    assert events[0] == {"event": "started", "block_size": 4, "num_blocks": 8}
    assert events[1]["event"] == "progress"
    assert events[-1]["event"] == "result"
    assert RunResult(**events[-1]["result"]).output_tokens == 3


def test_run_one_without_work_only_starts_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    code, events = run_one_events(monkeypatch, EngineWithEnd(4, 8), RunSpec("model", {}, None))
    assert (code, [event["event"] for event in events]) == (0, ["started"])


def test_run_one_reports_a_failed_request(monkeypatch: pytest.MonkeyPatch) -> None:
    code, events = run_one_events(monkeypatch, EngineWithEnd(4, 8, finish_reason="error"), SPEC)
    assert (code, events[-1]) == (1, {"event": "failed", "message": "request r ended early: error"})


@pytest.fixture
def small_plan() -> Plan:
    return Plan(Path("m"), {"block_size": 32}, VTokenConfig(), list(SPEC.workloads), list(SPEC.needles), 8, [])


def stub_runs(monkeypatch: pytest.MonkeyPatch, num_blocks: int = 8) -> list[str]:
    """Let every run report so many evictions as there were runs before it."""
    order: list[str] = []

    def run(spec: RunSpec, on_event: Any) -> None:
        on_event({"event": "started", "block_size": 32, "num_blocks": num_blocks})
        progress = {"requests_done": 0, "output_tokens": 1, "running": 1, "held_blocks": 1}
        on_event({"event": "progress", **progress})
        on_event({"event": "result", "result": replace(RESULT, tokens_evicted=len(order)).to_json()})
        order.append("native" if spec.vtoken is None else "vtoken")

    monkeypatch.setattr(demo, "run_child", run)
    return order


def test_demo_interleaves_and_takes_medians(monkeypatch: pytest.MonkeyPatch, small_plan: Plan) -> None:
    order = stub_runs(monkeypatch)
    report = demo.run_demo(small_plan, 3, Console(file=StringIO()))
    assert order == ["native", "vtoken"] * 3
    assert [turn["vtoken"].tokens_evicted for turn in report.repeats] == [1, 3, 5]
    assert {name: run.tokens_evicted for name, run in report.runs.items()} == {"native": 2, "vtoken": 3}


def test_demo_notices_a_pool_of_another_size(monkeypatch: pytest.MonkeyPatch, small_plan: Plan) -> None:
    stub_runs(monkeypatch, num_blocks=9)
    with pytest.raises(RuntimeError, match="the native run broke off: vLLM has 9 blocks instead of 8"):
        demo.run_demo(small_plan, 1, Console(file=StringIO()))


def make_report(turns: int = 1, evicted: int = 7) -> DemoReport:
    runs = {"native": RESULT, "vtoken": replace(RESULT, tokens_evicted=evicted, output_tokens_per_s=75.0)}
    return DemoReport("m", {"seed": 0}, {"budget": 0.25}, 32, 240, 6, runs, [runs] * turns)


def test_report_as_json(tmp_path: Path) -> None:
    write_json(make_report(), tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report) == ["model", "engine_args", "vtoken_config", "block_size", "num_blocks", "runs"]
    assert report["runs"]["native"] == RESULT.to_json()
    write_json(make_report(turns=3), tmp_path / "report.json")
    assert len(json.loads((tmp_path / "report.json").read_text())["repeats"]) == 3


def test_report_as_a_table() -> None:
    output = StringIO()
    Console(file=output, width=100).print(table(make_report(turns=3)))
    cells = {
        line.split("│")[1].strip(): line.split("│")[2:-1] for line in output.getvalue().splitlines() if "│" in line
    }
    assert "240 blocks of 32 tokens, median of 3 runs" in output.getvalue()
    assert [cell.strip() for cell in cells["output tokens/s"]] == ["60.0", "75.0", "1.25x"]
    assert [cell.strip() for cell in cells["tokens evicted"]] == ["0", "7", "-"]
    assert [cell.strip() for cell in cells["waste ratio F"]] == ["1.0 %", "1.0 %", "1.00x"]
    assert [cell.strip() for cell in cells["time to first token, p95"]] == ["14.0 s", "14.0 s", "1.00x"]
    assert [cell.strip() for cell in cells["needles found"]] == ["6 of 6", "6 of 6", ""]


def test_nothing_evicted_is_noticed_in_any_turn() -> None:
    assert make_report(evicted=0).nothing_evicted
    assert not make_report(turns=2).nothing_evicted


@pytest.mark.slow
def test_demo_on_a_real_engine(tmp_path: Path, smollm2: Path) -> None:
    pytest.importorskip("vllm")
    from tiny_models import tiny_model

    model = tiny_model(tmp_path / "tiny", vocab=49152)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, model)
    report_file = tmp_path / "report.json"
    command = [sys.executable, "-m", "vtoken.cli", "demo", "--eager", "--requests", "6", "--max-tokens", "8"]
    process = subprocess.run(
        [*command, "--model", str(model), "--json", str(report_file)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(report_file.read_text())
    native, vtoken = (RunResult(**report["runs"][name]) for name in ("native", "vtoken"))
    assert native.output_tokens == vtoken.output_tokens == 6 * 8
    assert (native.tokens_evicted, native.peak_running) == (0, 4)
    assert vtoken.peak_running > native.peak_running
    assert 0 < vtoken.tokens_moved <= vtoken.tokens_evicted
    assert vtoken.blocks_reclaimed > 0
    assert max(native.peak_blocks, vtoken.peak_blocks) <= report["num_blocks"]
    assert "needles found" in process.stdout
