"""The columns of a step, and where they lie in a chunk.

A chunk is a header, one column of ticks, then one column a key; every column is contiguous in time,
so that a sequence is one run of bytes a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.errors import SchemaError

STEPID = "stepid"
STEPID_BYTES = 20

COLUMN_ALIGN = 64
TICK_BYTES = 8

_EXTRA = {
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
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

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

    @property
    def step_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns)

    def offsets(self, steps: int) -> tuple[dict[str, int], int]:
        """Where each column starts behind the header of a chunk of that many steps, and the end."""
        cursor = round_up(TICK_BYTES * steps, COLUMN_ALIGN)
        starts = {}
        for column in self.columns:
            starts[column.name] = cursor
            cursor = round_up(cursor + steps * column.row_bytes, COLUMN_ALIGN)
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
                raise ValueError(f"column {name!r} has no sensible shape")
            kind = _EXTRA[dtype] if dtype in _EXTRA else np.dtype(dtype)
            columns.append(Column(name, _storable(name, kind), tuple(shape)))
        if [c.name for c in columns] != sorted({c.name for c in columns}):
            raise ValueError("columns are not in order")
        return cls(tuple(columns))


def _storable(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind not in "biuf" and dtype not in _EXTRA.values():
        raise SchemaError(f"Key {name!r} is {dtype}: steps hold bools, integers and floats.")
    return dtype.newbyteorder("=") if dtype.byteorder == ">" else dtype


def round_up(value: int, align: int) -> int:
    return -(-value // align) * align
