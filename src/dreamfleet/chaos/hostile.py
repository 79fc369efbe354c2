"""What strangers and holders of keys send that they should not.

Nothing of it fits what a server takes, so all of it has to be refused, and nobody else may notice.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from dreamfleet.transport import Client, Disconnected, Keys, RemoteError, Timeout
from dreamfleet.transport.address import parse
from dreamfleet.transport.wire import CALL, HELLO, MAX_FRAMES, REPLY

_SECONDS = 5.0
_CONNECTIONS = 8  # of a flood
_PACKET = 100_000  # bytes of a packet
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_NULL = _GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE = _GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def attack(rng: random.Random, address: str, methods: Sequence[str], keys: Keys | None) -> Attack:
    """Send a server what it has to refuse."""
    result = Attack()
    for _ in range(_CONNECTIONS):
        result.sent += _send_bytes(address, rng.choice(_STRANGERS)(rng))
    if keys:
        result.sent += 1
        with Client(address, "stranger", keys=Keys.generate()) as stranger, suppress(Disconnected):
            stranger.connect(0.5)
            result.accepted.append("a connection with another key")
    for _ in range(_CONNECTIONS):
        # A connection is ended after ten mistakes, so each has a few of its own.
        with Client(address, "holder of the key", keys=keys, patience=_SECONDS) as holder:
            for _ in range(rng.randint(1, 12)):
                arguments = tuple(rng.choice(NONSENSE) for _ in range(rng.randint(1, 6)))
                result.call(holder, rng.choice([*methods, "nothing"]), arguments)
    return result


class Attack:
    """What became of what was sent."""

    def __init__(self) -> None:
        self.sent = 0
        self.accepted: list[str] = []
        """Calls that a server has carried out, although they fit nothing."""

    def call(self, client: Client, method: str, arguments: tuple[Any, ...]) -> None:
        """Make a call."""
        self.sent += 1
        with suppress(RemoteError, Disconnected, Timeout):
            client.call(method, *arguments).result(_SECONDS)
            self.accepted.append(f"{method}{arguments!r:.200}")


NONSENSE: tuple[Any, ...] = (
    *(None, -7, (1 << 62) + 1, 1.5, float("nan"), True, "nonsense", "x" * 100_000, b"\0" * 1000),
    *([], {}, {"x": None}, [[[[]]]], {"stepid": 5}, {"envid": -1}),
    *(np.full(3, np.nan, np.float32), np.zeros((2, 2), np.int64), np.zeros((0, 3), np.uint8)),
    np.array([1e38], np.float64),
    {"record": np.full((2, 7), np.nan, np.float32), "envid": np.zeros(2, np.int64)},
)
"""What no method of any server takes."""


def _send_bytes(address: str, data: bytes) -> int:
    """Send bytes over a connection of their own, and hang up. Returns how often."""
    place = parse(address)
    with suppress(OSError):
        if place.kind == "tcp":
            connection = socket.create_connection((place.host, place.port), _SECONDS)
        else:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(_SECONDS)
            connection.connect(str(place.path))
        with connection:
            connection.sendall(data if place.kind == "tcp" else data[:_PACKET])
            connection.settimeout(0.05)
            connection.recv(1 << 16)
    return 1


def _frame(data: bytes, flags: int = 0) -> bytes:
    return bytes([flags | 2]) + len(data).to_bytes(8, "big") + data


def _garbage(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(1, 10_000))


def _another_protocol(rng: random.Random) -> bytes:
    return b"GET /%d HTTP/1.1\r\nHost: replay\r\n\r\n" % rng.randrange(1000)


def _broken_headers(rng: random.Random) -> bytes:
    """Messages whose headers are none."""
    return _NULL + _READY + b"".join(_frame(rng.randbytes(rng.randint(0, 200))) for _ in range(20))


def _changed_headers(rng: random.Random) -> bytes:
    """Messages that are nearly ours."""
    kinds = (CALL, HELLO, REPLY, 17)
    heads = (
        bytes([0x98, rng.choice(kinds), rng.randrange(256), rng.randrange(256)]) + rng.randbytes(30)
        for _ in range(20)
    )
    return _NULL + _READY + b"".join(map(_frame, heads))


def _too_large(_: random.Random) -> bytes:
    """A frame that announces more than anybody has."""
    return _NULL + _READY + b"\x02" + (1 << 62).to_bytes(8, "big") + b"x"


def _too_many(_: random.Random) -> bytes:
    """A message that does not end."""
    return _NULL + _READY + _frame(b"", flags=1) * (MAX_FRAMES + 10)


def _unfinished(rng: random.Random) -> bytes:
    whole = _CURVE + _READY + _frame(rng.randbytes(100))
    return whole[: rng.randrange(len(whole))]


_STRANGERS: tuple[Callable[[random.Random], bytes], ...] = (
    *(_garbage, _another_protocol, _broken_headers, _changed_headers),
    *(_too_large, _too_many, _unfinished),
)
