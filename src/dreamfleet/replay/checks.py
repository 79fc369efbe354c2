"""Checks of what callers hand to the replay, with sentences that say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.chunkfile import MAX_STREAM_JSON, MAX_STREAM_NAME, StreamId
from dreamfleet.replay.errors import SchemaError
from dreamfleet.replay.schema import STEPID, Schema

PRIORITY = "priority"
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def stored_steps(steps: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The keys that are stored, as arrays: everything but `log/`, which goes to metrics only."""
    arrays = {k: np.asarray(v) for k, v in steps.items() if not k.startswith("log/")}
    if STEPID in arrays:
        raise SchemaError("The replay gives every step its stepid: leave the key out of steps.")
    if not arrays:
        raise SchemaError("A step needs at least one key that does not start with 'log/'.")
    return arrays


def check_rows(arrays: Mapping[str, NDArray[Any]], count: int) -> None:
    """That every key has one row for each stream."""
    for name, array in arrays.items():
        if array.ndim < 1 or len(array) != count:
            raise SchemaError(
                f"Key {name!r} has shape {array.shape}, but there are {count} streams: give every "
                "key one row for each stream."
            )


def check_steps(schema: Schema, arrays: Mapping[str, NDArray[Any]], count: int) -> None:
    """That these are steps of the schema, one for each of `count` streams."""
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
    # Should only the order of bytes differ, then writing converts it.
    if theirs != schema:
        raise SchemaError(
            f"These steps differ from those in the replay: {schema.describe_difference(theirs)}. "
            "Use a new directory for steps with other keys, dtypes or shapes."
        )


def check_flags(arrays: Mapping[str, NDArray[Any]]) -> None:
    """That the flags which `sample` sets are flags."""
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
                f"{shown:.200} cannot name a stream: use an integer of 64 bits or at most "
                f"{MAX_STREAM_NAME} characters."
            )
    return names


def _can_name_a_stream(name: Any) -> bool:
    """Whether the header of a chunk has room for it."""
    if isinstance(name, int):
        return _LEAST <= name <= _MOST
    return (
        isinstance(name, str)
        and len(name) <= MAX_STREAM_NAME
        and len(json.dumps(name)) <= MAX_STREAM_JSON
    )


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
