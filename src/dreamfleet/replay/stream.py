"""Batches for training and reporting, cut from sampled windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import ConfigError

Batch = dict[str, NDArray[Any]]

_DATA = "data/"


class Stream(Iterator[Batch]):
    """Cuts each window into `consec` consecutive batches with a context prefix.

    Batch i holds steps `i * length` to `(i + 1) * length + context` of the window, so a batch
    begins with the last `context` steps of the one before it, whose stored states it can start
    from. The key `consec` says which part of the window a batch is. A window may be longer than
    needed (the report stream uses the first part of training windows), never shorter.

    `source` is anything that returns windows `[batch, time, ...]`, such as
    `partial(replay.sample, 16, mode="train")`.
    """

    def __init__(
        self,
        source: Callable[[], Mapping[str, Any]],
        length: int,
        consec: int = 1,
        context: int = 0,
    ) -> None:
        if length < 1 or consec < 1 or context < 0:
            raise ConfigError(
                f"A stream needs length >= 1, consec >= 1 and context >= 0, not {length}, {consec} "
                f"and {context}."
            )
        self.length = length
        self.consec = consec
        self.context = context
        self._source = source
        self._window: Mapping[str, Any] | None = None
        self._part = 0

    @staticmethod
    def window(length: int, consec: int = 1, context: int = 0) -> int:
        """Steps a window needs: the `length` of the replay it is sampled from."""
        return consec * length + context

    def __next__(self) -> Batch:
        if self._window is None:
            self._window, self._part = self._check(self._source()), 0
        start = self._part * self.length
        stop = start + self.length + self.context
        batch = {k: np.ascontiguousarray(v[:, start:stop]) for k, v in self._window.items()}
        rows = len(next(iter(batch.values())))
        batch["consec"] = np.full((rows, stop - start), self._part, np.int32)
        self._part += 1
        if self._part == self.consec:
            self._window = None
        return batch

    def save(self) -> dict[str, Any]:
        """A flat dict: the part that comes next and, inside a window, the window."""
        if self._window is None:
            return {"part": 0}
        data = {f"{_DATA}{key}": np.array(value) for key, value in self._window.items()}
        return {"part": self._part, **data}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `save` was called; a window that is used up by now (`consec` may have been
        larger then) is left."""
        self._part = int(state["part"])
        data = {k.removeprefix(_DATA): np.asarray(v) for k, v in state.items() if k != "part"}
        self._window = self._check(data) if 0 < self._part < self.consec else None

    def _check(self, window: Mapping[str, Any]) -> Mapping[str, Any]:
        needed = self.window(self.length, self.consec, self.context)
        for key, value in window.items():
            if value.ndim < 2 or value.shape[1] < needed:
                raise ConfigError(
                    f"Key {key!r} of a window has shape {value.shape}, but {self.consec} x "
                    f"{self.length} steps with {self.context} of context need {needed}: make the "
                    f"replay with length={needed}."
                )
        return window
