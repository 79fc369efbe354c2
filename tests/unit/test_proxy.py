"""The proxy that stands in for bad networks."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from benchmarks.proxy import Proxy
from dreamfleet.transport import Client, Disconnected, Keys, Server


class Echo:
    """A server of plain TCP that sends back what it gets."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._echo, args=[connection], daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        self.ended.set()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def connect(proxy: Proxy) -> socket.socket:
    host, port = proxy.address.removeprefix("tcp://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(120)
    return connection


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def test_bytes_arrive_whole_in_order_and_late(echo: Echo) -> None:
    with Proxy(echo.address) as proxy, connect(proxy) as connection:
        message = bytes(range(256)) * 4096
        threading.Thread(target=connection.sendall, args=[message]).start()
        assert receive(connection, len(message)) == message
        assert proxy.bytes == {"up": len(message), "down": len(message)}
        proxy.delay = 0.05
        begin = time.monotonic()
        connection.sendall(b"late")
        assert receive(connection, 4) == b"late"
        assert time.monotonic() - begin >= 0.1, "each way takes the delay"


def test_what_is_stalled_arrives_later(echo: Echo) -> None:
    with Proxy(echo.address) as proxy, connect(proxy) as connection:
        proxy.stall(["down"])
        connection.sendall(b"hello")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(5)
        assert proxy.bytes["up"] == 5, "the other way is open"
        proxy.resume()
        connection.settimeout(120)
        assert receive(connection, 5) == b"hello"


def test_connections_are_cut_half_cut_and_refused(echo: Echo) -> None:
    with Proxy(echo.address) as proxy:
        with connect(proxy) as connection:
            connection.sendall(b"x")
            assert receive(connection, 1) == b"x"
            proxy.cut()
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        with connect(proxy) as connection:
            connection.sendall(b"x")
            assert receive(connection, 1) == b"x"
            echo.ended.clear()
            proxy.half_cut("up")
            assert echo.ended.wait(120), "the server sees the end"
            connection.sendall(b"y")  # and the client does not
        proxy.refuse()
        with connect(proxy) as connection, suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        proxy.refuse(False)
        with connect(proxy) as connection:
            connection.sendall(b"x")
            assert receive(connection, 1) == b"x"
        assert proxy.connections == 4


def test_encrypted_calls_go_through_and_servers_may_move() -> None:
    keys = Keys.generate()
    where = [""]
    with Proxy(lambda: where[0]) as proxy, Client(proxy.address, keys=keys) as client:
        for name in ("first", "second"):
            server = Server("tcp://127.0.0.1:{auto}", name, keys=keys)
            server.bind("who", lambda name=name: name)
            with server:
                where[0] = server.address
                client.connect(120)
                assert client.who().result(120) == name
                proxy.stall(["down"])
                lost = client.who()
                proxy.cut()
                with pytest.raises(Disconnected):
                    lost.result(120)
                proxy.resume()


def test_connections_that_have_just_come_are_closed_with_it(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_open: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", left_open.append)
    for count in (0, 1, 2, 3, 4) * 4:
        with Proxy(echo.address) as proxy:
            host, port = proxy.address.removeprefix("tcp://").split(":")
            peers = [socket.create_connection((host, int(port))) for _ in range(count)]
        for peer in peers:
            peer.close()
        del proxy
        gc.collect()
    assert left_open == []
