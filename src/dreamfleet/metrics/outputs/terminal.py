"""Metrics as lines for a person."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from dreamfleet.metrics.outputs.base import kind_of


class TerminalOutput:
    """One line for each write: the step and the scalars whose names match.

    Args:
        say: Takes a line. Whoever owns the terminal passes it in.
        pattern: A regular expression; only keys that hold a match are shown.
    """

    def __init__(self, say: Callable[[str], None], pattern: str = r".*") -> None:
        self._say = say
        self._pattern = re.compile(pattern)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        shown = {
            key: float(value)
            for key, value in metrics.items()
            if kind_of(value) == "scalar" and self._pattern.search(key)
        }
        if shown:
            fields = "  ".join(f"{key} {readable(value)}" for key, value in shown.items())
            self._say(f"step {step:,}  {fields}")

    def flush(self) -> None:
        """Lines are said at once."""

    def close(self) -> None:
        """Nothing is held."""


def readable(value: float) -> str:
    """About four digits: 12,345,678 as 12.3M, 0.000123 as 1.23e-04."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.2e}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= limit:
            return f"{value / limit:.3g}{unit}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
