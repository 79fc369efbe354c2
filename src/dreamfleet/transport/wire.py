"""Messages: a small header frame, then one frame per large array.

    client                              server
    HELLO                       ---->
                                <----   WELCOME  protocol, name, incarnation, limit, repeatable
    CALL   id, to, method, rows, value -->
                                <----   REPLY id, value      or      ERROR id, (kind, text, trace)

A client sends nothing but HELLO before it has read WELCOME, and every call is addressed to the
incarnation that it has read there: libzmq may deliver a call to a server's successor, which must
not carry out what the client will count as lost (STALE). A server that is about to end leaves calls
to its successor in the same way. Headers are decoded into a typed struct,
so a header of another shape is refused as a whole.
"""

from __future__ import annotations

import socket as sockets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from dreamfleet.transport.codec import Buffer, Encoded, Plain, decode, encode
from dreamfleet.transport.errors import CodecError, MessageError

PROTOCOL = 1
HELLO, WELCOME, CALL, REPLY, ERROR, STALE = range(6)

MAX_HEADER = 4 << 20
MAX_FRAMES = 4096
MAX_MESSAGE = 1 << 28  # bytes in one frame; libzmq hangs up on a peer that announces more
MAX_INFLIGHT = 256  # requests of one client that a server holds
MAX_HELD = 4096  # requests of all clients, also of those that have disconnected
MAX_CALL = 1 << 29  # bytes in all frames of a call
_MAX_TEXT = 100_000  # characters of an error; the last ones say most
MAX_UNFINISHED = 1 << 30  # bytes of calls that have not come whole, of all connections of a server
MESSAGE_SECONDS = 60.0  # that a call may take from its first byte to its last
PART_COST, CURVE_PART_COST = 9, 42  # bytes of a part on the wire beside its own, at most
MAX_UNAUTHENTICATED = 512  # connections that have not greeted
MAX_CONNECTIONS = 8192
HANDSHAKE_TIMEOUT = 10_000  # ms
BACKLOG = 1024  # connections that the system keeps until libzmq accepts them

HEARTBEAT = 5_000  # ms between pings, answered by libzmq's own thread however busy Python is
HEARTBEAT_TIMEOUT = 15_000  # ms of silence after which the other side counts as dead


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """What a message is, and everything of its value that is small."""

    kind: int
    id: int
    to: int = 0
    method: str = ""
    rows: int = 0  # items of a block along a leading axis; 0 for calls without one
    schema: bytes = b""
    plain: list[Plain] = []
    blob: bytes = b""


_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(Header).decode


def pack(
    kind: int, number: int, value: Encoded, to: int = 0, method: str = "", rows: int = 0
) -> list[Buffer]:
    """The frames of a message.

    Raises:
        CodecError: The value is larger than a message may be, or the method has no possible name.
    """
    try:
        header = _encode_header(
            Header(kind, number, to, method, rows, value.schema, value.plain, value.blob)
        )
    except UnicodeEncodeError:
        raise CodecError(f"{method!a} cannot be the name of a method.") from None
    if len(header) > MAX_HEADER:
        raise CodecError(
            f"The small values of a call take {len(header)} bytes, and {MAX_HEADER} is the limit: "
            "stack them into arrays."
        )
    if value.frames:
        sizes = list(map(len, value.frames))
        if len(sizes) >= MAX_FRAMES:
            raise CodecError(f"Cannot send more than {MAX_FRAMES - 1} large arrays at once.")
        if max(sizes) > MAX_MESSAGE:
            raise CodecError(f"Cannot send an array of more than {MAX_MESSAGE} bytes.")
        if kind == CALL and sum(sizes) > MAX_CALL:
            raise CodecError(f"Cannot send arrays of more than {MAX_CALL} bytes in one call.")
    return [header, *value.frames]


def pack_error(
    number: int, error: BaseException, text: str = "", traceback: str = ""
) -> list[Buffer]:
    """The frames of a reply that says what a call raised."""
    texts = type(error).__name__, text or str(error), traceback
    return pack(ERROR, number, encode(tuple(map(_sendable, texts))))


def _sendable(text: str) -> str:
    """Text as UTF-8 can carry it: file names may hold bytes that are not UTF-8."""
    return text[-_MAX_TEXT:].encode("utf-8", "backslashreplace").decode()


def unpack(frame: Buffer) -> Header:
    """The header of a message.

    Raises:
        MessageError: It is not one of ours.
    """
    if len(frame) > MAX_HEADER:
        raise MessageError(f"A header of {len(frame)} bytes is above the limit of {MAX_HEADER}.")
    try:
        return _decode_header(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as problem:
        raise MessageError(f"A header cannot be read: {problem}") from None


def value_of(header: Header, frames: Sequence[Buffer]) -> Any:
    """The value a message carries.

    Raises:
        MessageError: It is malformed.
    """
    return decode(header.schema, header.plain, header.blob, frames)


# --- what clients and servers share --------------------------------------------------------------

NO_SERVER = "no server listens there"


@dataclass(frozen=True)
class Change:
    """A client is connected, or its connection has ended, or the attempt to connect has failed."""

    connected: bool
    problem: str = ""


class Waker:
    """Wakes a thread that is blocked in a poll: a descriptor that `wake` makes readable. Its owner
    has a lock, under which it is woken and closed."""

    def __init__(self) -> None:
        self._reader, self._writer = sockets.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with suppress(OSError):  # it is full, or closed
            self._writer.send(b"!")

    def clear(self) -> None:
        """The sleeper is up and will now look at everything there is."""
        with suppress(OSError):
            self._reader.recv(4096)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
