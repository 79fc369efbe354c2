"""Values to bytes and back, without pickle.

A value is a tree of dicts, lists and tuples whose leaves are numpy arrays, numpy scalars, str,
bytes, bool, int, float and None. (Text and bytes of numpy arrive as those of Python.) It is split
in two:

    schema   the structure, dtypes and shapes; the same from call to call, so the receiver parses
             and validates it once and keeps it
    data     the plain leaves in a list, small arrays packed into one blob, and every large array
             as a frame of its own, which the receiver looks at in place

A schema arrives from the network, so it is validated node by node before anything is done with it.
It says how long everything must be, so a malformed message is recognised by comparing lengths,
before anything is allocated. Received arrays are read-only views of the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from dreamfleet.transport.errors import CodecError, MessageError

Plain = None | bool | int | float | str
Buffer = bytes | memoryview

SMALL = 4096  # bytes; below it a leaf travels in the blob, because a frame costs more than a copy
ALIGN = 8
MAX_DEPTH = 32
MAX_NODES = 16_384
MAX_ELEMENTS = 2**40  # far above any message, far below what overflows numpy's arithmetic
MAX_SCHEMAS = 256
MAX_KEPT = 8192  # bytes of a schema that is kept: about 400 keys, and at most 0.5 MB of memory

DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(kind)
    for kind in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
    )
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_BOOL, _UINT8 = DTYPES[0], DTYPES[5]

# A schema node is PLAIN, or a list that starts with one of the other kinds.
PLAIN, DICT, LIST, TUPLE, ARRAY, SCALAR, BYTES, STR = range(8)


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """A value, ready to be put into a message."""

    schema: bytes
    plain: list[Plain]
    blob: bytes
    frames: list[Buffer]

    def encoded(self) -> Encoded:
        return self

    def with_frames(self, frames: list[Buffer]) -> Encoded:
        """The same with copies of its frames."""
        return Encoded(self.schema, self.plain, self.blob, frames)


# --- encoding ------------------------------------------------------------------------------------

_pack = msgspec.msgpack.Encoder().encode


class _Sink:
    """Collects leaves while the structure is walked."""

    __slots__ = ("blob", "blob_size", "frames", "nodes", "plain")

    def __init__(self) -> None:
        self.plain: list[Plain] = []
        self.blob: list[bytes] = []
        self.blob_size = 0
        self.frames: list[Buffer] = []
        self.nodes = 0

    def put(self, data: bytes) -> None:
        padding = -len(data) % ALIGN
        self.blob.append(data)
        if padding:
            self.blob.append(b"\0" * padding)
        self.blob_size += len(data) + padding


def encode(value: Any) -> Encoded:
    """Describe a value; large arrays are referred to, not copied.

    Raises:
        CodecError: The value holds something that cannot be sent; the message names its place.
    """
    sink = _Sink()
    try:
        schema = _pack(_describe(value, sink, 0))
    except _Unsendable as problem:
        place = "/".join(reversed(problem.path)) or "the value"
        raise CodecError(f"Cannot send {place}: {problem.reason}") from None
    except UnicodeEncodeError as problem:
        raise CodecError(f"Cannot send a key: {_not_text(str(problem.object))}") from None
    return Encoded(schema, sink.plain, b"".join(sink.blob), sink.frames)


class _Unsendable(Exception):
    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.path: list[str] = []


def _describe(value: Any, sink: _Sink, depth: int) -> Any:
    sink.nodes += 1
    if sink.nodes > MAX_NODES:
        raise _Unsendable(f"a message holds at most {MAX_NODES} values.")
    kind = type(value)
    if kind is np.ndarray:
        return _describe_array(value, sink)
    if kind is float or kind is bool or value is None:
        sink.plain.append(value)
        return PLAIN
    if kind is int:
        if not -(2**63) <= value < 2**64:
            raise _Unsendable(f"the integer {value} does not fit into 64 bits.")
        sink.plain.append(value)
        return PLAIN
    if kind is str:
        return _describe_text(value, sink)
    if kind is bytes:
        return _describe_bytes(value, sink)
    if depth >= MAX_DEPTH:
        raise _Unsendable(f"it is nested more than {MAX_DEPTH} levels deep.")
    if isinstance(value, Mapping):
        return _describe_dict(value, sink, depth)
    if isinstance(value, (list, tuple)):
        children = []
        for index, child in enumerate(value):
            try:
                children.append(_describe(child, sink, depth + 1))
            except _Unsendable as problem:
                problem.path.append(str(index))
                raise
        return [LIST if isinstance(value, list) else TUPLE, children]
    if isinstance(value, np.str_):
        return _describe_text(str(value), sink)
    if isinstance(value, np.bytes_):
        return _describe_bytes(bytes(value), sink)
    if isinstance(value, np.generic):
        return _describe_array(np.asarray(value), sink, SCALAR)
    if isinstance(value, (bytearray, memoryview)):
        return _describe_bytes(bytes(value), sink)
    if isinstance(value, np.ma.MaskedArray):
        raise _Unsendable("its mask would be lost; send `filled()`, or data and mask.")
    if isinstance(value, Enum):
        raise _Unsendable(f"{value!r} is an enum; send its `value`.")
    if hasattr(value, "__array__"):  # arrays of other libraries arrive as numpy arrays
        return _describe_array(np.asarray(value), sink)
    raise _Unsendable(
        f"values of type {kind.__name__} are not supported; send arrays, numbers, text, bytes, "
        "dicts, lists or tuples."
    )


def _describe_dict(value: Mapping[Any, Any], sink: _Sink, depth: int) -> Any:
    children = []
    for key, child in value.items():
        if type(key) is not str and type(key) is not np.str_:
            raise _Unsendable(f"keys of a dict are strings, not {key!r}.")
        try:
            children.append(_describe(child, sink, depth + 1))
        except _Unsendable as problem:
            problem.path.append(ascii(key)[1:-1])
            raise
    return [DICT, list(map(str, value)), children]


def _describe_array(array: NDArray[Any], sink: _Sink, kind: int = ARRAY) -> Any:
    dtype = array.dtype
    code = CODES.get(dtype)
    if code is None:
        code = CODES.get(dtype.newbyteorder("="))
        if code is None:
            raise _Unsendable(f"arrays of dtype {dtype} are not supported.")
        array = array.astype(DTYPES[code])
    if array.nbytes <= SMALL:
        sink.put(array.tobytes())
    else:
        sink.frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return [kind, code, *array.shape]


def _describe_text(value: str, sink: _Sink) -> Any:
    try:
        data = value.encode()
    except UnicodeEncodeError:
        raise _Unsendable(_not_text(value)) from None
    if len(value) <= SMALL:
        sink.plain.append(value)
        return PLAIN
    sink.frames.append(data)
    return [STR, len(data)]


def _not_text(value: str) -> str:
    return f"{value[:40]!a} has lone surrogates, which UTF-8 cannot carry; send it as bytes."


def _describe_bytes(value: bytes, sink: _Sink) -> Any:
    if len(value) <= SMALL:
        sink.put(value)
    else:
        sink.frames.append(value)
    return [BYTES, len(value)]


# --- schemas -------------------------------------------------------------------------------------


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
    frame: int  # its number, or -1 for a place in the blob


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """A parsed and validated structure. The same object for messages that are alike."""

    node: Any
    leaves: tuple[Leaf, ...]
    plain_paths: tuple[tuple[str, ...], ...]
    blob_size: int
    frame_sizes: tuple[int, ...]
    flat: tuple[tuple[str, Leaf], ...]
    """The leaves by key, if the value is a dict of small arrays: the usual answer."""
    images: frozenset[int]
    """The numbers of frames that are arrays of uint8."""
    bools: tuple[Leaf, ...]


_unpack = msgspec.msgpack.Decoder().decode


def parse_schema(data: bytes) -> Schema:
    """Validate a schema, or find it among those validated before.

    Raises:
        MessageError: The schema is not one that `encode` makes.
    """
    # Structures repeat. Huge ones cost their parsing each time, and no memory.
    return _known_schema(data) if len(data) <= MAX_KEPT else _parse(data)


def _parse(data: bytes) -> Schema:
    try:
        raw = _unpack(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as problem:
        raise MessageError(f"A schema cannot be read: {problem}") from None
    parser = _Parser()
    node, leaves = parser.node(raw, ()), parser.leaves
    return Schema(
        node,
        tuple(leaves),
        tuple(parser.plain_paths),
        parser.blob_size,
        tuple(parser.frame_sizes),
        _flat(node, leaves),
        frozenset(leaf.frame for leaf in leaves if leaf.kind == ARRAY and leaf.dtype is _UINT8),
        tuple(leaf for leaf in leaves if leaf.dtype is _BOOL),
    )


_known_schema = lru_cache(MAX_SCHEMAS)(_parse)


def _flat(node: Any, leaves: Sequence[Leaf]) -> tuple[tuple[str, Leaf], ...]:
    if node is None or node[0] != DICT or any(child != (ARRAY,) for child in node[2]):
        return ()
    if any(leaf.frame >= 0 or not leaf.count for leaf in leaves):
        return ()
    return tuple(zip(node[1], leaves, strict=True))


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
                self._leaf(kind, path, _UINT8, (size,), size)
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
        nbytes, offset, frame = count * dtype.itemsize, -1, -1
        if nbytes <= SMALL:
            offset = self.blob_size
            self.blob_size += nbytes + -nbytes % ALIGN
        else:
            frame = len(self.frame_sizes)
            self.frame_sizes.append(nbytes)
        self.leaves.append(Leaf(kind, path, dtype, shape, count, nbytes, offset, frame))


class Block(dict[str, NDArray[Any]]):
    """Arrays that are filled, and sent as the only argument of a call, again and again. What they
    look like is described once, and the small ones lie in the blob already. Keys stay as they are.
    They are not filled again before the call was answered, because it may have to be sent again.

    Args:
        arrays: What they look like, with a leading axis that all of them share.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        first = encode((dict(arrays),))
        schema = parse_schema(first.schema)
        self.rows = schema.leaves[0].shape[0]
        self._schema, self.blob = first.schema, bytearray(first.blob)
        frames = [bytearray(frame) for frame in first.frames]
        self.frames: list[Buffer] = [memoryview(frame) for frame in frames]
        self._leaves, self._own = schema.leaves, self.frames
        self.frame_bytes = sum(map(len, frames))
        super().__init__((leaf.path[1], _array(leaf, self.blob, frames)) for leaf in schema.leaves)

    def move(self, frames: Sequence[Buffer] = ()) -> None:
        """Let the large arrays lie in these frames, with any content; without, in memory of their
        own again."""
        self.frames = list(frames or self._own)
        for leaf in self._leaves:
            if leaf.frame >= 0:
                self[leaf.path[1]] = _array(leaf, self.blob, self.frames)

    def encoded(self) -> Encoded:
        """What `encode` returns for a tuple with this block."""
        return Encoded(self._schema, [], bytes(self.blob), self.frames)


# --- decoding ------------------------------------------------------------------------------------


def own_frames(schema: Schema, frames: Sequence[Buffer]) -> Sequence[Buffer]:
    """Frames that their sender cannot change any more after they were checked. Arrays of uint8 may
    stay in shared memory, because every value of theirs is valid."""
    if not any(isinstance(f, memoryview) and isinstance(f.obj, np.ndarray) for f in frames):
        return frames
    images = schema.images
    return [frame if index in images else bytes(frame) for index, frame in enumerate(frames)]


def check_data(
    schema: Schema, plain: Sequence[Plain], blob: Buffer, frames: Sequence[Buffer]
) -> None:
    """Compare what came with what the schema announces.

    Raises:
        MessageError: The lengths differ, or a bool is neither 0 nor 1.
    """
    if (
        len(plain) != len(schema.plain_paths)
        or len(blob) != schema.blob_size
        or tuple(map(len, frames)) != schema.frame_sizes
    ):
        raise MessageError("The data of a message does not have the size its schema announces.")
    for leaf in schema.bools:
        if _bytes(leaf, blob, frames).strip(b"\0\1"):  # numpy counts and combines others wrongly
            raise MessageError("A bool in a message is neither 0 nor 1.")


def decode_leaf(leaf: Leaf, blob: Buffer, frames: Sequence[Buffer]) -> Any:
    """One array-like leaf of a message whose data was checked.

    Raises:
        MessageError: It is a text, and not valid.
    """
    if leaf.kind == ARRAY or leaf.kind == SCALAR:
        array = _array(leaf, blob, frames)
        if leaf.frame >= 0:
            array.flags.writeable = False  # those in the blob are bytes, which cannot be written
        return array if leaf.kind == ARRAY else array[()]
    if leaf.kind == BYTES:
        return _bytes(leaf, blob, frames)
    try:
        return str(frames[leaf.frame], "utf-8")
    except UnicodeDecodeError:
        raise MessageError("A text in a message is not valid UTF-8.") from None


def _bytes(leaf: Leaf, blob: Buffer, frames: Sequence[Buffer]) -> bytes:
    if leaf.frame >= 0:
        return bytes(frames[leaf.frame])
    return bytes(blob[leaf.offset : leaf.offset + leaf.nbytes])


def _array(leaf: Leaf, blob: Any, frames: Sequence[Any]) -> NDArray[Any]:
    if leaf.count == 0:
        return np.empty(leaf.shape, leaf.dtype)
    if leaf.frame >= 0:
        return np.ndarray(leaf.shape, leaf.dtype, frames[leaf.frame])
    return np.ndarray(leaf.shape, leaf.dtype, blob, leaf.offset)


def assemble(schema: Schema, plain: Sequence[Any], leaves: Sequence[Any]) -> Any:
    """The tree, from its leaves."""
    return _assemble(schema.node, iter(plain), iter(leaves))


def decode(schema: bytes, plain: Sequence[Plain], blob: Buffer, frames: Sequence[Buffer]) -> Any:
    """The value that `encode` was given.

    Raises:
        MessageError: The message is not one that `encode` makes.
    """
    parsed = parse_schema(schema)
    check_data(parsed, plain, blob, frames)
    if parsed.flat:
        return {
            key: np.ndarray(leaf.shape, leaf.dtype, blob, leaf.offset) for key, leaf in parsed.flat
        }
    return assemble(parsed, plain, [decode_leaf(leaf, blob, frames) for leaf in parsed.leaves])


def _assemble(node: Any, plain: Any, leaves: Any) -> Any:
    if node is None:
        return next(plain)
    kind = node[0]
    if kind == DICT:
        return {
            key: _assemble(child, plain, leaves)
            for key, child in zip(node[1], node[2], strict=True)
        }
    if kind == LIST:
        return [_assemble(child, plain, leaves) for child in node[1]]
    if kind == TUPLE:
        return tuple([_assemble(child, plain, leaves) for child in node[1]])
    return next(leaves)
