"""Scores of several runs as the field reports them (Agarwal et al., 2021, "Statistical Precipice").

Scores of one method are a mapping from task to the scores of its runs, one for each seed.
Aggregates over tasks need scores that are comparable between tasks, such as normalised ones.
Intervals are 95 %: Student's t for the mean of a few seeds, percentiles of a stratified bootstrap
for aggregates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = Mapping[str, Sequence[float]]
Floats = NDArray[np.float64]

# The 97.5th percentile of Student's t for 1, 2, 3... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
      2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)  # fmt: skip
_REPEATS = 2000
"""Samples of the bootstrap."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; the interval is NaN for a single run."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):  # of one run
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean_interval(scores: Sequence[float]) -> Estimate:
    """The mean over seeds."""
    values = np.asarray(scores, np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan)
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    half = t * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def interquartile_mean(values: Sequence[float] | Floats) -> float:
    """The mean of the middle half: a quarter is cut off at each end, fractions of a run too."""
    ordered = np.sort(np.asarray(values, np.float64).ravel())
    cut = len(ordered) / 4
    edges = np.arange(len(ordered) + 1, dtype=np.float64)
    weight = np.clip(np.minimum(edges[1:], len(ordered) - cut) - np.maximum(edges[:-1], cut), 0, 1)
    return float((ordered * weight).sum() / weight.sum())


def aggregate(scores: Scores) -> Estimate:
    """The interquartile mean over the runs of all tasks; the bootstrap draws runs within each."""
    rng = np.random.default_rng(0)
    tasks = [np.asarray(runs, np.float64) for runs in scores.values()]

    def once() -> float:
        drawn = [rng.choice(runs, len(runs)) for runs in tasks]
        return interquartile_mean(np.concatenate(drawn))

    return _bootstrap(interquartile_mean(np.concatenate(tasks)), once)


def probability_of_improvement(ours: Scores, theirs: Scores) -> Estimate:
    """How likely a run of ours scores higher than one of theirs on a task, ties counted half, on
    average over the tasks that both have, of which there is one at least."""
    rng = np.random.default_rng(0)
    shared = [name for name in ours if name in theirs]
    pairs = [(np.asarray(ours[n], np.float64), np.asarray(theirs[n], np.float64)) for n in shared]

    def beats(x: Floats, y: Floats) -> float:
        return float((x[:, None] > y).mean() + (x[:, None] == y).mean() / 2)

    def once() -> float:
        drawn = [beats(rng.choice(x, len(x)), rng.choice(y, len(y))) for x, y in pairs]
        return float(np.mean(drawn))

    return _bootstrap(float(np.mean([beats(x, y) for x, y in pairs])), once)


def _bootstrap(value: float, once: Callable[[], float]) -> Estimate:
    low, high = np.percentile([once() for _ in range(_REPEATS)], [2.5, 97.5])
    return Estimate(value, float(low), float(high))
