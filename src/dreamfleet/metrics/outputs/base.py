"""Where metrics go: one interface for all outputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

log = logging.getLogger(__name__)

Kind = Literal["scalar", "histogram", "image", "video", "text"]


class Output(Protocol):
    """Something that keeps or shows metrics. It takes the kinds it can and ignores the others."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of one step; `kind_of` says what each value is."""
        ...

    def flush(self) -> None:
        """Bring what was written to where it survives the process."""
        ...

    def close(self) -> None: ...


def kind_of(value: Any) -> Kind | None:
    """What a value is: by its shape and dtype, nothing else.

    scalar     a number, or an array with one element and no dimensions
    histogram  one dimension: the samples
    image      uint8, (height, width, 1 or 3)
    video      uint8, (time, height, width, 1 or 3)
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
    if array.dtype == np.uint8 and array.size and array.shape[-1] in (1, 3):
        if array.ndim == 3:
            return "image"
        if array.ndim == 4:
            return "video"
    return None


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Booleans and numbers; bfloat16 is no kind of its own for numpy."""
    return dtype.kind in "biuf" or dtype.name == "bfloat16"


class Outputs:
    """Several outputs as one. One that fails is reported and must not stop the others."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = list(outputs)
        self._complained: set[int] = set()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for output in self._outputs:
            try:
                output.write(step, metrics)
            except Exception as error:
                self._complain(output, error)

    def flush(self) -> None:
        for output in self._outputs:
            try:
                output.flush()
            except Exception as error:
                self._complain(output, error)

    def close(self) -> None:
        for output in self._outputs:
            try:
                output.close()
            except Exception as error:
                self._complain(output, error)

    def _complain(self, output: Output, error: Exception) -> None:
        # Once for each: a disk that is full or a network that is away would fill the log.
        if id(output) not in self._complained:
            self._complained.add(id(output))
            log.warning("%s failed: %r", type(output).__name__, error, exc_info=error)
