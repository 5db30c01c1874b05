"""What is trapped in blocks: figures worked out by hand, and a user's own prompts."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from block_engine import StubBench

from vtoken.evaluation.bench.bench import POLICIES
from vtoken.evaluation.bench.characterize import FULL, LINES, OWN, QUICK, Characterize

ANY = {"requests": 2, "available": 2, "prompt_tokens": 300, "block_size": 4, "pool_differs": 0, "tokens_moved": 0}
RUNS = [
    {**ANY, "workload": workload, "policy": policy, "tokens_evicted": 70, "full": full, "waste_ratio": waste}
    | {"waste": [0, 0, 5, 0, 10, 5] + [0] * 14, "waste_quartiles": [0.12, waste, 0.68]}
    | {"blocks_per_request": held, "needed_per_request": 4.0}
    for workload, policy, held, waste, full in (
        ("chat", "h2o", 10.0, 0.5, [0, 2, 4, 2, 2]),
        ("chat", "random", 8.0, 0.4, [0, 1, 2, 3, 4]),
        ("long", "h2o", 16.0, 0.6, [0, 6, 0, 0, 4]),
        ("long", "random", 5.0, 0.1, [0, 0, 1, 0, 9]),
    )
]


def test_table() -> None:
    (table,) = Characterize().tables(RUNS)
    assert table.shown() == [
        ["chat", "h2o", "70", "10.0", "4.0", "60 %", "60 %", "50 %", "12 / 50 / 68 %"],
        ["chat", "random", "70", "8.0", "4.0", "50 %", "30 %", "40 %", "12 / 40 / 68 %"],
        ["long", "h2o", "70", "16.0", "4.0", "75 %", "60 %", "60 %", "12 / 60 / 68 %"],
        ["long", "random", "70", "5.0", "4.0", "20 %", "10 %", "10 %", "12 / 10 / 68 %"],
    ]
    assert table.note.startswith("chat (2, 300 tokens) and long (2, 300 tokens); blocks of 4 tokens")


def test_conclusion() -> None:
    chat, long = Characterize().conclusion(RUNS).splitlines()
    assert chat == (
        "chat (2, 300 tokens): of the 10.0 blocks that a request holds on average, 6.0 (60%) are trapped under h2o, "
        "the most, and 50% of 8.0 under random, the least: as many would be free if what is alive lay together."
    )
    assert long.startswith("long (2, 300 tokens): of the 16.0 blocks")


def test_all_checks_hold() -> None:
    checks = Characterize().checks(RUNS)
    assert len(checks) == 4 + 1 + 4 and all(check.held for check in checks)


@pytest.mark.parametrize(
    ("name", "value", "failing"),
    [
        ("tokens_evicted", 0, "chat, h2o: tokens evicted, of these moved"),
        ("tokens_moved", 1, "chat, h2o: tokens evicted, of these moved"),
        ("pool_differs", 1, "blocks of all requests against those missing from vLLM's pool"),
        ("waste_ratio", 0.39, "chat, h2o: F"),
        ("full", [0, 2, 3, 3, 2], "chat, h2o: blocks at most half full"),
    ],
)
def test_each_check_can_fail(name: str, value: Any, failing: str) -> None:
    runs = copy.deepcopy(RUNS)
    runs[0][name] = value
    assert [check.what for check in Characterize().checks(runs) if not check.held] == [failing]


def test_figure_shows_how_full_blocks_are() -> None:
    figure = Characterize().figure(RUNS)
    chat, *_ = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in chat.get_lines()}
    assert lines["h2o"] == [0.0, 20.0, 60.0, 80.0, 100.0]
    assert lines["the paper's range"] == pytest.approx([56.0, 67.0])


def test_figure_shows_the_waste_of_requests() -> None:
    *_, chat, _ = Characterize().figure(RUNS).axes
    h2o = next(line for line in chat.get_lines() if line.get_label() == "h2o")
    assert list(h2o.get_xdata()) == [5.0 * n for n in range(21)]
    assert list(h2o.get_ydata()) == [0, 0, 0, 25, 25, 75, *[100] * 15]
    (paper,) = chat.patches
    assert (paper.get_x(), paper.get_width()) == pytest.approx((40.0, 20.0))


def test_all_policies_are_asked_and_told_apart() -> None:
    assert FULL.policies == POLICIES and set(LINES) == set(POLICIES)
    assert len(set(LINES.values())) == len(POLICIES)


def test_a_miss_is_told_by_the_size_of_blocks() -> None:
    missed = [check.reason for check in Characterize().checks([{**RUNS[0], "waste_ratio": 0.1}]) if not check.held]
    assert missed == ["blocks have 4 tokens here, 16 in the paper"]
    alike = {**RUNS[0], "waste_ratio": 0.1, "block_size": 16}
    assert [check.reason for check in Characterize().checks([alike]) if not check.held] == [""]


def prompt_file(directory: Path, lengths: list[int]) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * n, "max_tokens": 20}) + "\n" for n in lengths))
    return path


def test_own_prompts_say_how_many_were_used(tmp_path: Path) -> None:
    bench = StubBench(file=prompt_file(tmp_path, [100, 101, 102, 103, 6000]))
    runs = Characterize().measure(bench)
    assert [run["policy"] for run in runs] == list(QUICK.policies)
    # Three of the five, 8 outputs in the quick form: 100, 101 and 103 tokens, of which 40 stay.
    assert {(run["workload"], run["requests"], run["available"], run["prompt_tokens"]) for run in runs} == {
        (OWN, 3, 5, 304)
    }
    assert runs[0]["tokens_evicted"] == 304 - 3 * 40 + 3 * 6
    assert Characterize().conclusion(runs).startswith("your prompts (3 of 5, 304 tokens): of the 2.0 blocks")
    assert [check.what for check in Characterize().checks(runs) if check.kind == "aim"] == []
    # One engine, which naive eviction runs on and which holds the model's longest request.
    (spec,) = bench.specs
    assert spec.vtoken is not None and spec.vtoken.reclaim == "none"
    assert set(POLICIES) - {spec.vtoken.policy} <= set(spec.vtoken.request_policies)


def test_own_prompts_longer_than_usual_have_room(tmp_path: Path) -> None:
    bench = StubBench(file=prompt_file(tmp_path, [6000]))
    Characterize().measure(bench)
    assert bench.specs[0].engine_args["max_model_len"] == 6008
    assert bench.specs[0].engine_args["num_gpu_blocks_override"] > 2 * 6008 // 32


def test_prompts_too_short_to_evict_anything_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompts.jsonl nothing is evicted .* 37 tokens are protected"):
        Characterize().measure(StubBench(keep=None, file=prompt_file(tmp_path, [10])))
