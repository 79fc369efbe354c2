"""Which frames the logger gets to see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.clock import LocalClock

FILMED = 0
"""The environment that is filmed."""


class Camera:
    """Films a whole episode of one environment now and then.

    Frames are most of what an observation weighs, so all others stay where they are.

    Args:
        every: Seconds between the beginnings of two films; 0 for none.
    """

    def __init__(self, every: float) -> None:
        self._due = LocalClock(every, first=True)
        self._rolling = False

    def frames(
        self, envids: NDArray[Any], obs: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """The images of this batch that belong to the film, with a leading axis of one."""
        rows = (envids == FILMED).nonzero()[0]
        if not rows.size:
            return {}
        row = int(rows[0])
        if obs["is_first"][row]:
            self._rolling = self._due()
        if not self._rolling:
            return {}
        return {key: value[row : row + 1] for key, value in obs.items() if _is_image(value)}


def _is_image(array: NDArray[Any]) -> bool:
    return array.dtype == np.uint8 and array.ndim == 4 and array.shape[-1] in (1, 3)
