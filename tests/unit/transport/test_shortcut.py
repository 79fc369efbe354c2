"""Packets around libzmq: the same calls in the same order, whatever goes which way."""

import errno
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dreamfleet.transport import Client, RemoteError, Server, connection, wire
from dreamfleet.transport.address import parse
from dreamfleet.transport.shortcut import Shortcut, Shortcuts, shortcut_path

LARGE = np.zeros(1 << 20, np.uint8)
MIDDLING = np.zeros(100_000, np.uint8)
SMALL = np.zeros(10, np.uint8)


class Ways:
    """Counts the calls and answers that libzmq is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        send = wire.send

        def counted(socket: Any, frames: Any) -> None:
            headers = [frame for frame in frames[:2] if len(frame) > 5]  # after a name, or first
            self.sent.append(wire.unpack(headers[0]).kind)
            send(socket, frames)

        monkeypatch.setattr(wire, "send", counted)

    def take(self) -> list[int]:
        sent, self.sent = self.sent, []
        return [kind for kind in sent if kind in (wire.CALL, wire.REPLY)]


class Fails:
    """A socket that accepts nobody."""

    def __init__(self, socket: sockets.socket, accept: Callable[[], None]) -> None:
        self.accept, self.fileno, self.close = accept, socket.fileno, socket.close


def use_shortcut(client: Client) -> Shortcut:
    """Connect, and wait until packets are used."""
    client.connect(60)
    deadline = time.monotonic() + 120
    while not ((shortcut := client._connection._shortcut) and shortcut.ready):
        assert time.monotonic() < deadline
        client.wait_any((), 0.01)
    return shortcut


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "server"


@pytest.fixture
def server(path: Path) -> Iterator[tuple[Server, list[int]]]:
    seen: list[int] = []

    def note(number: int, _data: Any) -> int:
        seen.append(number)
        return number

    made = Server(f"ipc://{path}")
    made.bind("note", note, repeatable=True)
    made.bind("large", lambda: LARGE)
    with made:
        yield made, seen


def test_what_fits_goes_around_libzmq_and_the_order_stays(
    server: tuple[Server, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = server
    ways = Ways(monkeypatch)
    with Client(made.address, maxinflight=64) as client:
        use_shortcut(client)
        assert client.note(0, SMALL).result(60) == 0
        assert ways.take() == []
        data = [LARGE if number % 7 == 3 else SMALL for number in range(1, 41)]
        answers = [client.note(number, each) for number, each in enumerate(data, 1)]
        assert [answer.result(60) for answer in answers] == list(range(1, 41))
        assert wire.CALL in ways.take()
        assert client.large().result(60).nbytes == LARGE.nbytes
        assert ways.take() == [wire.REPLY], "only what does not fit"
        assert client.note(41, SMALL).result(60) == 41
        assert ways.take() == [], "once libzmq has answered, packets are used again"
    assert seen == list(range(42))


def test_a_way_that_is_full_holds_nobody_up(
    server: tuple[Server, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = server
    ways = Ways(monkeypatch)
    with Client(made.address, maxinflight=64) as client:
        use_shortcut(client)
        client.note(0, SMALL).result(60)
        with made._loop.lock:  # so that it reads nothing
            answers = [client.note(number, MIDDLING) for number in range(1, 33)]
        assert [answer.result(60) for answer in answers] == list(range(1, 33))
        assert wire.CALL in ways.take()
    assert seen == list(range(33))


def test_a_packet_that_comes_after_the_look_is_still_read_before_a_later_message(
    server: tuple[Server, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = server
    with Client(made.address) as client:
        use_shortcut(client)
        client.note(0, SMALL).result(60)
        with made._loop.lock:
            monkeypatch.setattr(made._loop._shortcuts, "receive", lambda: None)
        answers = [client.note(1, SMALL), client.note(2, LARGE)]
        assert answers[1].result(60) == 2
        assert answers[0].result(60) == 1
    assert seen == [0, 1, 2]


def test_whoever_has_no_shortcut_has_a_turn(
    server: tuple[Server, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the others send without a pause."""
    made, _ = server
    take = made._loop._take
    with made._loop.lock:
        monkeypatch.setattr(made._loop._shortcuts, "receive", lambda: (None, []))
        monkeypatch.setattr(
            made._loop, "_take", lambda origin, frames: take(origin, frames) if origin else None
        )
    with Client(made.address) as client:
        assert client.note(1, LARGE).result(60) == 1


def test_the_end_of_a_shortcut_is_not_the_end_of_the_connection(
    server: tuple[Server, list[int]],
) -> None:
    made, seen = server
    with Client(made.address, maxinflight=64) as client:
        use_shortcut(client)
        client.note(0, SMALL).result(60)
        with made._loop.lock:
            assert made._loop._shortcuts
            (peer,) = made._loop._shortcuts._by_peer
            made._loop._shortcuts.drop(peer)
        for number in range(1, 20):
            assert client.note(number, SMALL).result(60) == number
        assert client.stats()["connects"] == 1
        assert client._connection._shortcut is None
    assert seen == list(range(20))


def test_a_server_that_was_killed_leaves_a_file_that_its_successor_replaces(path: Path) -> None:
    dead = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
    dead.bind(str(shortcut_path(path)))
    dead.close()
    with Server(f"ipc://{path}") as server, Client(server.address) as client:
        use_shortcut(client)
    assert list(path.parent.iterdir()) == []


def test_a_server_does_not_remove_the_file_of_its_successor(path: Path) -> None:
    first, second = Shortcuts[None](path), Shortcuts[None](path)
    first.close()
    assert shortcut_path(path).exists()
    second.close()
    assert not shortcut_path(path).exists()


@pytest.mark.parametrize("trouble", ["accept fails", "too many"])
def test_a_server_that_takes_no_more_shortcuts_serves_by_libzmq(
    server: tuple[Server, list[int]], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = server
    with made._loop.lock:
        ways = made._loop._shortcuts
        assert ways
        if trouble == "too many":
            ways._most = 0
        else:

            def fail() -> None:
                raise OSError(errno.EMFILE, "Too many open files")

            monkeypatch.setattr(ways, "_listener", Fails(ways._listener, fail))
    with Client(made.address) as second:
        for number in range(3):
            assert second.note(number, SMALL).result(60) == number
        assert second._connection._shortcut is None or not second._connection._shortcut.ready


@pytest.mark.parametrize("where", ["client", "server"])
def test_without_such_sockets_everything_goes_by_libzmq(
    path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "client":
        monkeypatch.setattr(connection.Shortcut, "open", lambda *_: None)
    else:
        monkeypatch.delattr(sockets, "SOCK_SEQPACKET")
    with Server(f"ipc://{path}") as server, Client(server.address) as client:
        client.connect(60)
        assert client._connection._shortcut is None
        with pytest.raises(RemoteError, match="no method"):
            client.nothing().result(60)


def test_strangers_and_nonsense_cost_nobody_else_anything(server: tuple[Server, list[int]]) -> None:
    made, seen = server
    place = parse(made.address).path
    with Client(made.address) as good, Client(made.address) as odd:
        use_shortcut(good)
        raw = use_shortcut(odd)._socket
        strangers = []
        for word in (b"", b"0" * 32, b"\xff" * 64, b"x" * 10_000):
            stranger = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
            stranger.connect(str(shortcut_path(place)))
            stranger.send(word)
            strangers.append(stranger)
        for stranger in strangers:
            stranger.settimeout(60)
            assert stranger.recv(10) == b"", "whoever has no token is not served"
            stranger.close()
        for packet in (b"\0", b"\1\0\0\0", b"\xff" * 16, b"\1\0\0\0\xff\xff\xff\xff" + bytes(8)):
            raw.send(packet)
        while made.stats()["malformed"] < 4:  # the client logs the errors, and goes on
            odd.note(0, SMALL).result(60)
        assert made.stats()["malformed"] == 4
        assert good.note(1, SMALL).result(60) == 1
    assert 1 in seen


def test_many_threads_share_a_client(server: tuple[Server, list[int]]) -> None:
    made, seen = server
    with Client(made.address, maxinflight=8) as client:

        def call(first: int) -> None:
            for number in range(first, first + 50):
                data = LARGE if number % 10 == 0 else SMALL
                assert client.note(number, data).result(60) == number

        threads = [threading.Thread(target=call, args=(1000 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert sorted(seen) == sorted(1000 * n + k for n in range(4) for k in range(50))
    for n in range(4):
        assert [k for k in seen if k // 1000 == n] == [1000 * n + k for k in range(50)]


def test_frames_arrive_as_they_were_sent() -> None:
    left, right = sockets.socketpair(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
    one, other = Shortcut(left), Shortcut(right)
    assert not one.send([b"x"]), "nobody has said that it is read"
    one.ready = True
    for frames in ([b"x"], [b"abc", b"", bytes(1000)], [b"h", memoryview(bytes(range(17)))] * 32):
        assert one.send(frames)
        got = other.receive()
        assert got is not None
        assert [bytes(frame) for frame in got] == [bytes(frame) for frame in frames]
        assert all(np.frombuffer(frame, np.uint8).ctypes.data % 16 == 0 for frame in got if frame)
    assert other.receive() is None
    assert not other.ended
    assert not one.send([b"x"] * 65)
    assert not one.send([bytes(1 << 20)])
    assert one.send([b"last"])
    one.close()
    assert other.receive() == [b"last"], "what was sent before the end is read"
    assert other.receive() is None
    assert other.ended
    other.close()


def test_an_answer_that_came_before_the_shortcut_was_used_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is gone before the client has read a packet: first that it may send some, and
    behind that the answer."""
    held, read = [True], connection.Connection._read_packet
    lose = connection.Connection._lose

    def read_later(self: Any, shortcut: Shortcut) -> bool:
        return not held[0] and read(self, shortcut)

    def lose_now(self: Any) -> None:
        held[0] = False
        lose(self)

    monkeypatch.setattr(connection.Connection, "_read_packet", read_later)
    monkeypatch.setattr(connection.Connection, "_lose", lose_now)
    server = Server(f"ipc://{path}")
    server.bind("once", lambda: "answered")
    with server, Client(server.address) as client:
        client.connect(60)
        assert server._loop._shortcuts is not None
        deadline = time.monotonic() + 120
        while not server._loop._shortcuts._by_peer:
            assert time.monotonic() < deadline
            client.wait_any((), 0.01)
        answer = client.once()
        while server.stats()["replies"] < 1:
            assert time.monotonic() < deadline
            client.wait_any((answer,), 0.01)
        server.close()
        assert answer.result(60) == "answered"
