"""How fast a checkpoint is written and read, checksums and syncs included.

The peer is `numpy.savez` with a sync, which checks nothing and is not atomic.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dreamfleet.benchmarks.report import Row, compare, scratch, timed
from dreamfleet.checkpoint import Checkpoint


def run(quick: bool = False) -> list[Row]:
    """Measure writing and reading checkpoints."""
    megabytes, repeats = (10, 1) if quick else (480, 5)
    rng = np.random.default_rng(0)
    state = {f"layer{n}": rng.random((megabytes, 25_000), np.float32) for n in range(10)}
    with scratch() as folder:
        checkpoint = Checkpoint(folder / "ours")
        plain = folder / "theirs.npz"
        save = median(timed(lambda: checkpoint.save({"agent": state}, step=1), repeats))
        save_plain = median(timed(lambda: _savez(plain, state), repeats))
        load = median(timed(checkpoint.load, repeats))
        load_plain = median(timed(lambda: dict(np.load(plain)), repeats))
    return [
        compare("save", megabytes / save, "MB/s", "numpy.savez", megabytes / save_plain),
        compare("load", megabytes / load, "MB/s", "numpy.load", megabytes / load_plain),
    ]


def _savez(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        np.savez(file, **state)
        file.flush()
        os.fsync(file.fileno())
