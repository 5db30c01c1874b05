"""Intervals, and tables of them, against values worked out by hand."""

import math

import pytest

from vtoken.evaluation.bench.base import Check
from vtoken.evaluation.bench.intervals import Interval, interval, interval_of_factors, ratio
from vtoken.evaluation.bench.report import checks_table
from vtoken.evaluation.bench.tables import Column, Table


def test_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 10.0])
    # Mean 4, sample deviation sqrt(50 / 4), t(0.975, 4) = 2.776445: 2.776445 * sqrt(12.5) / sqrt(5) = 4.389946.
    assert found == Interval(3.0, pytest.approx(-0.389946, abs=1e-5), pytest.approx(8.389946, abs=1e-5), 5)
    assert found.holds(3.0) and not found.holds(8.4)
    assert found.half_width == pytest.approx(4.389946 / 3, abs=1e-5)


def test_one_value_is_its_own_interval() -> None:
    assert interval([2.5]) == Interval(2.5, 2.5, 2.5, 1)
    with pytest.raises(ValueError, match="at least one value"):
        interval([])


def test_ratio_is_paired_and_of_logarithms() -> None:
    found = ratio([2.0, 8.0], [1.0, 2.0])
    # Logarithms ln 2 and ln 4: mean 1.5 ln 2, deviation ln 2 / sqrt(2), t(0.975, 1) = 12.7062.
    half = 12.7062 * math.log(2) / 2
    assert found.median == pytest.approx(2**1.5)
    assert found.high == pytest.approx(2**1.5 * math.exp(half), rel=1e-4)
    assert found.low == pytest.approx(2**1.5 / math.exp(half), rel=1e-4)
    # In another order these are other pairs.
    assert ratio([8.0, 2.0], [1.0, 2.0]).high > found.high
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])


TABLE = Table(
    "What",
    [
        Column("who"),
        Column("blocks"),
        Column("ms", 1),
        Column("share", 0, percent=True),
        Column("change", 2, signed=True),
    ],
    [
        ["native", 1234, 1.25, 0.5, None],
        ["fill", 7, Interval(2.0, 1.0, 3.04, 5), Interval(0.5, 0.25, 0.75, 3), 0.125],
        ["none", 8, Interval(2.0, 2.0, 2.0, 1), 1.0, -0.5],
    ],
    "A note.",
)


def test_cells() -> None:
    assert TABLE.shown() == [
        ["native", "1,234", "1.2", "50 %", ""],
        ["fill", "7", "2.0 (1.0 to 3.0)", "50 % (25 % to 75 %)", "+0.12"],
        ["none", "8", "2.0", "100 %", "-0.50"],
    ]


def test_markdown() -> None:
    assert TABLE.to_markdown().splitlines() == [
        "**What**",
        "",
        "| who | blocks | ms | share | change |",
        "|---|---:|---:|---:|---:|",
        "| native | 1,234 | 1.2 | 50 % |  |",
        "| fill | 7 | 2.0 (1.0 to 3.0) | 50 % (25 % to 75 %) | +0.12 |",
        "| none | 8 | 2.0 | 100 % | -0.50 |",
        "",
        "A note.",
    ]


def test_json_keeps_the_bounds() -> None:
    assert TABLE.to_json()["rows"][1][2] == {"median": 2.0, "low": 1.0, "high": 3.04, "repeats": 5}


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="'What' has not as many cells"):
        Table("What", [Column("one")], [["a", "b"]])


def test_verdicts() -> None:
    checks = [
        Check("a", "1", "1", True, reason="not shown"),
        Check("b", "1", "2", False),
        Check("c", "1", "2", False, "aim", "slow"),
    ]
    assert [row[3:] for row in checks_table(checks).shown()] == [["held", ""], ["FAILED", ""], ["missed", "slow"]]


def test_an_interval_of_factors_is_never_below_zero() -> None:
    found = interval_of_factors([1.0, 100.0, 10.0])
    # Of the exponents 0, 2 and 1: t(0.975, 2) = 4.302653 times 1 / sqrt(3).
    assert found.median == pytest.approx(10.0)
    assert (found.low, found.high) == (pytest.approx(10 ** (1 - 2.484138)), pytest.approx(10 ** (1 + 2.484138)))
    assert interval([1.0, 100.0, 10.0]).low < 0
