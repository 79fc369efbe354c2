"""The proxy that stands in for bad networks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from benchmarks.proxy import Proxy


@pytest.fixture
def echo() -> Iterator[str]:
    """The address of a server of plain TCP that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def send_back(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=send_back, args=listener.accept()[:1], daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def connect(proxy: Proxy) -> socket.socket:
    host, port = proxy.address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def test_bytes_arrive_whole_in_order_and_late(echo: str) -> None:
    with Proxy(echo) as proxy, connect(proxy) as connection:
        message = bytes(range(256)) * 4096
        threading.Thread(target=connection.sendall, args=[message]).start()
        assert receive(connection, len(message)) == message
        proxy.delay = 0.05
        begin = time.monotonic()
        connection.sendall(b"late")
        assert receive(connection, 4) == b"late"
        assert time.monotonic() - begin >= 0.1, "each way takes the delay"


def test_what_is_stalled_arrives_later_and_connections_are_cut(echo: str) -> None:
    with Proxy(echo) as proxy:
        with connect(proxy) as connection:
            proxy.stall(["down"])
            connection.sendall(b"hello")
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):
                connection.recv(5)
            proxy.resume()
            connection.settimeout(120)
            assert receive(connection, 5) == b"hello"
            proxy.cut()
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        with connect(proxy) as connection:
            connection.sendall(b"x")
            assert receive(connection, 1) == b"x"
