"""The replay: insert, sample, update, cost against size, memory of the index, reopening.

Everything is called as a run calls it: numbered batches, samples, a selector made
from the settings, and states (with priorities, if they are used) written back.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.report import Row, compare, scratch, timed
from dreamfleet.replay import Fractions, Replay, ReplayConfig, make_selector

BATCH = 16
LENGTH = 65

Steps = dict[str, np.ndarray[Any, Any]]


def run(quick: bool = False) -> Iterator[Row]:
    """Vectors and images, on disk and in memory, then small against large."""
    for kind in ("vector", "image"):
        for storage in ("disk", "memory"):
            yield from _speed(kind, storage, quick)
    yield from _growth(quick, prioritized=False)
    yield from _growth(quick, prioritized=True)
    yield from opening(50_000 if quick else 1_000_000)


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


def _speed(kind: str, storage: str, quick: bool) -> list[Row]:
    batch, streams = steps(kind), list(range(BATCH))
    inserts = 300 if quick else 4000 if kind == "vector" else 2000
    with scratch() as folder:
        replay = Replay(LENGTH, 10**6, folder if storage == "disk" else None)
        start = time.perf_counter()
        for seq in range(inserts):
            replay.add_batch(batch, streams, "bench", seq)
        rate = BATCH * inserts / (time.perf_counter() - start)
        while replay.stats()["online_queue"]:
            replay.sample(BATCH)
        repeats = 30 if quick else 300
        sampled = median(timed(partial(replay.sample, BATCH), repeats))
        data = replay.sample(BATCH)
        keys = ("stepid", "dyn/deter", "dyn/stoch")
        states = {key: np.ascontiguousarray(data[key][:, 1:]) for key in keys}
        updated = median(timed(partial(replay.update, states), repeats))
        replay.close()
    size = sum(array.nbytes for array in data.values()) / 1e6
    name = f"{kind}/{storage}"
    read, written = f"{BATCH} x {LENGTH} steps, {size:.1f} MB", f"{BATCH} x {LENGTH - 1} states"
    return [
        Row(f"insert/{name}", rate, "steps/s"),
        Row(f"sample/{name}", 1e3 * sampled, "ms", note=read),
        Row(f"update/{name}", 1e3 * updated, "ms", note=written),
    ]


def _growth(quick: bool, prioritized: bool) -> list[Row]:
    """Cost of each operation in a small and in a large replay, measured in turn."""
    small, large = (10**4, 5 * 10**4) if quick else (10**4, 2 * 10**6)
    one, bulk = steps("vector"), steps("vector", 16384)
    names, streams = np.arange(16384) % BATCH, list(range(BATCH))
    step_bytes = sum(array[0].nbytes for array in bulk.values())
    if large * step_bytes > psutil.virtual_memory().available / 2:
        one, bulk = ({"vector": batch["vector"]} for batch in (one, bulk))
        step_bytes = bulk["vector"][0].nbytes
    priorities = np.random.default_rng(0).random((BATCH, LENGTH))
    seq = itertools.count()
    replays = {}
    for size in (small, large):
        fractions = Fractions(uniform=0.0, priority=1.0) if prioritized else Fractions()
        selector = make_selector(ReplayConfig(fractions=fractions))
        replay = replays[size] = Replay(LENGTH, size, online=False, selector=selector)
        while len(replay) < size:
            replay.add_batch(bulk, names)
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(3 if quick else 30):
        for size, replay in replays.items():
            insert = partial(replay.add_batch, one, streams, "bench")
            times["insert", size] += [timed(partial(insert, next(seq)), 1)[0] for _ in range(100)]
            # A prioritised replay is asked in turns, because each sample sets priorities to 0.
            for _ in range(20):
                times["sample", size] += timed(partial(replay.sample, BATCH), 1)
                if prioritized:
                    update = {"stepid": replay.sample(BATCH)["stepid"], "priority": priorities}
                    times["update", size] += timed(partial(replay.update, update), 1)
    for replay in replays.values():
        replay.close()
    note = f"{large:,} items of {step_bytes} bytes a step"
    rows = []
    for what in dict.fromkeys(what for what, _ in times):
        many, few = (1e6 * median(times[what, size]) for size in (large, small))
        name = f"growth/{what}/prioritized" if prioritized else f"growth/{what}"
        rows.append(compare(name, many, "us", f"{small:,} items", few, note))
    return rows


def opening(count: int) -> Iterator[Row]:
    """Memory of the index of a replay of many small steps, and the time to open it again."""
    batch, names = {"reward": np.zeros(4096, np.float32)}, np.arange(4096) % 64
    with scratch() as folder:
        with Replay(LENGTH, count, folder) as replay:
            for _ in range(-(-count // 4096)):
                replay.add_batch(batch, names)
            used = replay.stats()["ram_bytes"] / count
        yield Row("replay/index", used, "bytes/step", note=f"memory, {count:,} steps")
        files = len(list(folder.glob("*.chunk")))
        begin = time.perf_counter()
        with Replay(LENGTH, count, folder):
            seconds = time.perf_counter() - begin
    note = f"{count:,} steps in {files} files"
    yield Row("replay/reopen", 1e6 * seconds / count, "s/million steps", note=note)
