"""Golden files: inputs, parameters and results of a correct implementation. Importable without JAX.

`DREAMFLEET_GOLDEN` names a folder with other files: tests read all sizes and key names from them.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]

FOLDER = Path(os.environ.get("DREAMFLEET_GOLDEN") or Path(__file__).parent / "golden")


def load(name: str) -> Arrays:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as data:
        return {key: data[key] for key in data.files}


def part(data: Arrays, prefix: str) -> Arrays:
    """The entries below a prefix, without it."""
    return {
        key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)
    }


def numbered(data: Arrays, prefix: str) -> list[int]:
    """The numbers that follow a prefix in the names of entries, such as 0, 1, 2."""
    found = (key.removeprefix(prefix).split("/")[0] for key in data if key.startswith(prefix))
    return sorted({int(number) for number in found})
