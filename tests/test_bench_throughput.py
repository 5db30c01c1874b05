"""Throughput on equal pools: who runs, what the table says of it, and what the checks hold against it."""

import json
from typing import Any

import pytest
from told_engines import ToldBench, quality

from vtoken.evaluation.bench.throughput import Throughput

SECONDS = {"native": 80.0, "none": 64.0, "pack": 56.0, "fill": 40.0, "fill again": 41.0, "prompts alone": 20.0}


def run(variant: str, repeat: int, **fields: Any) -> dict[str, Any]:
    seconds = SECONDS[variant] * (1 + repeat / 100)
    return {
        "part": "load",
        "variant": variant,
        "repeat": repeat,
        "blocks": 80,
        "full_blocks": 40,
        "prompt_tokens": [1000, 1200],
        "requests": 2,
        "output_tokens": 160,
        "seconds": seconds,
        "output_tokens_per_s": 160 / seconds,
        "mean_running": 1.5,
        "tpot_p50_ms": 90.0,
        "preemptions": 0,
        "tokens_evicted": 0 if variant in ("native", "prompts alone") else 700,
        **fields,
    }


def runs(**changed: dict[str, Any]) -> list[dict[str, Any]]:
    """Two repeats of everybody; ``changed`` by variant, with _ for spaces."""
    loads = [run(v, n, **changed.get(v.replace(" ", "_"), {})) for n in range(2) for v in SECONDS]
    return [*loads, {"part": "quality", **quality("h2o")}]


def verdicts(found: list[dict[str, Any]]) -> dict[str, tuple[bool, str]]:
    return {check.what: (check.held, check.found) for check in Throughput().checks(found)}


def test_table() -> None:
    table, of_quality = Throughput().tables(runs())
    shown = {row[0]: row[1:] for row in table.shown()}
    assert shown["native"] == ["80.4 (75.3 to 85.5)", "2.0 (1.9 to 2.1)", "", "1.5", "90", "0", "0"]
    assert shown["fill"][2] == "2.00" and shown["fill"][-1] == "700"
    assert shown["none"][2] == "1.25"
    # What the prompts leave possible: 80 s against the 20 s that they take.
    assert shown["prompts alone"][2] == "4.00"
    assert "The 2 shortest texts to sum up, 1000 to 1200 tokens, 80 output tokens each" in table.note
    assert "(fill again / fill) gives 0.98 x" in table.note
    assert of_quality.shown() == [["h2o", "4 of 6", "5 of 6", "-0.125"]]


def test_checks_hold() -> None:
    found = verdicts(runs())
    assert all(held for held, _ in found.values()) and len(found) == 7
    assert found["fill against native, output tokens/s"] == (True, "2.00 x (2.00 to 2.00)")


@pytest.mark.parametrize(
    ("variant", "fields", "missed"),
    [
        ("pack", {"tokens_evicted": 0}, "pack: every run evicts"),
        ("fill", {"output_tokens_per_s": 2.9}, "fill against native, output tokens/s"),
        ("none", {"output_tokens_per_s": 5.0}, "fill against none, output tokens/s"),
        ("pack", {"output_tokens_per_s": 5.0}, "fill against pack, output tokens/s"),
    ],
)
def test_each_check_can_fail(variant: str, fields: dict[str, Any], missed: str) -> None:
    found = verdicts(runs(**{variant: fields}))
    assert [what for what, (held, _) in found.items() if not held] == [missed]


def test_a_missed_aim_says_what_bounds_it() -> None:
    checks = Throughput().checks(runs(fill={"output_tokens_per_s": 2.9}))
    (missed,) = [check for check in checks if not check.held]
    assert missed.kind == "aim"
    assert "takes 25% of native's time and bounds it to 4.00 x" in missed.reason


def test_figure() -> None:
    figure = Throughput().figure(runs())
    (axes,) = figure.axes
    assert axes.get_xticklabels()[0].get_text() == "native vLLM"
    assert [round(bar.get_height(), 2) for bar in axes.patches] == [1.99, 2.49, 2.84, 3.98]
    texts = " ".join(text.get_text() for text in axes.texts)
    assert "2.00 x native" in texts and "prompts alone" in texts
    assert "2 summaries in 80 blocks (2.0 full requests)" in axes.get_title()


@pytest.mark.parametrize("quick", [False, True])
def test_everybody_runs_the_same_requests_in_turns(quick: bool) -> None:
    asked: list[tuple[str, int, int, int | None]] = []

    def answer(variant: str, task: str, arguments: dict[str, Any]) -> Any:
        assert task == "run_load"
        works = arguments["workloads"]
        asked.append((variant, len(works), works[0]["max_tokens"], arguments.get("concurrency")))
        return run(variant if works[0]["max_tokens"] > 1 else "prompts alone", 0)

    bench = ToldBench(answer, quick=quick)
    found = Throughput().measure(bench)
    count, outputs, blocks, repeats = (3, 24, 16, 2) if quick else (4, 320, 2 * 48, 5)
    assert len(asked) == 6 * repeats and set(asked) == {
        *((variant, count, outputs, None) for variant in SECONDS if variant != "prompts alone"),
        ("native", count, 1, 1),
    }
    assert [variant for variant, *_ in asked[:6]] != [variant for variant, *_ in asked[6:12]]
    assert {spec.engine_args["num_gpu_blocks_override"] - 1 for spec in bench.started} == {blocks}
    assert len(bench.started) == 5
    assert json.loads(json.dumps(found)) == found
