"""The columns of a step, and checks of what callers give to the replay.

A chunk is a header, one column of ticks, then one column a key. Every column is contiguous in
time, so a sequence is one run of bytes a column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.errors import SchemaError
from dreamfleet.spaces import LOG_PREFIX

STEPID = "stepid"
STEPID_BYTES = 20
CHUNK_ID_BYTES = 16
PRIORITY = "priority"
StreamId = int | str
IMPORTED = "imported:"
"""Names of streams that hold steps of other runs start with it."""

_COLUMN_ALIGN = 64
_TICK_BYTES = 8
_MAX_STREAM_NAME = 700  # as JSON, for which the header of a chunk has room
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_SMALL_FLOATS = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
}


@dataclass(frozen=True)
class Column:
    """One key of a step."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.name}{list(self.shape)}"


@dataclass(frozen=True)
class Schema:
    """Every column, in the order of their names."""

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, steps: Mapping[str, NDArray[Any]]) -> Schema:
        """The schema of a batch of steps; the leading axis is the batch."""
        return cls(
            tuple(
                Column(name, _storable(name, steps[name].dtype), steps[name].shape[1:])
                for name in sorted(steps)
            )
        )

    def offsets(self, steps: int) -> tuple[dict[str, int], int]:
        """Where each column starts behind the header of a chunk of that many steps, and the end."""
        cursor = round_up(_TICK_BYTES * steps, _COLUMN_ALIGN)
        starts = {}
        for column in self.columns:
            starts[column.name] = cursor
            cursor = round_up(cursor + steps * column.row_bytes, _COLUMN_ALIGN)
        return starts, cursor

    def describe_difference(self, other: Schema) -> str:
        """What `other` has that this does not and the other way round, for an error message."""
        mine, theirs = set(map(str, self.columns)), set(map(str, other.columns))
        parts = []
        if theirs - mine:
            parts.append(f"unexpected {', '.join(sorted(theirs - mine))}")
        if mine - theirs:
            parts.append(f"missing {', '.join(sorted(mine - theirs))}")
        return "; ".join(parts)

    def to_json(self) -> list[list[Any]]:
        return [[c.name, c.dtype.name, list(c.shape)] for c in self.columns]

    @classmethod
    def from_json(cls, rows: Any) -> Schema:
        """Raises `ValueError`, `TypeError` or `SchemaError` where the rows make no sense."""
        columns = []
        for name, dtype, shape in rows:
            if not isinstance(name, str) or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise ValueError(f"column {name!r} has an invalid shape")
            kind = _SMALL_FLOATS[dtype] if dtype in _SMALL_FLOATS else np.dtype(dtype)
            columns.append(Column(name, _storable(name, kind), tuple(shape)))
        if [c.name for c in columns] != sorted({c.name for c in columns}):
            raise ValueError("columns are not in order")
        return cls(tuple(columns))


def _storable(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind not in "biuf" and dtype not in _SMALL_FLOATS.values():
        raise SchemaError(f"Key {name!r} is {dtype}: steps hold bools, integers and floats.")
    return dtype.newbyteorder("=") if dtype.byteorder == ">" else dtype


def round_up(value: int, align: int) -> int:
    """The next multiple of `align`."""
    return -(-value // align) * align


def stored_steps(steps: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The keys that are stored, as arrays: all but those that only go to the metrics."""
    arrays = {k: np.asarray(v) for k, v in steps.items() if not k.startswith(LOG_PREFIX)}
    if STEPID in arrays:
        raise SchemaError("The replay gives every step its stepid: leave the key out of steps.")
    if not arrays:
        raise SchemaError(f"A step needs at least one key that does not start with {LOG_PREFIX!r}.")
    return arrays


def check_rows(arrays: Mapping[str, NDArray[Any]], count: int) -> None:
    """Check that every key has one row for each stream."""
    for name, array in arrays.items():
        if array.ndim < 1 or len(array) != count:
            raise SchemaError(
                f"Key {name!r} has shape {array.shape}, but there are {count} streams: give every "
                "key one row for each stream."
            )


def check_steps(schema: Schema, arrays: Mapping[str, NDArray[Any]], count: int) -> None:
    """Check that these are steps of the schema, one for each of `count` streams."""
    columns = schema.columns
    if len(columns) == len(arrays) and all(
        (array := arrays.get(column.name)) is not None
        and array.shape == (count, *column.shape)
        and array.dtype == column.dtype
        for column in columns
    ):
        return
    check_rows(arrays, count)
    theirs = Schema.of(arrays)
    # If only the order of bytes differs, writing converts it.
    if theirs != schema:
        raise SchemaError(
            f"These steps differ from those in the replay: {schema.describe_difference(theirs)}. "
            "Use a new directory for steps with other keys, dtypes or shapes."
        )


def check_flags(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Check that the flags which `sample` sets are bools."""
    for name in ("is_first", "is_last"):
        if name in arrays and arrays[name].dtype != np.bool_:
            raise SchemaError(f"Key {name!r} is {arrays[name].dtype}: give it as bool.")


def stream_names(streams: Sequence[StreamId] | NDArray[Any]) -> list[StreamId]:
    """Streams as plain integers and strings."""
    names: list[Any] = streams.tolist() if isinstance(streams, np.ndarray) else list(streams)
    if set(map(type, names)) == {int} and min(names) >= _LEAST and max(names) <= _MOST:
        return names
    for which, name in enumerate(names):
        if isinstance(name, np.integer):
            names[which] = name = int(name)
        if not _can_name_a_stream(name):
            shown = repr(name) if isinstance(name, str) else type(name).__name__
            raise SchemaError(
                f"{shown:.200} cannot name a stream: use an integer of 64 bits or a short string."
            )
    return names


def _can_name_a_stream(name: Any) -> bool:
    if isinstance(name, int):
        return _LEAST <= name <= _MOST
    return isinstance(name, str) and len(json.dumps(name[:_MAX_STREAM_NAME])) <= _MAX_STREAM_NAME


def is_imported(stream: StreamId | None) -> bool:
    """Whether a stream, or a chunk without one, holds steps of another run."""
    return stream is None or (isinstance(stream, str) and stream.startswith(IMPORTED))


def update_values(
    schema: Schema, arrays: Mapping[str, NDArray[Any]], lead: tuple[int, ...]
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32] | None]:
    """Values for stored keys `[n, ...]`, and the priorities `[n]` if there are any."""
    columns = {column.name: column for column in schema.columns}
    values, priority = {}, None
    for name, array in arrays.items():
        column = columns.get(name)
        if column is None and name == PRIORITY:
            if array.shape != lead or not (np.isfinite(array) & (array >= 0)).all():
                raise SchemaError(
                    f"priority has to be finite, not negative and of the stepids' shape {lead}."
                )
            priority = array.reshape(-1).astype(np.float32)
        elif column is None or array.shape != (*lead, *column.shape):
            raise SchemaError(
                f"An update of {name!r} with shape {array.shape} fits no stored key: "
                f"{', '.join(map(str, columns.values()))}."
            )
        elif column.dtype.kind in "biu" and array.dtype.kind not in "biu":
            raise SchemaError(
                f"An update of {name!r} with {array.dtype} would be cut to {column.dtype}: convert "
                "it first."
            )
        else:
            values[name] = array.reshape(-1, *column.shape)
    return values, priority
