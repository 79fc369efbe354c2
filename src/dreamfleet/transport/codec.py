"""Values to bytes and back, without pickle.

A value is a tree of dicts, lists and tuples whose leaves are numpy arrays, numpy scalars, str,
bytes, bool, int, float and None. It is split in two:

    schema   the structure, dtypes and shapes; the same from call to call, so the receiver parses
             and validates it once and keeps it
    data     the plain leaves in a list, small arrays packed into one blob, and every large array
             as a frame of its own, which the receiver looks at in place

A schema says how long everything must be, so a message that lies is recognised by comparing
lengths, before anything is allocated. Received arrays are read-only views of the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dreamfleet.transport.errors import CodecError, MessageError
from dreamfleet.transport.schema import (
    ALIGN,
    ARRAY,
    BYTES,
    CODES,
    DICT,
    DTYPES,
    LIST,
    MAX_DEPTH,
    MAX_NODES,
    PLAIN,
    SCALAR,
    SMALL,
    STR,
    TUPLE,
    Buffer,
    Leaf,
    Plain,
    Schema,
    parse_schema,
)


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """A value, ready to be put into a message."""

    schema: bytes
    plain: list[Plain]
    blob: bytes
    frames: list[Buffer]

    def snapshot(self) -> Encoded:
        """The same, holding on to no memory of the caller's."""
        if not self.frames:
            return self
        return Encoded(self.schema, self.plain, self.blob, [bytes(f) for f in self.frames])


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
    if isinstance(value, np.generic):
        return _describe_array(np.asarray(value), sink, SCALAR)
    if isinstance(value, (bytearray, memoryview)):
        return _describe_bytes(bytes(value), sink)
    if hasattr(value, "__array__"):  # arrays of other libraries arrive as numpy arrays
        return _describe_array(np.asarray(value), sink)
    raise _Unsendable(
        f"values of type {kind.__name__} are not supported; send arrays, numbers, text, bytes, "
        "dicts, lists or tuples."
    )


def _describe_dict(value: Mapping[Any, Any], sink: _Sink, depth: int) -> Any:
    children = []
    for key, child in value.items():
        if type(key) is not str:
            raise _Unsendable(f"keys of a dict are strings, not {key!r}.")
        try:
            children.append(_describe(child, sink, depth + 1))
        except _Unsendable as problem:
            problem.path.append(key)
            raise
    return [DICT, list(value), children]


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
    if len(value) <= SMALL:
        sink.plain.append(value)
        return PLAIN
    data = value.encode()
    sink.frames.append(data)
    return [STR, len(data)]


def _describe_bytes(value: bytes, sink: _Sink) -> Any:
    if len(value) <= SMALL:
        sink.put(value)
    else:
        sink.frames.append(value)
    return [BYTES, len(value)]


def encode_rows(tree: Any, count: int) -> list[Encoded]:
    """Encode every row of a tree of arrays that share a leading axis, as a value of its own.

    Raises:
        CodecError: The tree holds something that cannot be sent.
    """
    sample = encode(_first_row(tree))
    small: list[NDArray[Any]] = []
    large: list[NDArray[Any]] = []
    for array in _arrays(tree):
        (small if array[0].nbytes <= SMALL else large).append(np.ascontiguousarray(array))
    table = np.zeros((count, len(sample.blob)), np.uint8)
    offset = 0
    for array in small:
        data = array.reshape(count, -1).view(np.uint8)
        table[:, offset : offset + data.shape[1]] = data
        offset += data.shape[1] + -data.shape[1] % ALIGN
    blobs, size = table.tobytes(), len(sample.blob)
    return [
        Encoded(
            sample.schema,
            sample.plain,
            blobs[row * size : (row + 1) * size],
            [array[row].reshape(-1).view(np.uint8).data for array in large],
        )
        for row in range(count)
    ]


def _first_row(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _first_row(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        rows = [_first_row(value) for value in tree]
        return rows if isinstance(tree, list) else tuple(rows)
    return np.asarray(tree)[0]


def _arrays(tree: Any) -> Iterator[NDArray[Any]]:
    if isinstance(tree, (list, tuple, Mapping)):
        for child in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _arrays(child)
    else:
        array = np.asarray(tree)
        yield array if array.dtype in CODES else array.astype(array.dtype.newbyteorder("="))


# --- decoding ------------------------------------------------------------------------------------


def check_sizes(
    schema: Schema, plain: Sequence[Plain], blob: Buffer, frames: Sequence[Buffer]
) -> None:
    """Compare what came with what the schema announces.

    Raises:
        MessageError: The lengths differ.
    """
    if (
        len(plain) != len(schema.plain_paths)
        or len(blob) != schema.blob_size
        or tuple(map(len, frames)) != schema.frame_sizes
    ):
        raise MessageError("The data of a message does not have the size its schema announces.")


def decode_leaves(schema: Schema, blob: Buffer, frames: Sequence[Buffer]) -> list[Any]:
    """The array-like leaves of a message whose sizes were checked, in the schema's order.

    Raises:
        MessageError: A text is not valid.
    """
    leaves: list[Any] = []
    rest = iter(frames)
    for leaf in schema.leaves:
        source, offset = (blob, leaf.offset) if leaf.offset >= 0 else (next(rest), 0)
        if leaf.kind == ARRAY:
            leaves.append(_view(source, leaf, offset))
        elif leaf.kind == SCALAR:
            leaves.append(_view(source, leaf, offset)[()])
        elif leaf.kind == BYTES:
            leaves.append(bytes(source[offset : offset + leaf.nbytes]))
        else:
            try:
                leaves.append(str(source, "utf-8"))
            except UnicodeDecodeError:
                raise MessageError("A text in a message is not valid UTF-8.") from None
    return leaves


def _view(source: Buffer, leaf: Leaf, offset: int) -> NDArray[Any]:
    if leaf.count == 0:
        return np.empty(leaf.shape, leaf.dtype)
    array = np.frombuffer(source, leaf.dtype, leaf.count, offset)
    if array.flags.writeable:
        array.flags.writeable = False
    return array.reshape(leaf.shape)


def assemble(schema: Schema, plain: Sequence[Any], leaves: Sequence[Any]) -> Any:
    """The tree, from its leaves."""
    return _assemble(schema.node, iter(plain), iter(leaves))


def decode(schema: bytes, plain: Sequence[Plain], blob: Buffer, frames: Sequence[Buffer]) -> Any:
    """The value that `encode` was given.

    Raises:
        MessageError: The message is not one that `encode` makes.
    """
    parsed = parse_schema(schema)
    check_sizes(parsed, plain, blob, frames)
    leaves = decode_leaves(parsed, blob, frames) if parsed.leaves else ()
    return assemble(parsed, plain, leaves)


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
