"""Flags that a sequence has because it was cut out of a stream."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray


def annotate(data: dict[str, NDArray[Any]]) -> None:
    """A sequence begins with a first step, and an episode cut short ends where the next begins."""
    first, last = data.get("is_first"), data.get("is_last")
    if first is not None:
        if last is not None:
            last[:, :-1] |= first[:, 1:]
        first[:, 0] = True
