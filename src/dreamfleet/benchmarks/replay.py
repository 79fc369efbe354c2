"""The replay: inserts, samples, updates, growth, overhead, reopening.

The reference figures were measured on a machine whose memcpy ran at 24 GB/s. They are scaled by
the memcpy rate measured around each figure here, so that `ratio` compares like with like.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dreamfleet.benchmarks.report import Row, compare
from dreamfleet.replay import Replay

REFERENCE_MEMCPY = 24.0
PEER = "reference x memcpy/24"
BATCH = 16
LENGTH = 65

Steps = dict[str, np.ndarray[Any, Any]]


def run(quick: bool = False) -> list[Row]:
    rows = []
    for kind, insert, sample in (("vector", 36_000, 0.55), ("image", 26_000, 2.07)):
        for storage in ("disk", "memory"):
            rows += _speed(kind, storage, insert, sample, quick)
    rows += _growth(quick)
    rows += _reopen(quick)
    return rows


def steps(kind: str, count: int = BATCH) -> Steps:
    """A batch of steps as DreamerV3 of the smallest size stores them."""
    rng = np.random.default_rng(0)
    batch: Steps = {
        "dyn/deter": rng.normal(size=(count, 512)).astype(np.float32),
        "dyn/stoch": rng.normal(size=(count, 32, 4)).astype(np.float32),
        "action": rng.normal(size=(count, 6)).astype(np.float32),
        "reward": np.zeros(count, np.float32),
        "is_first": np.zeros(count, bool),
        "is_last": np.zeros(count, bool),
        "is_terminal": np.zeros(count, bool),
    }
    if kind == "vector":
        batch["vector"] = rng.normal(size=(count, 24)).astype(np.float32)
    else:
        batch["image"] = rng.integers(0, 256, (count, 64, 64, 3), np.uint8)
    return batch


class Memcpy:
    """The copy rate of this machine, in GB/s, as a median over the run."""

    def __init__(self) -> None:
        self._source = np.ones(64 << 20, np.uint8)
        self._target = np.ones(64 << 20, np.uint8)
        self._rates: list[float] = []

    def measure(self) -> None:
        for _ in range(5):
            start = time.perf_counter()
            self._target[:] = self._source
            self._rates.append(self._source.nbytes / 1e9 / (time.perf_counter() - start))

    @property
    def rate(self) -> float:
        return median(self._rates)

    @property
    def scale(self) -> float:
        return self.rate / REFERENCE_MEMCPY

    @property
    def note(self) -> str:
        return f"memcpy {self.rate:.1f} GB/s"


def _speed(kind: str, storage: str, insert: float, sample: float, quick: bool) -> list[Row]:
    memcpy = Memcpy()
    batch, streams = steps(kind), list(range(BATCH))
    inserts = 300 if quick else 4000 if kind == "vector" else 2000
    with tempfile.TemporaryDirectory(prefix="dreamfleet-bench-") as folder:
        replay = Replay(LENGTH, 10**6, folder if storage == "disk" else None)
        memcpy.measure()
        start = time.perf_counter()
        for seq in range(inserts):
            replay.add_batch(batch, streams, "bench", seq)
        rate = BATCH * inserts / (time.perf_counter() - start)
        memcpy.measure()
        while replay.stats()["online_queue"]:
            replay.sample(BATCH)
        repeats = 30 if quick else 300
        sampled = _times(lambda: replay.sample(BATCH), repeats)
        memcpy.measure()
        data = replay.sample(BATCH)
        keys = ("stepid", "dyn/deter", "dyn/stoch")
        states = {key: np.ascontiguousarray(data[key][:, 1:]) for key in keys}
        updated = _times(lambda: replay.update(states), repeats)
        memcpy.measure()
        replay.close()
    size = sum(array.nbytes for array in data.values()) / 1e6
    name, note, scale = f"{kind}/{storage}", memcpy.note, memcpy.scale
    return [
        compare(f"insert/{name}", rate, "steps/s", PEER, insert * scale, note=note),
        compare(
            f"sample/{name}",
            1e3 * sampled,
            "ms",
            PEER,
            sample / scale,
            smaller_is_better=True,
            note=f"{BATCH} x {LENGTH} steps, {size:.1f} MB, {note}",
        ),
        compare(
            f"update/{name}",
            1e3 * updated,
            "ms",
            PEER,
            0.18 / scale,
            smaller_is_better=True,
            note=f"{BATCH} x {LENGTH - 1} states, {note}",
        ),
    ]


def _growth(quick: bool) -> list[Row]:
    """Cost of an insert and a sample in a small and in a large replay, of small steps."""
    sizes = (10**4, 10**5) if quick else (10**4, 2 * 10**6)
    costs: dict[int, tuple[float, float]] = {}
    overhead = 0.0
    memcpy = Memcpy()
    bulk = {"vector": np.zeros((65536, 24), np.float32), "reward": np.zeros(65536, np.float32)}
    one = {key: value[:BATCH] for key, value in bulk.items()}
    for size in sizes:
        before = _resident()
        replay = Replay(LENGTH, size)
        names = np.arange(65536) % BATCH
        while len(replay) < size:
            replay.add_batch(bulk, names)
        stored = replay.stats()["steps"]
        overhead = (_resident() - before) / stored - sum(v[0].nbytes for v in bulk.values())
        while replay.stats()["online_queue"]:
            replay.sample(256)
        memcpy.measure()
        repeats = 300 if quick else 3000
        streams = list(range(BATCH))
        insert = _times(lambda r=replay, s=streams: r.add_batch(one, s), repeats)  # type: ignore[misc]
        while replay.stats()["online_queue"]:
            replay.sample(256)
        sample = _times(lambda r=replay: r.sample(BATCH, "report"), repeats)  # type: ignore[misc]
        costs[size] = insert, sample
        replay.close()
    small, large = sizes
    rows = [
        compare(
            f"growth/{what}",
            1e6 * costs[large][which],
            "us",
            f"{small:,} items",
            1e6 * costs[small][which],
            smaller_is_better=True,
            note=f"{large:,} items, {memcpy.note}",
        )
        for which, what in enumerate(("insert", "sample"))
    ]
    return [*rows, Row("overhead", overhead, "bytes/step", note=f"{large:,} items in memory")]


def _reopen(quick: bool) -> list[Row]:
    """Time to open a directory of vector steps in a new process."""
    count = 10**5 if quick else 10**6
    memcpy = Memcpy()
    with tempfile.TemporaryDirectory(prefix="dreamfleet-bench-") as folder:
        bulk = steps("vector", 4096)
        names = np.arange(4096) % BATCH
        with Replay(LENGTH, count, folder) as replay:
            for _ in range(-(-count // 4096)):
                replay.add_batch(bulk, names)
        memcpy.measure()
        code = (
            "import sys, time; from dreamfleet.replay import Replay; start = time.perf_counter();"
            f"replay = Replay({LENGTH}, {count}, sys.argv[1]); replay.sample({BATCH}, 'report');"
            "sys.stdout.write(str(time.perf_counter() - start))"
        )
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", code, folder],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
    note = f"{count:,} vector steps, open and first sample, {memcpy.note}"
    return [Row("reopen", float(done.stdout), "s", note=note)]


def _times(action: Callable[[], object], repeats: int) -> float:
    """Median seconds of an action."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return median(times)


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
