"""Peers: its tables and checks on runs that were made up, OpenVINO's side over a stand-in, and the whole over both."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_openvino_genai
import pytest
from byte_tokenizer import ByteTokenizer
from fake_engine import FakeEngine
from rich.console import Console

from vtoken.evaluation.bench import openvino_engine, peers
from vtoken.evaluation.bench.base import Check, Run
from vtoken.evaluation.bench.bench import Bench
from vtoken.evaluation.bench.engines import EnginePool, EngineSpec
from vtoken.evaluation.bench.intervals import Interval
from vtoken.evaluation.bench.openvino_engine import Eviction, OpenVINOEngine, PipelineSpec, check_interpreter, export
from vtoken.evaluation.bench.openvino_peer import Pipeline
from vtoken.evaluation.bench.peers import Peers
from vtoken.evaluation.bench.peers_report import VARIANTS, measured_at
from vtoken.evaluation.bench.requests import BenchRequests
from vtoken.evaluation.bench.serve import find
from vtoken.evaluation.workloads import Workload

BATCHES = (2, 4, 8)
OUTPUTS, PROMPT, BUDGET = 4, 100, 64
SPEED = {
    "native": 10.0,
    "streaming_llm": 20.0,
    "snapkv": 18.0,
    "openvino": 12.0,
    "openvino evicting": 16.0,
    "openvino evicting u8": 17.0,
    "native again": 10.0,
}
PROMPT_SECONDS = {name: 0.8 if name.startswith("openvino") else 1.0 for name in VARIANTS}
SPEC = PipelineSpec("model", 20, 8, 256, 2, "f32", Eviction(32, 32, 128))


def made_up(**speed: float) -> list[Run]:
    """Two repeats of each variant at each batch, the second one a tenth faster for all."""
    speeds = SPEED | {name.replace("_evicting", " evicting"): value for name, value in speed.items()}
    runs: list[Run] = []
    for variant in VARIANTS:
        about: dict[str, Any] = {"prompt": PROMPT, "outputs": OUTPUTS, "budget": BUDGET, "batches": BATCHES}
        about |= {"num_blocks": 20, "bytes_per_block": 32 if variant == "openvino evicting u8" else 128}
        if variant.startswith("openvino"):
            eviction = None if variant == "openvino" else vars(Eviction(32, 32, 64))
            about |= {"openvino_genai": "1.2", "settings": {**SPEC.to_json(), "eviction": eviction}}
        runs.append({"kind": "engine", "variant": variant, **about})
        runs.append(
            {"kind": "prompts", "variant": variant, "requests": 4, "tokens": 400, "seconds": PROMPT_SECONDS[variant]}
        )
        runs.append({"kind": "needles", "variant": variant, "needles": 12, "found": len(variant)})
    for batch in BATCHES:
        for variant in measured_at(batch, BATCHES):
            runs += [timed(variant, batch, repeat, speeds[variant] * (1 + repeat / 10)) for repeat in range(2)]
    return runs


def timed(variant: str, batch: int, repeat: int, speed: float) -> Run:
    run = {"kind": "timed", "variant": variant, "batch": batch, "repeat": repeat, "output_tokens": batch * OUTPUTS}
    run |= {"output_tokens_per_s": speed, "seconds": batch * OUTPUTS / speed, "step_ms": 5.0 + repeat}
    run |= {"mean_running": 1.5 + repeat, "peak_blocks": 19 + repeat}
    if variant.startswith("openvino"):
        run["decode_blocks_per_request"] = 4.0 if variant == "openvino" else 3.0
    else:
        run["tokens_evicted"] = 0 if variant.startswith("native") else 7
    if batch == BATCHES[1] and repeat == 0:
        own = {"streaming_llm": 1, "snapkv": 0, "openvino evicting": 3}.get(variant, 0)
        run["outputs"] = {f"r{n}": [n, n + 1, n + 2, n + 3 + own] for n in range(batch)}
    return run


def check(runs: list[Run], start: str, target: str = "") -> Check:
    (found,) = [c for c in Peers().checks(runs) if c.what.startswith(start) and c.target.startswith(target)]
    return found


def changed(runs: list[Run], variant: str, **values: Any) -> list[Run]:
    """The last timed run of a variant says something else."""
    at = max(n for n, run in enumerate(runs) if run["kind"] == "timed" and run["variant"] == variant)
    return [*runs[:at], {**runs[at], **values}, *runs[at + 1 :]]


def test_the_table_of_speed() -> None:
    table = Peers().tables(made_up())[0]
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    assert len(rows) == 4 * 3 + 3
    ours = rows[8, "vtoken, streaming_llm"]
    assert isinstance(ours[0], Interval)
    assert ours[0].median == pytest.approx(21.0)
    assert [table.columns[2 + n].show(cell) for n, cell in enumerate(ours)][1:] == ["2.00", "1.25", "2.0", "20"]
    assert rows[2, "native vLLM"][1] is None
    assert rows[2, "OpenVINO GenAI, evicting"][2] is None
    for name in ("OpenVINO GenAI", "OpenVINO GenAI, evicting, 8-bit cache"):
        assert [batch for batch, other in rows if other == name] == [4]
    assert [batch for batch, name in rows if name == "native vLLM, a second engine"] == [2]
    assert "20 blocks of 32 tokens" in table.note
    assert "differ by 1.000" in table.note


def test_the_table_of_time() -> None:
    table = Peers().tables(made_up())[1]
    shown = {row[0]: row[1:] for row in table.shown()}
    whole = (16 / 20 + 16 / 22) / 2  # the median of two repeats
    native = (16 / 10 + 16 / 11) / 2
    assert shown["vtoken, streaming_llm"] == [
        "400", "1.0", f"{whole:.1f}", f"{100 / whole:.0f} %", "5.5", f"{native / whole:.2f}", f"{native:.2f}"
    ]  # fmt: skip
    assert shown["OpenVINO GenAI"][:2] == ["500", "0.8"]
    assert "native vLLM, a second engine" not in shown


def test_the_table_of_the_price() -> None:
    shown = {row[0]: row[1:] for row in Peers().tables(made_up())[2].shown()}
    assert shown["vtoken, snapkv"] == ["native vLLM", "1.000", "4 of 4", "4", "6 of 12"]
    assert shown["vtoken, streaming_llm"] == ["native vLLM", "0.750", "0 of 4", "3", "13 of 12"]
    assert shown["OpenVINO GenAI, evicting"] == ["OpenVINO GenAI", "0.750", "0 of 4", "3", "17 of 12"]
    assert shown["OpenVINO GenAI"][0] == "native vLLM"


def test_everything_holds_where_it_should() -> None:
    assert [c.what for c in Peers().checks(made_up()) if not c.held] == []
    assert sum(c.kind == "must" for c in Peers().checks(made_up())) == 8


@pytest.mark.parametrize(
    ("variant", "values", "start", "found"),
    [
        ("streaming_llm", {"tokens_evicted": 0}, "vtoken, streaming_llm: evictions", "0"),
        ("native", {"tokens_evicted": 3}, "native vLLM: nothing", "3"),
        ("native again", {"tokens_evicted": 2}, "native vLLM: nothing", "2"),
        ("openvino evicting", {"decode_blocks_per_request": 3.5}, "OpenVINO GenAI, evicting: evictions", "3.5"),
        ("openvino evicting u8", {"decode_blocks_per_request": 4.0}, "OpenVINO GenAI, evicting, 8-bit", "4.0"),
        ("openvino", {"decode_blocks_per_request": 3.0}, "OpenVINO GenAI: nothing", "3.0"),
        ("snapkv", {"output_tokens": 31}, "each request", "1"),
    ],
)
def test_a_check_fails_that_must(variant: str, values: Run, start: str, found: str) -> None:
    (failed,) = [c for c in Peers().checks(changed(made_up(), variant, **values)) if not c.held]
    assert failed.what.startswith(start)
    assert (failed.kind, failed.found) == ("must", found)


def test_another_size_of_cache_is_no_comparison() -> None:
    runs = made_up()
    runs[3]["num_blocks"] = 21
    assert runs[3]["kind"] == "engine"
    (failed,) = [c for c in Peers().checks(runs) if not c.held]
    assert failed.found == "20 x 128 bytes, 21 x 128 bytes"


def test_an_aim_that_is_missed_comes_with_its_reason() -> None:
    runs = made_up(snapkv=15.0)
    openvino_check, native_check = check(runs, "vtoken, snapkv: ahead"), check(runs, "vtoken, snapkv: against")
    assert not openvino_check.held
    assert openvino_check.kind == "aim"
    assert openvino_check.found == "; ".join(f"{batch}: 0.94 (0.94 to 0.94)" for batch in BATCHES)
    assert openvino_check.reason == (
        "with 4 requests OpenVINO takes 0.8 s for prompts and 0.2 s for all else, vLLM with vtoken 1.0 s for prompts "
        "and 0.0 s for all else"
    )
    assert not native_check.held
    assert native_check.reason == (
        "with 4 requests native vLLM takes 1.0 s for prompts and 0.5 s for all else, with vtoken 1.0 s for prompts and "
        "0.0 s for all else: prompts cost both the same, and in a step more requests share the cores"
    )


def test_the_figure_has_every_engine() -> None:
    left, right = Peers().figure(made_up()).axes
    assert [text.get_text() for text in left.get_xticklabels()] == ["2", "4", "8"]
    assert left.get_title() == "Who produces most on 20 blocks of KV cache?"
    heights = [[bar.get_height() for bar in group] for group in left.containers if hasattr(group, "patches")]
    assert heights[1] == pytest.approx([21.0] * 3)
    assert next(text.get_text() for text in right.get_yticklabels()) == "native vLLM"
    assert right.patches[0].get_width() == pytest.approx(1.0)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("openvino", "openvino_genai"):
        monkeypatch.setitem(sys.modules, name, fake_openvino_genai)
    return lambda **changes: Pipeline(replace(SPEC, **changes).to_json())


def requests(count: int, prompt: int = 160, outputs: int = 6) -> list[dict[str, Any]]:
    return [{"request_id": f"r{n}", "prompt_token_ids": [n + 1] * prompt, "max_tokens": outputs} for n in range(count)]


def test_what_a_pipeline_tells(pipeline: Any) -> None:
    """160 + 6 tokens are five blocks and then six, and 128 are kept, with one more in the making."""
    keeping, evicting = pipeline(eviction=None), pipeline()
    assert keeping.about == {"num_blocks": 20, "bytes_per_block": 128, "openvino_genai": "fake"}
    assert pipeline(kv_cache_precision="u8").about["bytes_per_block"] == 32
    found = keeping.run(requests(5))
    assert found["outputs"]["r1"] == [(320 + n) % 200 for n in range(6)]
    assert (found["peak_running"], found["output_tokens"], found["steps"]) == (4, 30, 12)
    assert found["decode_blocks_per_request"] == 6.0
    found = evicting.run(requests(5))
    assert found["outputs"]["r1"] == [120, 121, 123, 124, 125, 126]
    assert found["decode_blocks_per_request"] == 5.0


def test_a_request_that_was_dropped_ends_the_run(pipeline: Any) -> None:
    unlucky = {"request_id": "unlucky", "prompt_token_ids": [199], "max_tokens": 3}
    with pytest.raises(RuntimeError, match="request unlucky ended as IGNORED with 0 of 3 tokens"):
        pipeline().run([*requests(1), unlucky])


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """A Python that takes the stand-in for OpenVINO, an exporter and their versions from a folder."""
    site, tests = tmp_path / "site", Path(__file__).parent
    for package in ("openvino_genai", "optimum_intel"):
        folder = site / f"{package}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    for module in ("openvino", "openvino_genai"):
        (site / f"{module}.py").write_text(
            "from fake_openvino_genai import *\nfrom fake_openvino_genai import __version__\n"
        )
    exporter = site / "optimum" / "commands"
    exporter.mkdir(parents=True)
    (exporter / "optimum_cli.py").write_text(
        "import pathlib, sys\n"
        "assert sys.argv[1:3] == ['export', 'openvino'] and 'fp32' in sys.argv, sys.argv\n"
        "model = pathlib.Path(sys.argv[sys.argv.index('--model') + 1])\n"
        "sys.exit('no weights') if not list(model.glob('*.safetensors')) else None\n"
        "(pathlib.Path(sys.argv[-1]) / 'openvino_model.xml').write_text('<net/>')\n"
    )
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -I ] || exit 9\nshift\nPYTHONPATH="{site}:{tests}" exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    return python


def test_a_pipeline_in_a_process_of_its_own(interpreter: Path) -> None:
    engine = OpenVINOEngine(interpreter, SPEC)
    try:
        assert engine.about == {"num_blocks": 20, "bytes_per_block": 128, "openvino_genai": "fake"}
        found = engine.run([Workload("r", [1, 2], 3)])
        assert found["outputs"] == {"r": [3, 4, 6]}
        with pytest.raises(RuntimeError, match="OpenVINO GenAI broke off: request r ended as IGNORED"):
            engine.run([Workload("r", [199], 3)])
        with pytest.raises(RuntimeError, match="OpenVINO GenAI ended with exit code 1"):
            engine.run([Workload("r", [1], 3)])
    finally:
        engine.close()


def test_an_interpreter_that_cannot_be_used_is_refused_with_the_commands(tmp_path: Path, interpreter: Path) -> None:
    assert check_interpreter(interpreter) == interpreter
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    for python, reason in ((None, "peers needs a Python"), (tmp_path / "gone", "is no interpreter"), (bare, "lacks")):
        with pytest.raises(ValueError, match=reason) as refused:
            check_interpreter(python)
        assert openvino_engine.INSTALL in str(refused.value)
        assert "\n" not in str(refused.value)


def test_the_commands_are_those_of_the_documentation() -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "peers.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith(("python3", "openvino-env"))] == openvino_engine.INSTALL.split(
        " && "
    )
    wanted = (root / "requirements" / "peers.txt").read_text(encoding="utf-8").splitlines()
    ranges = [line for line in wanted if not line.startswith("#")]
    assert all(">=" in line and ",<" in line for line in ranges)
    assert not [line for line in ranges if line.startswith(("optimum-intel", "torch"))]


def test_a_model_is_exported_once_for_each_state_of_its_files(tmp_path: Path, interpreter: Path) -> None:
    model, folder = tmp_path / "some-model", tmp_path / "made"
    model.mkdir()
    with pytest.raises(RuntimeError, match=r"did not export .*some-model: no weights"):
        export(interpreter, model, folder)
    assert list(folder.iterdir()) == []
    weights = model / "model.safetensors"
    weights.write_bytes(b"1")
    first = export(interpreter, model, folder)
    assert (first / "openvino_model.xml").read_text() == "<net/>"
    assert export(Path("/nowhere"), model, folder) == first
    weights.write_bytes(b"22")
    assert export(interpreter, model, folder) != first


def test_the_whole_over_stand_ins(tmp_path: Path, interpreter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peers, "QUICK", peers.Sizes(prompt=480, outputs=8, budget=256, batches=(6,)))
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    started: list[EngineSpec] = []

    def start(spec: EngineSpec, settle: object) -> Any:
        started.append(spec)
        keep = spec.vtoken.budget if spec.vtoken else None
        inner = FakeEngine(32, spec.engine_args["num_gpu_blocks_override"] - 1, keep)
        do = lambda task, **arguments: find(task)(inner, **arguments)  # noqa: E731
        return SimpleNamespace(spec=spec, num_blocks=inner.num_blocks, block_size=32, do=do, close=lambda: None)

    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 1}
    config = SimpleNamespace(max_position_embeddings=2048, hidden_size=4, **heads)
    requests = BenchRequests(ByteTokenizer(), 2048)
    monkeypatch.setattr(BenchRequests, "exactly", lambda self, count, tokens, outputs: [
        Workload(f"w{n}", [n] * tokens, outputs) for n in range(count)
    ])  # fmt: skip
    with EnginePool(start) as engines:
        bench = Bench(model, config, requests, engines, Console(quiet=True), True, None, interpreter)
        runs = Peers().measure(bench)
    assert [spec.vtoken and (spec.vtoken.policy, spec.vtoken.budget, spec.vtoken.sinks) for spec in started] == [
        None, ("streaming_llm", 256, 4), ("snapkv", 256, 32), None
    ]  # fmt: skip
    assert [spec.copy for spec in started] == [0, 0, 0, 1]
    kinds = [run["kind"] for run in runs]
    assert {kind: kinds.count(kind) for kind in kinds} == {"engine": 7, "timed": 14, "prompts": 6, "needles": 6}
    size = {e["variant"]: (e["num_blocks"], e["bytes_per_block"]) for e in runs if e["kind"] == "engine"}
    assert size["native"] == (80, 2 * 4 * 32)
    assert size["openvino evicting u8"] == (80, 32)
    assert sum("outputs" in run for run in runs if run["kind"] == "timed") == 7
    musts = [c for c in Peers().checks(runs) if c.kind == "must"]
    # The stand-in's cache has one number per slot where vLLM's has a key and a value.
    assert [c.what for c in musts if not c.held] == ["the same KV cache for all (8-bit apart)"]
    assert all(table.rows for table in Peers().tables(runs))
