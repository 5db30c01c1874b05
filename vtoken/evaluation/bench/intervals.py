"""Repeats summed up: medians, intervals, ratios of pairs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

COVERAGE = 0.95


@dataclass(frozen=True)
class Interval:
    """What repeats gave: their median, and bounds of the mean at 95 %; bounds are the value itself if there is one."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def half_width(self) -> float:
        """Half of the interval's width, as a share of the median."""
        return (self.high - self.low) / 2 / abs(self.median) if self.median else math.inf

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def interval(values: Sequence[float]) -> Interval:
    """Median, and Student's 95 % interval of the mean. Raises ValueError without values."""
    if not values:
        raise ValueError("an interval needs at least one value")
    mean, spread = statistics.fmean(values), _half_width(values)
    return Interval(statistics.median(values), mean - spread, mean + spread, len(values))


def interval_of_factors(values: Sequence[float]) -> Interval:
    """Median, and the interval of the mean logarithm: for times and rates that differ by factors, none below zero."""
    return replace(ratio(values, [1.0] * len(values)), median=statistics.median(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """ours / theirs, paired by repeat: the median ratio, and Student's 95 % interval of the mean logarithm.

    Raises:
        ValueError: there are not as many of the one as of the other.
    """
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    found = interval(logs)
    return Interval(math.exp(found.median), math.exp(found.low), math.exp(found.high), len(logs))


def _half_width(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    from scipy.stats import t

    quantile = float(t.ppf((1 + COVERAGE) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
