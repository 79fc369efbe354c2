"""A connection that is lost, and made again."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from dreamfleet.transport import AddressError, Client, Closed, Server
from dreamfleet.transport import connection as module
from dreamfleet.transport.address import parse, resolve
from dreamfleet.transport.codec import encode
from dreamfleet.transport.connection import Connection, Event, Lost, Welcome
from dreamfleet.transport.remote import RemoteLink, next_event
from dreamfleet.transport.wire import CALL, Waker, pack

LONG = 60.0


@pytest.fixture
def port() -> int:
    return int(resolve("127.0.0.1:{auto}").rpartition(":")[2])


def server_at(port: int) -> Server:
    server = Server(f"127.0.0.1:{port}")
    server.bind("ping", lambda: "pong")
    return server


def shake_hands_and_hang_up(listener: socket.socket) -> None:
    """A server that ends right after the handshake of ZMTP."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"ROUTER"
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as stream:
        connection.sendall(greeting + bytes([4, len(ready)]) + ready)
        stream.read(len(greeting))
        _, size = stream.read(2)
        stream.read(size)  # what was not read would reset the connection


def has_no_connection(connection: Connection) -> bool:
    """Whether libzmq has noticed the loss, which is not collected yet."""
    connection._link._read_monitor()
    return not all(change.connected for change in connection._link._changes)


def wait_for_loss(connection: Connection) -> None:
    deadline = time.monotonic() + LONG
    while not has_no_connection(connection):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def events(connection: Connection) -> Iterator[Event]:
    while True:
        while event := connection.next():
            yield event
        connection.sleep(LONG)


def test_a_server_that_ends_right_after_the_handshake_is_found_again(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        client = Client(f"localhost:{port}", timeout=LONG)
        shake_hands_and_hang_up(listener)
        wait_for_loss(client._connection)
    with client:
        calls = [client.ping(), client.ping()]
        assert not client.wait_any(calls, 0.1)
        with server_at(port):
            assert [call.result() for call in calls] == ["pong", "pong"]


def test_a_connection_that_has_ended_takes_no_message(port: int) -> None:
    waker = Waker()
    with server_at(port):
        connection = Connection(f"localhost:{port}", None, waker)
        assert isinstance(next(events(connection)), Welcome)
    wait_for_loss(connection)
    assert not connection.send(pack(CALL, 1, encode(()), 1, "ping"))
    connection.greet()
    assert isinstance(next(events(connection)), Lost)
    with server_at(port):
        assert isinstance(next(events(connection)), Welcome)
    connection.close()
    waker.close()


@pytest.mark.parametrize(
    "trouble",
    [OSError(errno.EMFILE, "x"), zmq.ZMQError(errno.EMFILE), AddressError("x")],
    ids=lambda trouble: type(trouble).__name__,
)
@pytest.mark.parametrize("find", [False, True], ids=["fixed", "find"])
def test_an_attempt_that_cannot_be_made_is_made_again(
    trouble: Exception, find: bool, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, waker = f"127.0.0.1:{port}", Waker()
    with server_at(port):
        connection = Connection((lambda: address) if find else address, None, waker)
        assert isinstance(next(events(connection)), Welcome)
    attempts = iter([trouble])

    def open_link(*args: Any) -> Any:
        for problem in attempts:
            raise problem
        return real(*args)

    real = module.open_link
    monkeypatch.setattr(module, "open_link", open_link)
    assert isinstance(next(events(connection)), Lost)
    with server_at(port):
        assert isinstance(next(events(connection)), Welcome)
    connection.close()
    waker.close()


def test_an_attempt_without_a_socket_is_over_when_libzmq_plans_the_next_one(port: int) -> None:
    """CLOSED is not told when the system refuses the socket. Here it would be: nothing listens."""
    address = parse(f"127.0.0.1:{port}")
    link = RemoteLink(address, address.text, None)
    assert link._monitor.poll(1000 * LONG)
    event = next_event(link._monitor)
    assert event
    assert event[0] == zmq.Event.CONNECT_RETRIED
    link.close()


def test_unknown_address_is_asked_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is a tenth of the time since the server was lost, and half a second at most."""
    now, asked = [0.0], list[float]()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waker = Waker()
    connection = Connection(lambda: asked.append(now[0]) or "", None, waker)
    while now[0] < 7:
        connection.next()
        now[0] = connection._retry_at
    for before, after in pairwise(asked[1:]):
        assert after - before == pytest.approx(min(max(0.02, before / 10), 0.5))
    assert 40 < len(asked) < 70
    waker.close()


def test_calls_of_a_closed_client_have_failed_although_a_thread_still_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller that only looks whether they are answered is not interrupted."""
    reading, go_on = threading.Event(), threading.Event()

    def sleep(timeout: float) -> None:
        reading.set()
        assert go_on.wait(LONG)

    with Client("ipc://{auto}", timeout=LONG) as client:
        future = client.ping()
        monkeypatch.setattr(client._connection, "sleep", sleep)
        threads = [threading.Thread(target=future.wait), threading.Thread(target=client.close)]
        threads[0].start()
        assert reading.wait(LONG)
        threads[1].start()
        while not client._closed:
            time.sleep(0.001)
        assert future.done()
        go_on.set()
        for thread in threads:
            thread.join(LONG)
        with pytest.raises(Closed):
            future.result()
