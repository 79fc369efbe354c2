"""Statistics over runs, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from dreamfleet.statistics import (
    aggregate,
    interquartile_mean,
    mean_interval,
    probability_of_improvement,
)


def test_the_mean_of_three_seeds_has_an_interval_of_student() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    half = 4.303 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half))
    assert math.isnan(mean_interval([5.0]).low)


def test_the_interquartile_mean_leaves_a_quarter_out_at_each_end() -> None:
    assert interquartile_mean([100, 1, 2, 3, -100, 2, 4, 0]) == pytest.approx((1 + 2 + 2 + 3) / 4)
    # Six runs: one and a half are left out at each end.
    assert interquartile_mean([0, 1, 2, 3, 5, 50]) == pytest.approx((0.5 * 1 + 2 + 3 + 0.5 * 5) / 3)


def test_the_bootstrap_draws_within_a_task() -> None:
    """Tasks whose runs all agree have an interval without width, however far they are apart."""
    found = aggregate({"a": [0.0, 0.0], "b": [10.0, 10.0]})
    assert (found.value, found.low, found.high) == (5.0, 5.0, 5.0)
    wide = aggregate({"a": [0.0, 10.0], "b": [0.0, 10.0]})
    assert wide.low < 5.0 < wide.high


def test_the_probability_of_improvement_counts_ties_half() -> None:
    found = probability_of_improvement({"a": [1, 3], "b": [5]}, {"a": [2, 3], "b": [5], "c": [0]})
    # Task a: 1 loses twice, 3 wins once and ties once; task b ties.
    assert found.value == pytest.approx((1.5 / 4 + 0.5) / 2)
    assert found.low <= found.value <= found.high
