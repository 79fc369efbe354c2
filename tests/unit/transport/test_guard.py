"""Connections that do not finish their messages are ended, and no others."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from transport_processes import greet

from benchmarks.hostile import Tap
from dreamfleet.transport import Client, CodecError, Disconnected, Keys, Server, wire
from dreamfleet.transport.codec import encode
from dreamfleet.transport.guard import Guard
from dreamfleet.transport.remote import RemoteListener

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_INFO"), reason="only Linux tells how many bytes came"
)
KB, MB = 1 << 10, 1 << 20


class Peers:
    """A port with connections, and a clock that the test sets."""

    def __init__(self, **limits: Any) -> None:
        self._stack = ExitStack()
        self._listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = self._listener.getsockname()[1]
        self.now = 0.0
        self.guard = Guard(port, clock=lambda: self.now, **limits)
        self._address = ("127.0.0.1", port)
        self._accepted: dict[socket.socket, socket.socket] = {}

    def connect(self) -> socket.socket:
        peer = self._stack.enter_context(socket.create_connection(self._address))
        accepted = self._stack.enter_context(self._listener.accept()[0])
        self._accepted[peer] = accepted
        self.guard.accepted(accepted.fileno())
        return peer

    def greeted(self) -> socket.socket:
        peer = self.connect()
        peer.sendall(bytes(100))
        self.check({peer: 100})
        return peer

    def check(self, read: Mapping[socket.socket, int] | None = None, after: float = 1.0) -> int:
        """A check of the guard, after libzmq has taken all that came."""
        self.now += after
        told = {self._accepted[peer].fileno(): size for peer, size in (read or {}).items()}
        for peer in self._accepted:
            self._drain(peer)
        ended = self.guard.check(told)
        for peer in list(self._accepted):
            self._drain(peer)
        return ended

    def descriptor(self, peer: socket.socket) -> int:
        return self._accepted[peer].fileno()

    def _drain(self, peer: socket.socket) -> None:
        accepted = self._accepted[peer]
        accepted.setblocking(False)
        with suppress(BlockingIOError):
            while accepted.recv(1 << 20):
                pass
            self.guard.closed(accepted.fileno())
            accepted.close()
            del self._accepted[peer]

    def close(self) -> None:
        self._stack.close()


@contextmanager
def peers(**limits: Any) -> Iterator[Peers]:
    with closing(Peers(**limits)) as made:
        yield made


def is_ended(peer: socket.socket) -> bool:
    peer.setblocking(False)
    with suppress(BlockingIOError):
        return peer.recv(1) == b""
    return False


def test_a_message_that_is_never_finished_costs_the_connection() -> None:
    with peers(seconds=60) as all_of:
        slow, other = all_of.greeted(), all_of.greeted()
        slow.sendall(bytes(10 * KB))
        for _ in range(60):
            slow.sendall(bytes(100))
            other.sendall(bytes(10 * KB))
            assert all_of.check({other: 10 * KB}) == 0
        assert all_of.check() == 1
        assert is_ended(slow)
        assert not is_ended(other)
        assert all_of.check() == 0


def test_a_message_that_begins_right_after_another_is_seen_as_well() -> None:
    with peers(seconds=60) as all_of:
        peer = all_of.greeted()
        for _ in range(3):  # one is finished, and the next begins, between two checks
            peer.sendall(bytes(100 * KB))
            assert all_of.check({peer: 50 * KB}) == 0
            peer.sendall(bytes(50 * KB))
            assert all_of.check({peer: 50 * KB}) == 0
        checks = 1
        while not all_of.check():
            checks += 1
            assert checks < 100
        assert checks > 50
        assert is_ended(peer)


def test_a_connection_that_could_not_be_ended_is_ended_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with peers(unauthenticated=1) as all_of:
        first, second = all_of.connect(), all_of.connect()
        with monkeypatch.context() as patch:
            patch.setattr("os.dup", Mock(side_effect=OSError(errno.EMFILE, "")))
            assert all_of.check() == 0
        assert all_of.check() == 1
        assert is_ended(first)
        assert not is_ended(second)


def test_a_message_that_is_finished_in_time_is_nothing_to_end() -> None:
    with peers(seconds=60) as all_of:
        peer = all_of.greeted()
        for _ in range(4):
            peer.sendall(bytes(10 * KB))
            assert [all_of.check() for _ in range(59)] == [0] * 59
            assert all_of.check({peer: 10 * KB}) == 0
        assert not is_ended(peer)


def test_an_idle_connection_is_kept() -> None:
    """Both sides ping every five seconds, which is all that comes."""
    with peers() as all_of:
        idle, never_greeted = all_of.greeted(), all_of.connect()
        for _ in range(2000):
            for peer in (idle, never_greeted):
                peer.sendall(bytes(2 * 45))
            assert all_of.check(after=5.0) == 0
        assert not is_ended(idle)
        assert not is_ended(never_greeted)


def test_a_trickle_is_ended_too() -> None:
    """Too little at a time to be told from pings, but not without end."""
    with peers() as all_of:
        peer = all_of.greeted()
        checks = 0
        while not all_of.check(after=1000.0):
            peer.sendall(bytes(31_000))
            checks += 1
            assert checks < 100
        assert is_ended(peer)
        assert checks > 30


def test_an_unauthenticated_peer_has_room_for_a_greeting_and_no_more() -> None:
    with peers() as all_of:
        small, large = all_of.connect(), all_of.connect()
        small.sendall(bytes(2 * KB))
        large.sendall(bytes(100 * KB))
        assert all_of.check() == 1
        assert is_ended(large)
        assert not is_ended(small)
        assert all_of.guard.due - all_of.now < 1


def test_unfinished_messages_share_a_limit_and_the_largest_goes_first() -> None:
    with peers(total=40 * KB) as all_of:
        holders = [all_of.greeted() for _ in range(3)]
        for peer, size in zip(holders, (10, 30, 20), strict=True):
            peer.sendall(bytes(size * KB))
        assert all_of.check() == 0  # it may be whole, and only not read yet
        assert all_of.check() == 1
        assert [is_ended(peer) for peer in holders] == [False, True, False]
        assert all_of.check() == 0


def test_no_peer_is_blamed_for_a_server_that_was_too_busy_to_read() -> None:
    with peers(seconds=60) as all_of:
        peer = all_of.greeted()
        peer.sendall(bytes(100 * KB))
        assert all_of.check(after=600.0) == 0
        assert all_of.check(after=600.0) == 0
        assert all_of.check({peer: 100 * KB}) == 0
        assert not is_ended(peer)


def test_too_many_connections_are_ended() -> None:
    with peers(unauthenticated=3, most=2) as all_of:
        friends, unknown = [all_of.greeted() for _ in range(4)], []
        assert [is_ended(peer) for peer in friends] == [False, False, True, True]
        for _ in range(5):
            unknown.append(all_of.connect())
            all_of.check()
        assert [is_ended(peer) for peer in unknown] == [True, True, False, False, False]
        assert [is_ended(peer) for peer in friends[:2]] == [False, False]


def test_descriptors_do_not_pile_up() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with peers() as all_of:
        for _ in range(3):
            all_of.check()
        before = count()
        for _ in range(50):
            all_of.check()
        assert count() == before


def test_a_descriptor_that_is_used_again_belongs_to_the_new_connection() -> None:
    with peers(seconds=60) as all_of:
        first = all_of.greeted()
        descriptor = all_of.descriptor(first)
        all_of.guard.closed(descriptor)
        first.sendall(bytes(200 * KB))
        all_of.guard.accepted(descriptor)
        assert [all_of.check() for _ in range(2)] == [1, 0]  # not greeted, and holds too much


# --- with libzmq ---------------------------------------------------------------------------------


@contextmanager
def serving(keys: Keys | None = None, **limits: Any) -> Iterator[tuple[Server, int, list[Any]]]:
    """A server, its port, and what it was told."""
    told: list[Any] = []
    server = Server("tcp://127.0.0.1:{auto}", keys=keys)
    server.bind("note", lambda *args: told.append(len(args)))
    port = int(server.address.rpartition(":")[2])
    listener = server._listener
    assert isinstance(listener, RemoteListener)
    listener._guard = Guard(port, **limits)
    with server:
        yield server, port, told


def part(data: bytes, *, more: bool = True) -> bytes:
    return bytes([2 | more]) + struct.pack(">Q", len(data)) + data


def await_end(peer: socket.socket) -> None:
    """Read until the other side hangs up."""
    peer.settimeout(120)
    with suppress(ConnectionError):
        while peer.recv(65536):
            pass


def ended_by(server: Server) -> int:
    """The connections that the server has ended; it counts them after it has."""
    with server._lock:
        return server._listener.ended


def test_connections_are_capped_before_their_handshake() -> None:
    with serving(Keys.generate(), unauthenticated=5) as (server, port, _), ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
            for _ in range(20)
        ]
        for peer in silent[:15]:
            await_end(peer)
        while ended_by(server) < 15:
            time.sleep(0.01)
        assert ended_by(server) == 15


@pytest.mark.parametrize("tiny", [False, True], ids=["large parts", "tiny parts"])
def test_parts_without_an_end_are_thrown_away(tiny: bool) -> None:
    parts = part(b"x") * 1000 if tiny else part(bytes(MB))
    with (
        serving(total=8 * MB, seconds=1) as (server, port, _),
        socket.create_connection(("127.0.0.1", port), timeout=120) as peer,
    ):
        greet(peer)
        peer.sendall(part(bytes(wire.pack(wire.HELLO, 0, encode(None))[0]), more=False))
        with suppress(ConnectionError):
            while True:
                peer.sendall(parts)
                time.sleep(0.001)
        await_end(peer)
        assert ended_by(server) == 1
        with Client(server.address) as client:
            client.note(1).result(120)


def test_a_peer_without_a_key_cannot_fill_memory_with_a_handshake() -> None:
    with (
        serving(Keys.generate()) as (server, port, _),
        socket.create_connection(("127.0.0.1", port), timeout=120) as peer,
    ):
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
        left = 64
        while left:
            left -= len(peer.recv(left))
        with suppress(ConnectionError):
            peer.sendall(b"\x06" + struct.pack(">Q", wire.MAX_MESSAGE))
            while True:
                peer.sendall(bytes(MB))
                time.sleep(0.01)
        await_end(peer)
        assert ended_by(server) == 1


def test_an_encrypted_message_that_stops_in_the_middle_costs_the_connection() -> None:
    keys = Keys.generate()
    with (
        serving(keys, seconds=0.3) as (server, port, told),
        closing(Tap(("127.0.0.1", port))) as tap,
        Client(tap.address, keys=keys, patience=120) as client,
    ):
        client.note(1).result(120)
        tap.limit = len(tap.sent) + 500 * KB
        call = client.note(*[np.zeros(100 * KB, np.uint8)] * 10)
        with pytest.raises(Disconnected):
            call.result(120)
        assert ended_by(server) >= 1
        assert told == [1]


def test_recorded_traffic_that_is_sent_again_does_nothing() -> None:
    keys = Keys.generate()
    with serving(keys) as (server, port, told), closing(Tap(("127.0.0.1", port))) as tap:
        with Client(tap.address, keys=keys) as client:
            client.note(1).result(120)
        cuts = [0, 64, 300, len(tap.sent)]
        for pieces in (pairwise(cuts), pairwise(cuts[::3]), pairwise(cuts[1:])):
            with socket.create_connection(("127.0.0.1", port), timeout=120) as peer:
                with suppress(ConnectionError):
                    for begin, end in pieces:
                        peer.sendall(tap.sent[begin:end])
                await_end(peer)
        assert told == [1]
        with Client(server.address, keys=keys) as client:
            client.note(2).result(120)
        assert told == [1, 1]


def test_a_call_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_CALL", 10 * KB)
    value = encode((np.zeros(6 * KB, np.uint8),) * 2)
    with pytest.raises(CodecError, match="in one call"):
        wire.pack(wire.CALL, 1, value, 1, "note")
    assert wire.pack(wire.REPLY, 1, value)  # from a server, which its clients trust
