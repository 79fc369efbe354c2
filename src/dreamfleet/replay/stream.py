"""Batches for training and reporting, cut from sampled windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import ConfigError

Batch = dict[str, NDArray[Any]]


class Stream(Iterator[Batch]):
    """Cuts the first `context + length` steps out of each window.

    A window may be longer (reports use the first part of training windows), never shorter.

    `source` is anything that returns windows `[batch, time, ...]`, such as
    `partial(replay.sample, 16, mode="train")`.
    """

    def __init__(
        self, source: Callable[[], Mapping[str, Any]], length: int, context: int = 0
    ) -> None:
        if length < 1 or context < 0:
            raise ConfigError(
                f"A stream needs length >= 1 and context >= 0, not {length} and {context}."
            )
        self.length = length
        self.context = context
        self._source = source

    @property
    def window(self) -> int:
        """Steps a window needs: the least `length` of the replay it is sampled from."""
        return self.length + self.context

    def __next__(self) -> Batch:
        window, steps = self._source(), self.window
        for key, value in window.items():
            if value.ndim < 2 or value.shape[1] < steps:
                raise ConfigError(
                    f"Key {key!r} of a window has shape {value.shape}, but {self.length} steps "
                    f"with {self.context} of context need {steps}: make the replay with "
                    f"length={steps}."
                )
        return {key: np.ascontiguousarray(value[:, :steps]) for key, value in window.items()}
