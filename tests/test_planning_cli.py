"""`vtoken plan` from the command line: what it refuses, and all that it says and writes; real traces, in part."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_planning_numbers import SMALL, write
from typer.testing import CliRunner

from vtoken import cli
from vtoken.evaluation.questions import data_directory
from vtoken.planning.gpu import find_gpu
from vtoken.planning.model_size import read_model
from vtoken.planning.pool import pool_in
from vtoken.planning.replay import replay
from vtoken.planning.report import HEADINGS
from vtoken.planning.step_time import StepTime, step_time_of
from vtoken.planning.summary import queue
from vtoken.planning.trace import CHUNK, Workload, read_workload, within
from vtoken.planning.variants import VARIANTS, Setting, make_engine

LINES = [{"timestamp": 100 * n, "input_length": 600, "output_length": 30, "hash_ids": [1, n]} for n in range(2, 22)]
BLOCKS = ("--blocks", "60", "--block-size", "32", "--max-model-len", "1024")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["plan", *arguments])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model and a small trace."""
    directory = tmp_path_factory.mktemp("plan")
    write(directory)
    (directory / "trace.jsonl").write_text("\n".join(map(json.dumps, LINES)), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def result(files: Path) -> Any:
    """The whole command, in processes of its own."""
    return invoke(
        str(files / "config.json"),
        str(files / "trace.jsonl"),
        *BLOCKS,
        "--enable-prefix-caching",
        "--json",
        str(files / "out.json"),
        "--figure",
        str(files / "out.svg"),
    )


@pytest.fixture
def report(result: Any, files: Path) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads((files / "out.json").read_text(encoding="utf-8"))
    return found


class TestAnswer:
    def test_the_same_requests_end_under_all_variants(self, report: dict[str, Any]) -> None:
        assert report["variants"].keys() == VARIANTS.keys()
        for found in report["variants"].values():
            assert (found["queue"]["finished"], found["queue"]["output_tokens"]) == (20, 600)
            assert (found["queue"]["failed"], found["at_once"]["failed"]) == (0, 0)
        assert report["workload"] | {"source": ""} == {
            "source": "",
            "requests": 20,
            "left_out": 0,
            "prompt_tokens": 12_000,
            "output_tokens": 600,
            "seconds": pytest.approx(1.9),
            "at_once": report["workload"]["at_once"],
        }

    def test_what_was_asked_about_is_said(self, report: dict[str, Any]) -> None:
        assert report["model"]["kv_bytes_per_token"] == 256
        assert (report["pool"]["num_blocks"], report["pool"]["block_bytes"]) == (60, 8192)
        assert report["gpu"] == find_gpu("A100-80").to_json()
        setting = report["setting"]
        assert (setting["max_num_seqs"], setting["max_num_batched_tokens"], setting["max_model_len"]) == (
            256,
            2048,
            1024,
        )
        assert (setting["vtoken"], setting["enable_prefix_caching"]) == ({"policy": "random"}, True)

    def test_the_first_chunk_is_a_hit_for_all_but_one(self, report: dict[str, Any]) -> None:
        assert [found["queue"]["hit_rate"] for found in report["variants"].values()] == [19 * 512 / 12_000] * 3

    def test_every_figure_is_there(self, report: dict[str, Any]) -> None:
        names = "requests finished failed output_tokens preemptions steps seconds output_tokens_per_s hit_rate"
        names += " waits_for_tokens waits_for_blocks waits_for_sequences"
        names += "".join(f" mean_{name} peak_{name}" for name in ("running", "waiting", "held"))
        names += "".join(f" {name}_p{percent}" for name in ("ttft", "queued", "tpot") for percent in (50, 95, 99))
        for found in report["variants"].values():
            assert found.keys() == {"at_once", "queue", "series"}
            assert found["queue"].keys() == set(names.split())
            assert all(value is not None for value in found["queue"].values())
            assert found["at_once"].keys() == {"requests", "mean_running", "peak_running", "preemptions", "failed"}
            course = found["series"]
            assert len({len(course[name]) for name in ("seconds", "running", "waiting", "held")}) == 1
            assert all(before < after for before, after in pairwise(course["seconds"]))
            assert max(course["held"]) == found["queue"]["peak_held"]
            assert found["queue"]["peak_held"] <= 60

    def test_the_table_shows_the_figures_of_the_json(self, result: Any, report: dict[str, Any]) -> None:
        for label, part, key, decimals in (
            ("requests at once, mean while others wait", "at_once", "mean_running", 1),
            ("blocks held, mean", "queue", "mean_held", 0),
            ("output tokens/s", "queue", "output_tokens_per_s", 0),
        ):
            (row,) = [line for line in result.stdout.splitlines() if line.startswith(f"│ {label} ")]
            cells = [cell.strip() for cell in row.strip("│").split("│")]
            values = [found[part][key] for found in report["variants"].values()]
            assert cells[1:4] == [f"{value:,.{decimals}f}" for value in values]
            assert cells[4] == f"{values[2] / values[0]:.2f}x"
        assert "60 blocks of 32 tokens (1,920 tokens): as asked for" in result.stdout
        assert re.search(r"\d+ s for [\d,]+ output tokens\n$", result.stdout)

    def test_the_figure_names_what_it_draws(self, report: dict[str, Any], files: Path) -> None:
        texts = {node.text for node in ElementTree.parse(files / "out.svg").iter() if node.tag.endswith("text")}
        assert {*HEADINGS.values(), "requests waiting", "requests running", "blocks held, %", "last arrival"} <= texts
        assert "20 requests of trace.jsonl, config.json on A100-80, 60 blocks" in texts


REFUSALS = {
    "gpu": (("--gpu", "B9"), "--gpu B9 is not known; give one of A10G"),
    "policy": (("--policy", "h2o"), "--policy h2o needs a model; give random or streaming_llm as a stand-in for it."),
    "budget": (("--budget", "-3"), "budget"),
    "figure": (
        ("--figure", "x.gif"),
        "--figure x.gif is of no kind that can be drawn; let it end in .png, .svg, .pdf.",
    ),
    "json": (("--json", "/no/such/place.json"), "JSON file /no/such/place.json cannot be written; give a file name"),
    "folder": (("--figure", "/no/such/a.svg"), "Figure file /no/such/a.svg cannot be written; give a file name"),
    "pool": (("--blocks", "10"), "10 blocks hold 320 tokens, and vLLM starts only where one request of 1024 tokens"),
    "length": (("--max-model-len", "600"), "no request of the workload fits into 600 tokens; the shortest takes 630"),
    "memory": (("--memory", "1"), "leave no room for K/V; give more --memory"),
    "dtype": (("--dtype", "int4"), "dtype int4 of model"),
    "blocks": (
        ("--block-size", "24", "--enable-prefix-caching"),
        "--block-size 24 does not divide the 512 tokens that one of a trace's hash_ids stands for; give 16",
    ),
}


class TestRefused:
    @pytest.mark.parametrize("name", REFUSALS)
    def test_settings(self, files: Path, name: str) -> None:
        arguments, says = REFUSALS[name]
        given = arguments if name == "memory" else (*BLOCKS, *arguments)
        self.refused(says, str(files), str(files / "trace.jsonl"), *given)

    def test_a_model_that_is_none(self, files: Path, tmp_path: Path) -> None:
        trace = str(files / "trace.jsonl")
        self.refused("cannot be read (No such file or directory); give its config.json.", str(tmp_path), trace)
        self.refused("was not found", "no-such/model-anywhere", trace)

    def test_a_workload_that_is_none(self, files: Path, tmp_path: Path) -> None:
        self.refused("cannot be read (No such file", str(files), str(tmp_path / "none.jsonl"))
        bad = tmp_path / "bad.jsonl"
        bad.write_text(json.dumps(LINES[0]) + "\nx\n", encoding="utf-8")
        self.refused(f"{bad}, line 2: not valid JSON", str(files), str(bad))

    def test_options_of_a_server_are_none_of_a_plan(self, files: Path) -> None:
        result = invoke(str(files), str(files / "trace.jsonl"), "--compress", "asked")
        assert result.exit_code == 2
        assert "No such option: --compress" in re.sub(r"\x1b\[[\d;]*m", "", result.stderr)

    @staticmethod
    def refused(says: str, *arguments: str) -> None:
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert result.stderr.startswith("vtoken: ") and says in result.stderr
        assert result.stderr.count("\n") == 1


# -- real traces ------------------------------------------------------------------------------------------------------

LLAMA = SMALL | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
TRACES = {"azure_conv_2023.csv": (270_000, 76_870), "mooncake_conversation.jsonl": (4_269_971, 113_079)}
"""Prompt and output tokens of the first 300 requests."""


def first_300(name: str) -> Workload:
    directory = data_directory()
    path = None if directory is None else directory / "traces" / name
    if path is None or not path.is_file():
        pytest.skip(f"no traces/{name} in VTOKEN_DATA or beside the checkout")
    return within(read_workload(path, requests=300), 131072)


def hits_without_end(workload: Workload, block_size: int) -> int:
    """Prompt tokens in the cache when requests come one after another and nothing is ever forgotten, counted anew."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    hits = 0
    for arrival in workload.arrivals:
        ends = [min(CHUNK * (n + 1), arrival.prompt) for n in range(len(arrival.chunks))]
        names = [(arrival.chunks[: n + 1], end) for n, end in enumerate(ends)]
        common = 0
        for chunks, end in names:
            if (chunks, end) not in seen:
                break
            common = end
        hits += min(common, arrival.prompt - 1) // block_size * block_size
        seen.update(names)
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", TRACES)
def test_the_first_requests_of_a_real_trace(name: str, variant: str, tmp_path: Path) -> None:
    workload = first_300(name)
    model, gpu = read_model(write(tmp_path, **LLAMA)), find_gpu("A100-80")
    pool = pool_in(model, gpu.memory, 0.92, 2.0, 16)
    time = step_time_of(model, gpu, 0.6, 1.0)
    setting = Setting({"policy": "random"}, pool.num_blocks, 16, 131072, 256, 2048, workload.shares, time)
    engine = make_engine(setting, variant, workload)
    seen = replay(engine, workload, time)
    assert (workload.prompt_tokens, workload.output_tokens, workload.left_out) == (*TRACES[name], 0)
    assert seen.produced == [arrival.outputs for arrival in workload.arrivals]
    assert (engine.held_blocks, seen.failed, pool.num_blocks) == (0, 0, 28_999)
    figures = queue(seen, workload)
    assert figures["peak_held"] <= 28_999 and figures["seconds"] >= workload.seconds
    if workload.shares:
        assert 0 < seen.hits <= hits_without_end(workload, 16)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_hits_of_a_pool_without_end_are_those_that_the_trace_says(variant: str) -> None:
    workload = first_300("mooncake_conversation.jsonl")
    time = StepTime(0, 0, 0, 0, bandwidth=1.0, flops=1.0, efficiency=1.0, overhead=0.02)
    setting = Setting({"policy": "random"}, 400_000, 16, 131072, 256, 2048, True, time)
    assert replay(make_engine(setting, variant, workload), workload, time).hits == hits_without_end(workload, 16)
