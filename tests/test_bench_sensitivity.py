"""One setting at a time: counts of a scheduler without a model, and timed runs beside the default."""

import copy
from typing import Any

import pytest
from block_engine import SEEN, SHOWN, StubBench

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.counted import count, count_all
from vtoken.evaluation.bench.sensitivity import (
    AGAIN,
    DEFAULT,
    FULL,
    QUICK,
    Point,
    Sensitivity,
    _counted_points,
    _timed_points,
)

COUNTED = {
    "kind": "counted",
    "lengths": [128, 192],
    "outputs": 16,
    "block_size": 32,
    "budget": 0.5,
    "tokens_evicted": 90,
    "preemptions": 0,
}
TIMED = {
    "kind": "timed",
    "block_size": 32,
    "requests": 2,
    "prompt": 96,
    "outputs": 6,
    "mode": "fill",
    "steps": 7,
    "mean_blocks": 4.0,
    "waste_ratio": 0.05,
    "tokens_evicted": 50,
    "tokens_moved": 9,
    "preemptions": 0,
}


def timed(parameter: str, value: float | None, speeds: list[float], **other: Any) -> list[dict[str, Any]]:
    runs = [
        {**TIMED, "parameter": parameter, "value": value, "repeat": n, "output_tokens_per_s": speed, "step_ms": 100.0}
        | other
        for n, speed in enumerate(speeds)
    ]
    return [{**runs[0], "quality": SEEN}, *runs[1:]]


RUNS = [
    *(
        {**COUNTED, "parameter": "eviction ratio", "value": value, "mode": mode, "blocks_per_request": blocks}
        | {"waste_ratio": 0.4, "tokens_moved": moved}
        for value, mode, blocks, moved in (
            (0.3, "none", 8.0, 0),
            (0.3, "fill", 6.0, 12),
            (0.8, "none", 7.0, 0),
            (0.8, "fill", 2.0, 40),
        )
    ),
    *timed(DEFAULT, None, [10.0, 12.0]),
    *timed(AGAIN, None, [10.1, 12.12]),
    *timed("eviction ratio", 0.3, [5.0, 6.0], mean_blocks=6.0),
]


def test_tables() -> None:
    counted, clocked = Sensitivity().tables(RUNS)
    assert counted.shown()[1] == ["eviction ratio", "0.3", "fill", "6.0", "40.0 %", "90", "12"]
    assert counted.note.startswith("Block counts of vLLM's real scheduler and block pool without a model, not timed")
    default, again, low = clocked.shown()
    # Mean 11 of 10 and 12, sample deviation sqrt(2), t(0.975, 1) = 12.7062: 12.7062 * sqrt(2) / sqrt(2).
    assert default == [DEFAULT, "", "fill", "4.0", "5.0 %", "9", "11.0 (-1.7 to 23.7)", "", "100.0", *SHOWN]
    assert again[7] == "1.010"
    assert low[:4] == ["eviction ratio", "0.3", "fill", "6.0"] and low[7] == "0.500"


def test_all_checks_hold() -> None:
    checks = Sensitivity().checks(RUNS)
    assert len(checks) == 2 + 1 + 3 + 1 and all(check.held for check in checks)


@pytest.mark.parametrize(
    ("place", "name", "value", "failing"),
    [
        (0, "tokens_evicted", 0, "counted: tokens evicted in each of 4 runs"),
        (0, "preemptions", 1, "counted: tokens evicted in each of 4 runs"),
        (3, "blocks_per_request", 7.1, "eviction ratio: blocks under fill and none"),
        (5, "mean_blocks", 4.1, "timed, default fill: counts of all repeats"),
        (7, "output_tokens_per_s", 18.0, "half-width of the A/A interval"),
    ],
)
def test_each_check_can_fail(place: int, name: str, value: Any, failing: str) -> None:
    runs = copy.deepcopy(RUNS)
    runs[place][name] = value
    (failed,) = [check.what for check in Sensitivity().checks(runs) if not check.held]
    assert failed.startswith(failing)


def test_figure() -> None:
    blocks, waste = Sensitivity().figure(RUNS).axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in blocks.get_lines()]
    assert ([0.3, 0.8], [8.0, 7.0]) in lines and ([0.3, 0.8], [6.0, 2.0]) in lines
    assert waste.get_ylabel() == "F, %"


@pytest.mark.parametrize("sizes", [FULL, QUICK])
def test_every_point_is_a_configuration(sizes: Any) -> None:
    points = [*_counted_points(sizes), *_timed_points(sizes, "fill"), *_timed_points(sizes, "pack")]
    for point in points:
        config = VTokenConfig(policy="h2o", budget=point.budget, **point.options)
        changed = {
            "block size": point.block_size,
            "eviction ratio": 1 - point.budget,
            "theta_F": config.theta_f,
            "batch M": config.pack_blocks,
            "score interval": config.score_interval,
        }
        assert changed[point.parameter] == pytest.approx(point.value)
    assert {point.block_size % 32 for point in _timed_points(sizes, "fill")} == {0}
    assert Point(DEFAULT, None, "fill").options == {"reclaim": "fill"}


def test_blocks_are_counted_without_a_model() -> None:
    lengths, outputs = [128, 192], 5
    found = {size: count({"budget": 0.5, "reclaim": "fill"}, size, lengths, outputs) for size in (16, 48)}
    # 63 and 95 tokens are live after each step: 4 + 6 blocks of 16, 2 + 2 of 48.
    assert [(found[size]["blocks_per_request"], found[size]["preemptions"]) for size in (16, 48)] == [(5, 0), (2, 0)]
    assert found[16]["waste_ratio"] == pytest.approx(1 - (63 + 95) / 160)
    assert found[16]["tokens_evicted"] == found[48]["tokens_evicted"] == (65 + 97) + 2 * 4
    naive = count({"budget": 0.5, "reclaim": "none"}, 16, lengths, outputs)
    assert naive["blocks_per_request"] > 5 and naive["tokens_moved"] == 0


def test_points_are_told_in_order() -> None:
    asked = {"settings": {"budget": 0.5}, "lengths": [96], "outputs": 4}
    ticks: list[None] = []
    found = count_all([{**asked, "block_size": size} for size in (32, 16)], lambda: ticks.append(None))
    assert [counts["blocks_per_request"] for counts in found] == [2.0, 3.0] and len(ticks) == 2


def test_prompts_that_share_their_beginning_hit_the_cache() -> None:
    found = count(None, 16, [64] * 4, 4, shared=32, degree=2)
    assert found["hits"] == [0, 32, 0, 32] and found["tokens_evicted"] == 0
    # Two blocks are shared by two; beyond them a request has two of its own for its prompt, and then one more.
    assert found["blocks_per_request"] == pytest.approx((3 + 4 + 4) / 3)


def test_default_and_settings_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def count_all(points: list[dict[str, Any]], tick: Any) -> list[dict[str, Any]]:
        return [{"blocks_per_request": 3.0, "tokens_evicted": 9, "preemptions": 0} for _ in points]

    monkeypatch.setattr("vtoken.evaluation.bench.sensitivity.count_all", count_all)
    bench = StubBench()
    runs = Sensitivity().measure(bench)
    assert [run["parameter"] for run in runs if run["kind"] == "counted"][:2] == ["block size", "block size"]
    turns = [(run["repeat"], run["parameter"], run["budget"]) for run in runs if run["kind"] == "timed"]
    each = {(DEFAULT, 0.5), (AGAIN, 0.5), ("eviction ratio", 0.7)}
    assert [repeat for repeat, *_ in turns] == [0, 0, 0, 1, 1, 1]
    assert {turn[1:] for turn in turns[:3]} == {turn[1:] for turn in turns[3:]} == each
    # The ratio is the request's own setting; only the pair of equal ones takes two engines.
    assert [spec.copy for spec in bench.specs] == [0, 1]
    assert all("quality" in run for run in runs if run["kind"] == "timed" and run["repeat"] == 0)
