"""Where metrics go: one interface for all outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from dreamfleet.spaces import is_frame

log = logging.getLogger(__name__)

Kind = Literal["scalar", "histogram", "image", "video", "text"]
EVAL_STEP = "eval/step"
"""Metrics with this key are of a round of evaluation, which began at this step."""


class Output(Protocol):
    """Stores or shows metrics. It takes the kinds it can and ignores the others.

    One of your own needs `write` and is made with the directory of the run; `flush` and `close` may
    be missing. It lives in the logger's process.
    """

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of one step; `kind_of` says what each value is."""

    def flush(self) -> None:
        """Make what was written survive the process."""
        return

    def close(self) -> None:
        """Release what it holds."""
        return


def kind_of(value: Any) -> Kind | None:
    """What a value is, by its shape and dtype alone.

    scalar     a number, or an array with one element and no dimensions
    histogram  one dimension: the samples
    image      uint8 or floats from 0 to 1, (height, width, 1 or 3)
    video      the same, (time, height, width, 1 or 3)
    text       a string
    """
    if isinstance(value, str):
        return "text"
    array = np.asarray(value)
    if not is_numeric(array.dtype):
        return None
    if array.ndim == 0:
        return "scalar"
    if array.ndim == 1 and array.size:
        return "histogram"
    if array.size and (array.dtype == np.uint8 or is_float(array.dtype)):
        if is_frame(np.uint8, array.shape):
            return "image"
        if is_frame(np.uint8, array.shape[1:]):
            return "video"
    return None


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether it is bool, integer or float."""
    return dtype.kind in "biu" or is_float(dtype)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether it is a float. Numpy does not count bfloat16 as one."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _nothing() -> None: ...


class Outputs:
    """Several outputs as one. One that fails is reported, and the others continue."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = list(outputs)
        self._reported: set[int] = set()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._each(lambda output: output.write(step, metrics))

    def flush(self) -> None:
        self._each(lambda output: getattr(output, "flush", _nothing)())

    def close(self) -> None:
        self._each(lambda output: getattr(output, "close", _nothing)())

    def _each(self, call: Callable[[Output], None]) -> None:
        for output in self._outputs:
            try:
                call(output)
            except Exception as error:
                # Once for each output: a full disk or a lost network would fill the log.
                if id(output) not in self._reported:
                    self._reported.add(id(output))
                    name = type(output).__name__
                    log.warning("%s failed: %r", name, error, exc_info=error)
