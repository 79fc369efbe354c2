"""Everything malformed that servers are sent, by tests, `make chaos` and `make bench ARGS=hostile`.

malformed   messages (lists of frames) that break one rule of the protocol each, then random ones
strangers   bytes of connections that do not get as far as a message
NONSENSE    well-formed arguments that no method of any server takes
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import zmq

from dreamfleet.transport import Keys, wire
from dreamfleet.transport.address import parse
from dreamfleet.transport.codec import ARRAY, DICT, TUPLE, encode

METHODS = ("echo", "act", "add_batch", "sample_train", "tran", "add", "status", "poll")

NONSENSE: tuple[Any, ...] = (
    *(None, -7, (1 << 62) + 1, 1.5, float("nan"), True, "nonsense", "x" * 100_000, b"\0" * 1000),
    *([], {}, {"x": None}, [[[[]]]], {"stepid": 5}, {"envid": -1}),
    *(np.full(3, np.nan, np.float32), np.zeros((2, 2), np.int64), np.zeros((0, 3), np.uint8)),
    np.array([1e38], np.float64),
    {"record": np.full((2, 7), np.nan, np.float32), "envid": np.zeros(2, np.int64)},
)

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_NULL = _GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
CURVE = _GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
"""The greeting of a peer that wants an encrypted connection."""
_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


# --- bytes ---------------------------------------------------------------------------------------


def stranger(rng: random.Random) -> bytes:
    """Bytes of a connection: noise, another protocol, or ZeroMQ that lies or stops."""
    kinds = (wire.CALL, wire.HELLO, wire.REPLY, 17)
    nearly = (
        bytes([0x98, rng.choice(kinds), rng.randrange(256)]) + rng.randbytes(30) for _ in "x" * 20
    )
    whole = CURVE + _READY + _frame(rng.randbytes(100))
    made = (
        rng.randbytes(rng.randint(1, 10_000)),
        b"GET /%d HTTP/1.1\r\nHost: replay\r\n\r\n" % rng.randrange(1000),
        _NULL + _READY + b"".join(_frame(rng.randbytes(rng.randint(0, 200))) for _ in range(20)),
        _NULL + _READY + b"".join(map(_frame, nearly)),
        # A frame that announces more than any machine has, and a message that does not end.
        _NULL + _READY + b"\x02" + (1 << 62).to_bytes(8, "big") + b"x",
        _NULL + _READY + _frame(b"", flags=1) * (wire.MAX_FRAMES + 10),
        whole[: rng.randrange(len(whole))],
    )
    return rng.choice(made)


def _frame(data: bytes, flags: int = 0) -> bytes:
    return bytes([flags | 2]) + len(data).to_bytes(8, "big") + data


def connections(address: str, seconds: float = 10.0) -> Iterator[socket.socket]:
    """Raw connections of every kind that a server accepts: its port, or its socket files."""
    place = parse(address)
    if place.kind == "tcp":
        with socket.create_connection((place.host, place.port), seconds) as peer:
            yield peer
        return
    for path in place.path.parent.glob(f"{place.path.name}*"):
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            with socket.socket(socket.AF_UNIX, kind) as peer:
                peer.settimeout(seconds)
                try:
                    peer.connect(str(path))
                except OSError:  # the file is for the other kind
                    continue
                yield peer


# --- messages ------------------------------------------------------------------------------------


@contextmanager
def raw_socket(address: str, keys: Keys | None = None) -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """A peer that has greeted the server and may send any frames, and the server's incarnation."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.reconnect_ivl = -1
    peer.sndtimeo = peer.rcvtimeo = 20_000
    if keys:
        keys.protect_client(peer)
    peer.connect(address)
    try:
        peer.send_multipart(wire.pack(wire.HELLO, 0, encode(None)))
        first, *rest = peer.recv_multipart()
        yield peer, wire.value_of(wire.unpack(first), rest)["incarnation"]
    finally:
        peer.close()
        context.term()


_TO = 0x1122334455667788  # stands for the server's incarnation, see `addressed`


def addressed(frames: list[bytes], incarnation: int) -> list[bytes]:
    """A message for this incarnation of the server, which drops others unread."""
    here, to = _TO.to_bytes(8, "big"), incarnation.to_bytes(8, "big")
    return [frame.replace(here, to) for frame in frames]


def _header(schema: Any, plain: Any = (), blob: bytes = b"", **fields: Any) -> bytes:
    values = {"kind": wire.CALL, "id": 1, "to": _TO, "method": "echo", "rows": 0, **fields}
    packed = schema if isinstance(schema, bytes) else msgspec.msgpack.encode(schema)
    return msgspec.msgpack.encode([*values.values(), packed, list(plain), blob])


LIES: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"\xc1"],
    [b"\x91" * 10_000],
    [_header([TUPLE, [[ARRAY, 5, 2**62]]])],
    [_header([TUPLE, [[ARRAY, 5, 2**62]]]), b"x"],
    [_header([TUPLE, [[ARRAY, 5, -1]]]), b"x" * 5000],
    [_header([TUPLE, [[ARRAY, 99, 5000]]]), b"x" * 5000],
    [_header([TUPLE, [[ARRAY, "O", 5000]]]), b"x" * 5000],
    [_header([TUPLE, [[ARRAY, 5, 5000]]])],
    [_header([TUPLE, [[ARRAY, 5, 5000]]]), b"x" * 4999],
    [_header([TUPLE, [[ARRAY, 5, 5000]]]), b"x" * 5000, b"more"],
    [_header([TUPLE, [0]])],
    [_header([TUPLE, [0]], [1, 2])],
    [_header([TUPLE, [0]], [{"a": 1}])],
    [_header(0, [1])],
    [_header([DICT, ["a"], [0]], [1])],
    [_header([DICT, [f"k{n}" for n in range(30_000)], [0] * 30_000], [0] * 30_000)],
    [_header([TUPLE, [0] * 1_000_000], [0] * 10)],
    [_header([TUPLE, [0] * 10], [0] * 1_000_000)],
    [_header(b"\x92\x02\x91" * 10_000 + b"\x00")],
    [_header([TUPLE, []], method="")],
    [_header([TUPLE, []], method="x" * 500_000)],
    [_header([TUPLE, []], method="__class__")],
    [_header([TUPLE, []], id=0)],
    [_header([TUPLE, []], id=-1)],
    [_header([TUPLE, []], rows=-1)],
    [_header([TUPLE, []], rows=2**62)],
    [_header([TUPLE, [[ARRAY, 5, 3]]], blob=b"x" * 8, rows=7, method="act")],
    [_header([TUPLE, []], kind=99)],
    [_header([TUPLE, []], kind=wire.REPLY)],
    [_header([TUPLE, []], kind=wire.WELCOME)],
    [_header([TUPLE, []], kind=wire.ERROR)],
    [_header([TUPLE, []], method=b"bytes")],
    [_header([TUPLE, []], id="one")],
    [b"x" * (2 << 20)],
    [b"x"] * (wire.MAX_FRAMES + 10),
]
"""Each message breaks one rule of the protocol."""


def malformed(seed: object) -> Iterator[list[bytes]]:
    """`LIES`, then random bytes, and valid messages with bytes changed, cut off or added."""
    rng = random.Random(str(seed))
    yield from LIES
    value = ({"x": np.arange(3, dtype=np.float32), "big": np.zeros(3000)}, 1, "text")
    good = [
        [bytes(frame) for frame in wire.pack(wire.CALL, 1, encode(value), _TO, method)]
        for method in METHODS
    ]
    while True:
        frames = list(rng.choice(good))
        kind = rng.randrange(5)
        if kind == 0:
            frames = [rng.randbytes(rng.randrange(300)) for _ in range(rng.randrange(1, 4))]
        elif kind == 1:
            data = bytearray(frames[0])
            for _ in range(rng.randrange(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            frames[0] = bytes(data)
        elif kind == 2:
            cut = rng.randrange(len(frames))
            frames[cut] = frames[cut][: rng.randrange(len(frames[cut]))]
        elif kind == 3:
            frames.insert(rng.randrange(len(frames) + 1), rng.randbytes(rng.randrange(50)))
        else:
            rng.shuffle(frames)
            frames = frames[: rng.randrange(1, 3)]
        yield frames
