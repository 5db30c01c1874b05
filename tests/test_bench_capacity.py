"""Requests at once in a pool: the search, small runs worked out by hand, and tables and checks of made-up runs."""

from typing import Any

import pytest

from vtoken.evaluation.bench.capacity import SETTINGS, WAYS, Capacity, _simulations
from vtoken.evaluation.bench.capacity_task import Setting, find_capacity, largest, measure_demand, run_together

SMALL = Setting(prompt=60, outputs=100, budget=80, pool=32)
"""A full request takes 10 blocks, one that is packed 5: 3 or 6 at once."""
KEPT = {"budget": 80, "recent": 8}
RANDOM, WINDOW = {"policy": "random", **KEPT}, {"policy": "streaming_llm", **KEPT}


class TestSettings:
    @pytest.mark.parametrize(("setting", "native", "ideal"), zip(SETTINGS, (5, 11), (10, 22), strict=True))
    def test_the_paper_s(self, setting: Setting, native: int, ideal: int) -> None:
        assert (setting.full_blocks, setting.packed_blocks) == (1020, 512)
        assert (setting.pool // setting.full_blocks, setting.ideal) == (native, ideal)

    def test_a_part_of_it(self) -> None:
        assert SETTINGS[0].scaled(16) == Setting(270, 750, 512, 339)
        assert SETTINGS[0].scaled(16).full_blocks == 64


class TestSearch:
    @pytest.mark.parametrize("answer", range(9))
    @pytest.mark.parametrize("guess", [None, 1, 4, 8])
    def test_it_finds_the_largest(self, answer: int, guess: int | None) -> None:
        asked: list[int] = []

        def holds(number: int) -> bool:
            asked.append(number)
            return number <= answer

        assert largest(holds, 7, guess) == answer
        assert len(set(asked)) == len(asked)
        assert set(asked) >= {answer + 1, answer} - {0}

    def test_a_good_guess_costs_two_questions(self) -> None:
        asked: list[int] = []
        largest(lambda number: bool(asked.append(number)) or number <= 5, 100, 5)
        assert asked == [5, 6]


class TestRunTogether:
    @pytest.mark.parametrize(
        ("vtoken", "capacity", "why"),
        [
            (None, 3, "a request is preempted"),
            ({"reclaim": "none", **RANDOM}, 3, "a request is preempted"),
            ({"reclaim": "fill", **RANDOM}, 6, "a request is not admitted"),
            ({"reclaim": "fill", **WINDOW}, 6, "a request is not admitted"),
        ],
        ids=["native", "none", "fill", "fill, window"],
    )
    def test_as_many_as_fit_run_to_their_ends(self, vtoken: dict[str, Any] | None, capacity: int, why: str) -> None:
        found = run_together(vtoken, SMALL.to_json(), capacity)
        assert (found["feasible"], found["why"], found["steps"]) == (True, "", 100)
        blocks = SMALL.full_blocks if capacity == 3 else SMALL.packed_blocks
        if vtoken is None or vtoken["reclaim"] == "fill":
            assert found["demand"] == [blocks * (n + 1) for n in range(capacity)]
            assert found["peak_blocks"] == blocks * capacity
        assert found["tokens_evicted"] == (0 if vtoken is None else capacity * (159 - 79))
        one_more = run_together(vtoken, SMALL.to_json(), capacity + 1)
        assert (one_more["feasible"], one_more["why"]) == (False, why)
        assert one_more["steps"] < 100

    def test_who_waits_until_another_has_ended_does_not_run_beside_it(self) -> None:
        setting = {"prompt": 300, "outputs": 20, "budget": 300, "pool": 20}
        found = run_together({"reclaim": "fill", "policy": "random", "budget": 300, "recent": 8}, setting, 2)
        assert (found["feasible"], found["why"], found["steps"]) == (False, "a request is not admitted", 20)

    def test_pack_packs_what_eager_thresholds_tell(self) -> None:
        setting = Setting(120, 400, 160, 100).to_json()
        lazy, eager = (
            run_together(
                {"reclaim": "pack", "policy": "random", "budget": 160, "recent": 8, "theta_f": theta}, setting, 7
            )
            for theta in (0.6, 0.02)
        )
        assert not lazy["feasible"] and lazy["tokens_moved"] == 0
        assert eager["feasible"] and eager["tokens_moved"] > 0


class TestFindCapacity:
    def test_the_result_has_every_run(self) -> None:
        found = find_capacity("fill", {"reclaim": "fill", **RANDOM}, SMALL.to_json(), ratio=0.5)
        assert {name: found[name] for name in ("part", "way", "capacity", "ratio")} == {
            "part": "capacity",
            "way": "fill",
            "capacity": 6,
            "ratio": 0.5,
        }
        assert [(run["concurrency"], run["feasible"]) for run in found["runs"]] == [(6, True), (7, False)]

    def test_a_pilot_says_where_to_begin(self) -> None:
        setting = Setting(prompt=240, outputs=400, budget=320, pool=128).to_json()
        vtoken = {"reclaim": "none", "policy": "random", "budget": 320, "recent": 8, "interval": 4}
        found = find_capacity("none", vtoken, setting, pilot=4)
        assert [run["concurrency"] for run in found["runs"]] == [3, 4]
        assert found["capacity"] == 3

    def test_demand_is_what_fewer_would_take_alone(self) -> None:
        vtoken = {"reclaim": "none", **RANDOM}
        many, few = (measure_demand("none", vtoken, SMALL.to_json(), count) for count in (4, 2))
        assert many["part"] == "demand" and many["demand"][:2] == few["demand"]
        assert many["peak_blocks"] == many["demand"][-1] <= 40


def searched(way: str, pool: int, capacity: int, peak: int, **more: Any) -> dict[str, Any]:
    run = {"concurrency": capacity, "feasible": True, "why": "", "steps": 12005, "peak_blocks": peak, "demand": []}
    run |= {"tokens_evicted": 0 if way == "native" else 7, "tokens_moved": 3, "blocks_reclaimed": 0}
    fails = {**run, "concurrency": capacity + 1, "feasible": False, "why": "a request is preempted", "steps": 9000}
    setting = {"prompt": 4320, "outputs": 12000, "budget": 8192, "pool": pool}
    return {
        "part": "capacity",
        "way": way,
        "setting": setting,
        "capacity": capacity,
        "runs": [run, fails],
        **more,
    }


def timed(way: str, speed: float, repeat: int, **more: Any) -> dict[str, Any]:
    return {
        "part": "timed",
        "scale": 128,
        "way": way,
        "repeat": repeat,
        "setting": {"prompt": 33, "outputs": 93, "budget": 64, "pool": 42},
        "num_blocks": 21,
        "block_size": 32,
        "output_tokens_per_s": speed,
        "seconds": 930 / speed,
        "peak_running": 5 if way == "native" else 10,
        "peak_blocks": 20,
        "preemptions": 0,
        "tokens_evicted": 0 if way == "native" else 600,
        **more,
    }


QUALITY = {
    "part": "quality",
    "policy": "h2o",
    "budget": 0.5,
    "needles": 8,
    "needles_found": 6,
    "native_needles_found": 8,
    "log_likelihood": -3.0,
    "log_likelihood_change": -0.04,
    "tokens_evicted": 100,
}
RUNS: list[dict[str, Any]] = [
    searched("native", 5427, 5, 5100),
    searched("none", 5427, 5, 5100),
    searched("fill", 5427, 10, 5120),
    *({**searched("native", 339, 5, 320, ratio=share), "part": "ratio"} for share in (0.3, 0.5)),
    *({**searched("fill", 339, 8, 320, ratio=share), "part": "ratio"} for share in (0.3, 0.5)),
    {"part": "demand", "way": "native", "demand": [1020, 2040]},
    {"part": "demand", "way": "fill", "demand": [512, 1024]},
    QUALITY,
    {**QUALITY, "policy": "random", "needles_found": 1},
    *(timed("native", speed, n) for n, speed in enumerate([50.0, 60.0])),
    *(timed("fill", speed, n) for n, speed in enumerate([75.0, 90.0])),
    *(timed("fill again", speed, n) for n, speed in enumerate([75.0, 90.0])),
]


class TestTables:
    def test_capacities(self) -> None:
        table = Capacity().tables(RUNS)[0]
        assert table.shown() == [
            ["5,427", "native vLLM", "5", "", "5", "5,100", "3", "a request is preempted after 9,000 steps"],
            ["5,427", "naive eviction (none)", "5", "10", "", "5,100", "3", "a request is preempted after 9,000 steps"],
            ["5,427", "vtoken, fill", "10", "10", "8", "5,120", "3", "a request is preempted after 9,000 steps"],
        ]
        assert "no timed run" in table.note and "Quality of random at 0.5" in table.note

    def test_ratio_and_demand(self) -> None:
        _, ratios, demand, _ = Capacity().tables(RUNS)
        assert ratios.shown() == [["30 %", "8,192", "5", "8", "0"], ["50 %", "8,192", "5", "8", "0"]]
        assert demand.shown() == [["1", "1,020", "512"], ["2", "2,040", "1,024"]]

    def test_time(self) -> None:
        table = Capacity().tables(RUNS)[3]
        assert [row[:2] + row[4:] for row in table.shown()] == [
            ["native vLLM", "5", "1.00", "20", "0", "0"],
            ["vtoken, fill", "10", "1.50", "20", "0", "600"],
            ["vtoken, fill (A/A)", "10", "1.50", "20", "0", "600"],
        ]
        assert "differs by 1.00 to 1.00. Quality of h2o at 0.5" in table.note

    def test_the_long_ones_have_a_table_of_their_own(self) -> None:
        of_long = {"part": "long", "scale": 4}
        runs = [*RUNS, timed("native", 30.0, 0, **of_long), timed("fill", 60.0, 0, **of_long)]
        *_, table = Capacity().tables(runs)
        assert table.title == "The same in time, with a model, at 1/4 of the length"
        assert table.shown() == [
            ["native vLLM", "5", "31.0", "30.0", "1.00", "20", "0", "0"],
            ["vtoken, fill", "10", "15.5", "60.0", "2.00", "20", "0", "600"],
        ]
        assert "divided by 4" in table.note and "One run each." in table.note
        shown = {check.what: (check.held, check.found) for check in Capacity().checks(runs)}
        assert shown["timed, 1/4: fill is faster than native"] == (True, "2.00")
        assert shown["timed, 1/4, fill: evictions fired"] == (True, "600")


def test_figure() -> None:
    left, right = Capacity().figure(RUNS).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[1020, 2040], [512, 1024], [5427, 5427]]
    assert [list(line.get_ydata()) for line in right.lines] == [[5, 5], [8, 8], [0, 0]]


class TestChecks:
    def test_all_held(self) -> None:
        checks = Capacity().checks(RUNS)
        assert all(check.held for check in checks)
        assert [check.found for check in checks] == ["5", "7", "7", "10", "5,120", "10", "600", "600", "1.50"]
        assert [check.kind for check in checks].count("aim") == 2

    @pytest.mark.parametrize(
        ("place", "changes", "what"),
        [
            (0, {"capacity": 4}, "native holds as many full requests as fit"),
            (1, {"tokens_evicted": 0}, "none: evictions fired"),
            (1, {"capacity": 11}, "fill holds no fewer requests"),
            (2, {"peak_blocks": 5121}, "fill never holds more"),
            (2, {"capacity": 9, "peak_blocks": 4608}, "fill holds what ideal packing allows"),
            (-3, {"tokens_evicted": 0}, "timed, 1/128, fill: evictions fired"),
        ],
    )
    def test_each_can_fail(self, place: int, changes: dict[str, Any], what: str) -> None:
        runs = [dict(run) for run in RUNS]
        run = runs[place]
        if "runs" in run:
            number = changes.get("capacity", run["capacity"])
            run |= {"capacity": number, "runs": [run["runs"][0] | changes | {"concurrency": number}, run["runs"][1]]}
        else:
            run |= changes
        failed = [check.what for check in Capacity().checks(runs) if not check.held]
        assert len(failed) == 1 and what in failed[0]

    def test_fill_that_is_slower(self) -> None:
        runs = [run | ({"output_tokens_per_s": 40.0} if run.get("way") == "fill" else {}) for run in RUNS]
        (failed,) = [check for check in Capacity().checks(runs) if not check.held]
        assert (failed.what, failed.kind) == ("timed, 1/128: fill is faster than native", "aim")


def test_what_is_run() -> None:
    full, quick = _simulations(False), _simulations(True)
    of = [one["setting"]["pool"] for one in full if one["task"] == "capacity"]
    assert of == [11519] * len(WAYS) + [5427] * len(WAYS)
    assert all(one["setting"]["prompt"] == 4320 for one in full if one["task"] != "ratio")
    assert {one["ratio"] for one in full if one["task"] == "ratio"} == {0.3, 0.4, 0.5, 0.6, 0.7, 0.8}
    assert all(one["setting"]["prompt"] == 270 for one in quick)
