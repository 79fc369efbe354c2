"""Structures of values: what a schema may say, and the check that it says nothing else.

A schema arrives from the network, so it is validated node by node, once, before anything is done
with it. Structures repeat from call to call; those seen before are found by their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from dreamfleet.transport.errors import MessageError

Plain = None | bool | int | float | str
Buffer = bytes | memoryview

SMALL = 4096  # bytes; below it a leaf travels in the blob, because a frame costs more than a copy
ALIGN = 8
MAX_DEPTH = 32
MAX_NODES = 16_384
MAX_ELEMENTS = 2**40  # far above any message, far below what overflows numpy's arithmetic
MAX_SCHEMAS = 512
MAX_KEPT = 16_384  # bytes of a schema that is kept

DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(kind)
    for kind in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
    )
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

# A schema node is PLAIN, or a list that starts with one of the other kinds.
PLAIN, DICT, LIST, TUPLE, ARRAY, SCALAR, BYTES, STR = range(8)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array-like leaf of a schema and where its bytes are."""

    kind: int
    path: tuple[str, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    count: int
    nbytes: int
    offset: int  # into the blob, or -1 for a frame of its own


@dataclass(frozen=True, slots=True)
class Schema:
    """A parsed and validated structure."""

    node: Any
    leaves: tuple[Leaf, ...]
    plain_paths: tuple[tuple[str, ...], ...]
    blob_size: int
    frame_sizes: tuple[int, ...]


_unpack = msgspec.msgpack.Decoder().decode
_schemas: dict[bytes, Schema] = {}


def parse_schema(data: bytes) -> Schema:
    """Validate a schema, or find it among those validated before.

    Raises:
        MessageError: The schema is not one that `encode` makes.
    """
    schema = _schemas.get(data)
    if schema is None:
        schema = _parse(data)
        # Structures repeat; whoever sends ever new or huge ones pays for parsing, not with our
        # memory.
        if len(data) <= MAX_KEPT:
            if len(_schemas) >= MAX_SCHEMAS:
                _schemas.clear()
            _schemas[data] = schema
    return schema


def _parse(data: bytes) -> Schema:
    try:
        raw = _unpack(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as problem:
        raise MessageError(f"A schema cannot be read: {problem}") from None
    parser = _Parser()
    node = parser.node(raw, ())
    return Schema(
        node,
        tuple(parser.leaves),
        tuple(parser.plain_paths),
        parser.blob_size,
        tuple(parser.frame_sizes),
    )


class _Parser:
    """Checks a schema node by node and works out where every leaf's bytes are."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.plain_paths: list[tuple[str, ...]] = []
        self.blob_size = 0
        self.frame_sizes: list[int] = []
        self.nodes = 0

    def node(self, raw: Any, path: tuple[str, ...]) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise MessageError(f"A message holds more than {MAX_NODES} values.")
        if len(path) > MAX_DEPTH:
            raise MessageError(f"A message is nested more than {MAX_DEPTH} levels deep.")
        match raw:
            case int() if type(raw) is int and raw == PLAIN:
                self.plain_paths.append(path)
                return None
            case [int(kind), list(keys), list(children)] if kind == DICT:
                if len(keys) != len(children):
                    raise MessageError("A dict in a schema has other numbers of keys and values.")
                if not all(type(key) is str for key in keys) or len(set(keys)) != len(keys):
                    raise MessageError("A dict in a schema has keys that are not distinct texts.")
                return DICT, keys, self._children(children, path, keys)
            case [int(kind), list(children)] if kind in (LIST, TUPLE):
                return kind, self._children(children, path, map(str, range(len(children))))
            case [int(kind), int(code), *shape] if kind in (ARRAY, SCALAR):
                return self._array(kind, code, shape, path)
            case [int(kind), int(size)] if kind in (BYTES, STR) and 0 <= size < MAX_ELEMENTS:
                if kind == STR and size <= SMALL:
                    raise MessageError("A short text has a frame of its own.")
                self._leaf(kind, path, DTYPES[5], (size,), size)
                return (kind,)
        raise MessageError("A schema holds something that is not a structure, array or value.")

    def _children(self, children: list[Any], path: tuple[str, ...], keys: Any) -> list[Any]:
        return [self.node(c, (*path, k)) for c, k in zip(children, keys, strict=True)]

    def _array(self, kind: int, code: int, shape: list[Any], path: tuple[str, ...]) -> Any:
        if not 0 <= code < len(DTYPES):
            raise MessageError(f"A schema names the dtype {code}, which does not exist.")
        if len(shape) > MAX_DEPTH or not all(type(n) is int and n >= 0 for n in shape):
            raise MessageError("A schema holds a shape that no array has.")
        if prod(max(1, n) for n in shape) > MAX_ELEMENTS or (kind == SCALAR and shape):
            raise MessageError("A schema holds a shape that no message could fill.")
        self._leaf(kind, path, DTYPES[code], tuple(shape), prod(shape))
        return (kind,)

    def _leaf(
        self,
        kind: int,
        path: tuple[str, ...],
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        count: int,
    ) -> None:
        nbytes, offset = count * dtype.itemsize, -1
        if nbytes <= SMALL:
            offset = self.blob_size
            self.blob_size += nbytes + -nbytes % ALIGN
        else:
            self.frame_sizes.append(nbytes)
        self.leaves.append(Leaf(kind, path, dtype, shape, count, nbytes, offset))
