"""What is made of the runs of ``bursty``: two requests that forget eight tokens each, twice, in blocks of four."""

from typing import Any

import pytest

from vtoken.evaluation.bench.bursty import QUICK, VARIANTS, Burst, Bursty, Sizes, bursts_of, ratios, settings
from vtoken.evaluation.bench.intervals import Interval

EXPERIMENT = Bursty()
# Step 0 takes a second, those of the bursts (5 and 9) three and two tenths, all others one tenth.
SECONDS = [1.0, 0.1, 0.1, 0.1, 0.1, 0.3, 0.1, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1]
LIVE = [32, 34, 36, 38, 40, 26, 28, 30, 32, 18, 20, 22, 0]
DENSE = [8, 10, 10, 10, 10, 8, 8, 8, 8, 6, 6, 6, 0]
TRAPPED = [8, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 0]
QUALITY = {
    "variant": "quality",
    "policy": "h2o",
    "budget": 0.75,
    "needles": 6,
    "needles_found": 4,
    "native_needles_found": 6,
    "log_likelihood": -2.5,
    "log_likelihood_change": -0.125,
    "tokens_evicted": 99,
}


def run(variant: str, held: list[int], repeat: int = 0, slowest: tuple[float, float] = (0.3, 0.2)) -> dict[str, Any]:
    seconds = list(SECONDS)
    seconds[5], seconds[9] = slowest
    ended = [sum(seconds[: n + 1]) for n in range(len(seconds))]
    series = [[t, h, n, 2 if n else 0, 0] for t, h, n in zip(ended, held, LIVE, strict=True)]
    return {
        "variant": variant,
        "repeat": repeat,
        "requests": 2,
        "bursts": 2,
        "interval": 8,
        "block_size": 4,
        "theta_f": 0.25,
        "series": series,
        "tokens_evicted": 32,
        "tokens_moved": 0 if variant == "none" else 7,
        "blocks_reclaimed": 0 if variant == "none" else 4,
        "preemptions": 0,
        "peak_blocks": max(held),
    }


@pytest.fixture
def runs() -> list[dict[str, Any]]:
    return [QUALITY, run("none", TRAPPED, slowest=(0.15, 0.1)), run("fill", DENSE), run("fill again", DENSE)]


def test_bursts_are_found_where_all_forget_at_once() -> None:
    slow = pytest.approx(3.0), pytest.approx(2.0)
    median = pytest.approx(100.0)
    assert bursts_of(run("fill", DENSE)) == [
        Burst(5, 0.1875, 0, 0.0, median, slow[0]),
        Burst(9, 0.25, 0, 0.0, median, slow[1]),
    ]
    first, second = bursts_of(run("none", TRAPPED))
    # F is 0.35, 0.3, 0.25 from the first one on, and 0.55, 0.5, 0.45 from the second, when the run ends.
    assert (first.step, first.peak_waste, first.recovery, first.above) == (5, pytest.approx(0.35), 2, 0.5)
    assert (second.step, second.peak_waste, second.recovery, second.above) == (9, pytest.approx(0.55), None, 1.0)


def test_a_request_that_ends_or_comes_is_no_burst() -> None:
    ending = run("fill", DENSE)
    for row in ending["series"][9:]:
        row[3] = 1
    assert [burst.step for burst in bursts_of(ending)] == [5]


def test_each_variant_has_a_row(runs: list[dict[str, Any]]) -> None:
    table, compared = EXPERIMENT.tables(runs)
    none, fill, again = table.rows
    assert list(none[:3]) == ["naive eviction (none)", 2, 32]
    assert none[3] == pytest.approx(0.55)
    assert list(none[4:9]) == ["2, not before the next (1 of 2)", 0.75, 10, 0, 0]
    assert list(fill[:9]) == ["vtoken, fill", 2, 32, 0.25, "0", 0.0, 10, 7, 4]
    assert fill[9] == pytest.approx(100.0)
    # Two bursts, 3 and 2: mean 2.5, deviation 1 / sqrt(2), t(0.975, 1) = 12.7062.
    assert fill[10] == Interval(pytest.approx(2.5), pytest.approx(2.5 - 6.3531), pytest.approx(2.5 + 6.3531), 2)
    assert again[0] == "vtoken, fill (A/A)"
    assert "forgets 8 tokens" in table.note and "4 of 6 hidden numbers found (full cache: 6)" in table.note
    assert "-0.125 nats per token" in table.note
    assert [row[0] for row in compared.rows] == ["fill / the same again (A/A)", "fill / none"]
    assert [row[1].median for row in compared.rows] == [pytest.approx(1.0), pytest.approx(2.0)]


def test_bursts_are_paired_by_repeat(runs: list[dict[str, Any]]) -> None:
    later = [run("fill", DENSE, 1, (0.4, 0.4)), run("none", TRAPPED, 1, (0.4, 0.4))]
    # However the runs come: 3 / 1.5, 2 / 1, 4 / 4, 4 / 4.
    found = ratios([later[1], *runs, later[0]])
    assert (found["fill / none"].median, found["fill / none"].repeats) == (pytest.approx(2**0.5), 4)
    assert found["fill / the same again (A/A)"].repeats == 2  # which was run once


def verdicts(runs: list[dict[str, Any]]) -> dict[str, tuple[bool, str, str]]:
    return {check.what: (check.held, check.kind, check.found) for check in EXPERIMENT.checks(runs)}


def test_checks(runs: list[dict[str, Any]]) -> None:
    assert verdicts(runs) == {
        "mass evictions in every run, naive eviction (none)": (True, "must", "2"),
        "mass evictions in every run, vtoken, fill": (True, "must", "2"),
        "mass evictions in every run, vtoken, fill (A/A)": (True, "must", "2"),
        # Closest after the first decode step: 34 of 40 slots, 17 tokens each, 0.15 - 4 / 21.
        "fill: F less S/(n+S), at most, over all steps": (True, "must", "-0.0405"),
        "fill: F is at most theta_F when the step of a burst ends": (True, "aim", "4"),
        "slowest step after a burst, fill / none": (False, "aim", "2.00 (2.00 to 2.00)"),
    }


def test_checks_that_fail(runs: list[dict[str, Any]]) -> None:
    quiet = [*LIVE[:5], 42, 44, 46, 48, 50, 52, 54, 0]
    for row, live in zip(runs[1]["series"], quiet, strict=True):
        row[2] = live
    for row, held in zip(runs[2]["series"], TRAPPED, strict=True):
        row[1] = held
    found = verdicts([*runs[:1], *runs[2:], run("none", TRAPPED)])
    assert found["fill: F less S/(n+S), at most, over all steps"] == (False, "must", "+0.2423")
    assert found["fill: F is at most theta_F when the step of a burst ends"] == (False, "aim", "2")
    assert found["slowest step after a burst, fill / none"] == (True, "aim", "1.00")
    runs[2]["bursts"] = 3
    assert verdicts([*runs[:1], *runs[2:], run("none", TRAPPED)])["mass evictions in every run, vtoken, fill"] == (
        False,
        "must",
        "2",
    )
    assert bursts_of(runs[1]) == []
    found = verdicts(runs)
    assert found["mass evictions in every run, naive eviction (none)"] == (False, "must", "0")
    assert "slowest step after a burst, fill / none" not in found
    assert list(EXPERIMENT.tables(runs)[0].rows[0][3:5]) == [None, ""]


def test_the_figure_shows_every_step(runs: list[dict[str, Any]]) -> None:
    waste, times = EXPERIMENT.figure(runs).axes
    names = [line.get_label() for line in waste.lines]
    assert names[:3] == ["naive eviction (none)", "vtoken, fill", "theta_F"]
    assert list(waste.lines[1].get_ydata()[5:10]) == [18.75, 12.5, 6.25, 0.0, 25.0]
    assert list(times.lines[1].get_ydata()) == pytest.approx([1e3 * seconds for seconds in SECONDS[1:]])
    assert [line.get_xdata()[0] for line in waste.lines[3:]] == [5, 9]


def test_sizes_lead_to_bursts() -> None:
    for sizes in (Sizes(), QUICK):
        # The last one comes with the output after ``bursts`` intervals, and the prompt is already reduced by then.
        assert sizes.outputs > sizes.bursts * sizes.interval + 16
        for variant in VARIANTS:
            config = settings(variant, sizes.interval)
            assert config.budget * sizes.prompt - sizes.interval >= config.sinks + config.recent
    assert settings("pack at once", 64).sudden_rise == 0.1
    assert settings("fill", 64) == settings("fill again", 64)
