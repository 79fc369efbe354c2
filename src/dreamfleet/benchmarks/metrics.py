"""What it costs to keep statistics.

The figure that counts is the share of one core that episode statistics take from the logger at
8,000 steps a second, in batches as the actor sends them.
"""

from __future__ import annotations

import numpy as np

from dreamfleet.benchmarks.report import Row, calls_per_second
from dreamfleet.metrics import Aggregate, EpisodeStats, Timer

_STEPS_PER_SECOND = 8000


def run(quick: bool = False) -> list[Row]:
    """Measure episode statistics and outputs."""
    seconds = 0.1 if quick else 1.0
    rows = [_episodes(size, logs, seconds) for size, logs in ((4, 1), (8, 1), (8, 22), (64, 1))]
    timer = Timer()

    def section() -> None:
        with timer.section("x"):
            pass

    rows.append(Row("timer section", 1e6 / calls_per_second(section, seconds), "us"))
    aggregate, metrics = Aggregate(), {f"loss/{n}": float(n) for n in range(40)}
    cost = 1 / calls_per_second(lambda: aggregate.add(metrics), seconds)
    return [*rows, Row("aggregate 40 scalars", 1e6 * cost, "us")]


def _episodes(size: int, logs: int, seconds: float) -> Row:
    stats = EpisodeStats(video=0)
    envid = np.arange(size)
    batch = {
        "reward": np.random.default_rng(0).random(size, np.float32),
        "is_first": np.zeros(size, bool),
        "is_last": np.zeros(size, bool),
        "image": np.zeros((size, 64, 64, 3), np.uint8),
        **{f"log/{n}": np.zeros(size, np.float32) for n in range(logs)},
    }
    first = {**batch, "is_first": np.ones(size, bool)}
    last = {**batch, "is_last": np.ones(size, bool)}
    count = 0

    def add() -> None:
        nonlocal count
        stats.add(envid, (first, last)[count % 100] if count % 100 < 2 else batch)
        count += 1

    cost = 1 / calls_per_second(add, seconds)
    share = cost * _STEPS_PER_SECOND / size
    return Row(
        f"episodes, batches of {size}, {logs} log keys",
        size / cost,
        "transitions/s",
        note=f"{share:.1%} of a core at {_STEPS_PER_SECOND:,} a second, recording one",
    )
