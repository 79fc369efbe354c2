"""Several requests to one batch, and one result to several answers.

The usual case, where everybody sends one item of the same structure, is done column by column:
the bytes of all items are joined and looked at as arrays, without looking at any single item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.transport.codec import Encoded, assemble, decode_leaves, encode, encode_rows
from dreamfleet.transport.errors import MessageError, RemoteError
from dreamfleet.transport.schema import ARRAY, SCALAR, TUPLE, Buffer, Plain, Schema

# What every item of a batch must agree on: per leaf its place, dtype and shape.
Signature = tuple[tuple[tuple[str, ...], Any, tuple[int, ...]], ...]


@dataclass(slots=True)
class Request:
    """One caller's item, or block of items along a leading axis. Its sizes have been checked."""

    peer: bytes
    number: int
    rows: int  # 0: one item without a leading axis
    schema: Schema
    plain: list[Plain]
    blob: bytes
    frames: list[Buffer]
    signature: Signature
    arrived: float

    @property
    def items(self) -> int:
        return self.rows or 1


_signatures: dict[tuple[int, int, tuple[type, ...]], tuple[Schema, Signature]] = {}
_MAX_SIGNATURES = 1024


def signature_of(schema: Schema, plain: Sequence[Plain], rows: int) -> Signature:
    """What an item of a request looks like. The same object for requests that are alike.

    Raises:
        MessageError: It holds something that has no place in a batch.
    """
    key = (id(schema), rows, tuple(map(type, plain)))
    known = _signatures.get(key)
    if known and known[0] is schema:
        return known[1]
    if schema.node is None or schema.node[0] != TUPLE:
        raise MessageError("The arguments of a call are a tuple.")
    parts: list[tuple[tuple[str, ...], Any, tuple[int, ...]]] = []
    for leaf in schema.leaves:
        if leaf.kind not in (ARRAY, SCALAR):
            raise MessageError(f"{_name(leaf.path)} is text or bytes, which cannot be batched.")
        if rows and leaf.shape[:1] != (rows,):
            raise MessageError(
                f"{_name(leaf.path)} has shape {leaf.shape}, which is not a block of {rows} items."
            )
        parts.append((leaf.path, leaf.dtype, leaf.shape[1:] if rows else leaf.shape))
    for path, value in zip(schema.plain_paths, plain, strict=True):
        if rows or type(value) not in (bool, int, float):
            raise MessageError(
                f"{_name(path)} is {type(value).__name__}, which cannot be batched; send arrays."
            )
        parts.append((path, np.asarray(value).dtype, ()))
    if len(_signatures) >= _MAX_SIGNATURES:
        _signatures.clear()
    signature = tuple(parts)
    _signatures[key] = (schema, signature)
    return signature


def difference(odd: Signature, usual: Signature) -> str:
    """One sentence that names what is odd about a request."""
    mine = {path: (dtype, shape) for path, dtype, shape in odd}
    theirs = {path: (dtype, shape) for path, dtype, shape in usual}
    for path, (dtype, shape) in theirs.items():
        if path not in mine:
            return f"{_name(path)} is missing, which the other requests of the batch have."
        if mine[path] != (dtype, shape):
            return (
                f"{_name(path)} has dtype {mine[path][0]} and shape {mine[path][1]}, but the other "
                f"requests of the batch have dtype {dtype} and shape {shape}."
            )
    extra = [path for path in mine if path not in theirs]
    if extra:
        return f"{_name(extra[0])} is in this request but not in the others of the batch."
    return "The keys of this request have another order than those of the others of the batch."


def _name(path: tuple[str, ...]) -> str:
    """A leaf's name without the number of the argument, where there is more to say."""
    return "/".join(path[1:]) or f"argument {path[0]}"


def run_batch(
    workfn: Callable[..., tuple[Any, Any]], requests: Sequence[Request]
) -> tuple[Any, Any]:
    """Stack the requests and run the function on them.

    Raises:
        RemoteError: The function returned something else than results and info.
    """
    first = requests[0]
    if all(r.schema is first.schema and not r.rows for r in requests):
        leaves = _join(first.schema, requests)
        plain = [np.asarray([r.plain[i] for r in requests]) for i in range(len(first.plain))]
    else:
        decoded = [decode_leaves(r.schema, r.blob, r.frames) for r in requests]
        columns = zip(*decoded, strict=True)
        leaves = [_concatenate(column, requests) for column in columns]
        plain = []
        for index in range(len(first.plain)):
            plain.append(np.asarray([r.plain[index] for r in requests]))
    answer: Any = workfn(*assemble(first.schema, plain, leaves))
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise RemoteError("A batched function returns two things: the results, and any info.")
    return answer[0], answer[1]


def _join(schema: Schema, requests: Sequence[Request]) -> list[Any]:
    count = len(requests)
    table = np.empty((count, 0), np.uint8)
    if schema.blob_size:
        blobs = b"".join([r.blob for r in requests])
        table = np.frombuffer(blobs, np.uint8).reshape(count, schema.blob_size)
    leaves: list[Any] = []
    frame = 0
    for leaf in schema.leaves:
        if leaf.offset < 0:
            column = np.frombuffer(b"".join([r.frames[frame] for r in requests]), leaf.dtype)
            frame += 1
        elif leaf.nbytes:
            part = table[:, leaf.offset : leaf.offset + leaf.nbytes]
            column = np.ascontiguousarray(part).view(leaf.dtype)
        else:
            column = np.empty(0, leaf.dtype)
        leaves.append(column.reshape(count, *leaf.shape))
    return leaves


def _concatenate(column: Sequence[Any], requests: Sequence[Request]) -> NDArray[Any]:
    if len(column) == 1 and requests[0].rows:
        return np.asarray(column[0])
    return np.concatenate(
        [part if r.rows else part[None] for part, r in zip(column, requests, strict=True)]
    )


def split(result: Any, requests: Sequence[Request]) -> list[Encoded]:
    """Every request's share of the result, ready to be sent.

    Raises:
        RemoteError: The result does not have one row per item.
    """
    total = sum(r.items for r in requests)
    _check_rows(result, total, ())
    if not any(r.rows for r in requests):
        return encode_rows(result, total)
    shares = []
    row = 0
    for request in requests:
        cut = slice(row, row + request.rows) if request.rows else row
        shares.append(encode(_cut(result, cut)))
        row += request.items
    return shares


def _cut(tree: Any, cut: slice | int) -> Any:
    if isinstance(tree, Mapping):
        return {key: _cut(value, cut) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        rows = [_cut(value, cut) for value in tree]
        return rows if isinstance(tree, list) else tuple(rows)
    return np.asarray(tree)[cut]


def _check_rows(tree: Any, total: int, path: tuple[str, ...]) -> None:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            _check_rows(value, total, (*path, str(key)))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            _check_rows(value, total, (*path, str(index)))
    elif np.shape(tree)[:1] != (total,):
        name = "/".join(path) or "the result"
        raise RemoteError(
            f"The batched function returned {name} with shape {np.shape(tree)} for a batch of "
            f"{total} items; every array needs that leading axis."
        )
