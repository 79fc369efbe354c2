"""Corners where a call could once have hung, a neighbour been harmed or a thread been lost."""

import asyncio
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_processes import server_process

from dreamfleet.transport import (
    BatchServer,
    Client,
    Closed,
    CodecError,
    Disconnected,
    Keys,
    RemoteError,
    Server,
    resolve,
    wire,
)
from dreamfleet.transport.codec import encode


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raise(error: BaseException) -> Callable[[], None]:
    def method() -> None:
        raise error

    return method


@pytest.mark.parametrize(
    "error",
    [_Unspeakable(), OSError("odd \udcff name"), asyncio.CancelledError(), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_no_exception_takes_a_worker_along(error: BaseException) -> None:
    server = Server("ipc://{auto}")
    server.bind("fail", _raise(error))
    server.bind("ping", lambda: "pong")
    with server, Client(server.address, timeout=20) as client:
        with pytest.raises(RemoteError, match=type(error).__name__):
            client.fail().result()
        assert client.ping().result() == "pong"


@pytest.mark.parametrize(
    "value",
    [
        ["x" * 4000] * 2000,
        [np.zeros(4000, np.uint8)] * 2000,
        [np.zeros(5000, np.uint8)] * (wire.MAX_FRAMES + 1),
    ],
    ids=["texts", "small arrays", "large arrays"],
)
def test_a_value_above_the_limits_is_refused_where_it_is_sent(value: Any) -> None:
    server = Server("ipc://{auto}")
    server.bind("take", lambda value: len(value))
    server.bind("give", lambda: value)
    with server, Client(server.address, timeout=30) as client:
        with pytest.raises(CodecError, match=r"Cannot send|is the limit"):
            client.take(value)
        with pytest.raises(RemoteError, match=r"Cannot send|is the limit"):
            client.give().result()
        assert client.stats()["inflight"] == 0
        assert client.take([1, 2]).result() == 2


def test_frame_above_the_limit_is_refused_where_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE", 1 << 20)
    server = Server("ipc://{auto}")
    server.bind("take", lambda value: len(value), repeatable=True)
    with server, Client(server.address, timeout=20) as client:
        with pytest.raises(CodecError, match="an array of more than"):
            client.take(np.zeros((1 << 20) + 1, np.uint8))
        assert client.take(np.zeros(1 << 20, np.uint8)).result() == 1 << 20
        assert client.stats()["connects"] == 1


def test_a_reader_sleeps_through_no_call_while_queued_jobs_run() -> None:
    """The signal of a message may be swallowed by the answer that another thread sends."""
    server = Server("tcp://127.0.0.1:{auto}")
    hold = threading.Event()
    entered = threading.Semaphore(0)

    def slow(number: int) -> int:
        entered.release()
        if number:
            assert hold.wait(60)
        return number

    server.bind("slow", slow, workers=1)
    server.bind("ping", lambda: "pong")
    server._poller = _LatePoller(server._poller)
    with server, Client(server.address, timeout=20) as client:
        client.connect(20)
        first, second = client.slow(0), client.slow(1)
        assert entered.acquire(timeout=20)
        assert entered.acquire(timeout=20)
        assert client.ping().result(20) == "pong"
        hold.set()
        assert (first.result(), second.result()) == (0, 1)


class _LatePoller:
    """Wakes up a little late, as a busy kernel may: what was signalled meanwhile must be signalled
    again."""

    def __init__(self, poller: Any) -> None:
        self._poller = poller

    def poll(self, timeout: float | None) -> Any:
        while True:
            ready = self._poller.poll(timeout)
            late = select.poll()
            late.poll(3)
            if not ready or self._poller.poll(0):
                return ready


def test_a_call_that_comes_while_a_server_asks_who_is_connected_is_read_at_once() -> None:
    connections: set[bytes] = set()
    server = BatchServer("tcp://127.0.0.1:{auto}")
    server.bind(
        "act",
        lambda x: (x, None),
        batch=1,
        check=lambda origin, _: connections.add(origin.caller.connection),
    )
    start = threading.Semaphore(0)

    def ask() -> None:
        for _ in range(1500):
            start.acquire()
            server.between_calls(lambda: [server.connected(each) for each in connections])

    with server, Client(server.address, timeout=10.0) as client:
        client.connect()
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            for value in range(1500):
                start.release()
                assert client.call_block("act", np.array([value])).result() == value
        finally:
            start.release(1500)
            thread.join()


def test_an_idle_client_finds_the_successor_with_its_first_call() -> None:
    address = resolve("ipc://{auto}")

    def serve() -> Server:
        server = Server(address)
        server.bind("ping", lambda: "pong")
        server.start(block=False)
        return server

    server = serve()
    with Client(address, timeout=20) as client:
        assert client.ping().result() == "pong"
        server.close()
        server = serve()
        poller = select.poll()
        poller.register(client._connection._link.fileno(), select.POLLIN)
        assert poller.poll(20_000)
        assert client.ping().result() == "pong"  # not repeatable, and yet not lost
    server.close()


def test_a_block_that_lies_about_its_rows_harms_no_other_call() -> None:
    server = BatchServer("ipc://{auto}")
    server.bind("act", lambda x: (x * 10, None), batch=4, wait=0.05)
    with server, Client(server.address, timeout=20) as liar, Client(server.address) as good:
        block = np.full((3, 1), 7.0)
        assert liar.call_block("act", block).result().shape == (3, 1)
        lie = liar._send_call("act", 2, encode((block,)))
        assert good.call_block("act", np.full((1, 1), 1.0)).result(20).tolist() == [[10.0]]
        with pytest.raises(RemoteError, match="is not a block of 2 items"):
            lie.result()


def test_a_closing_server_leaves_its_successors_file_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "socket"
    old = Server(f"ipc://{path}")
    old.start(block=False)
    identity = old._listener.file
    path.unlink()
    new = Server(f"ipc://{path}")
    new.bind("ping", lambda: "pong")
    with new, Client(new.address, timeout=20) as client:
        assert identity != new._listener.file
        old.close()
        assert path.is_socket()
        assert client.ping().result() == "pong"


def test_a_client_finds_a_server_that_got_its_key_later() -> None:
    keys = Keys.generate()
    address = resolve("127.0.0.1:{auto}")
    with Client(address, keys=keys, timeout=30) as client:
        future = client.ping()
        with Server(address):
            assert not future.wait(0.5)
        server = Server(address, keys=keys)
        server.bind("ping", lambda: "pong")
        with server:
            assert future.result() == "pong"


def test_patience_is_kept_while_another_thread_connects() -> None:
    with Client(resolve("ipc://{auto}"), patience=0.3) as client:
        connecting = threading.Thread(target=_swallow, args=(client,))
        connecting.start()
        with pytest.raises(Disconnected):
            client.ping().result(100)
        assert connecting.is_alive()
        client.close()
        connecting.join(30)


def _swallow(client: Client) -> None:
    with suppress(Closed):
        client.connect(1000)


def test_a_call_refused_by_a_successor_is_sent_again_to_it() -> None:
    """It did not run, so also a call that may not be repeated is safe to send again."""
    with server_process() as server, Client(server.address, timeout=20) as client:
        client.connect(20)
        welcome = client._welcome
        assert welcome
        older = type(welcome)(
            welcome.protocol, welcome.name, welcome.incarnation + 1, 256, welcome.repeatable
        )
        client._welcome = older  # what the client believes when the server was replaced unnoticed
        future = client.echo("once")
        client._welcome = welcome
        assert future.result() == ("once",)


def test_the_server_bounds_what_it_holds_for_clients_that_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MAX_HELD", 5)
    server = Server("ipc://{auto}")
    hold = threading.Event()
    server.bind("block", lambda: hold.wait(60), workers=1)
    with server, Client(server.address, timeout=20) as client:
        futures = [client.block() for _ in range(8)]
        for future in futures[5:]:
            with pytest.raises(RemoteError, match="holds 5 requests and takes no more"):
                future.result()
        hold.set()
        assert all(future.result() for future in futures[:5])


_FORGOTTEN = """
import gc
from dreamfleet.transport import BatchServer, Keys, Server

server = Server("ipc://{auto}")
server.bind("close", server.close)
batching = BatchServer("127.0.0.1:{auto}", keys=Keys.generate())
batching.bind("act", print, print)
path = server.address.removeprefix("ipc://")
del server, batching
gc.collect()
Server("ipc://" + path).close()  # the address is free again
print("collected")
left_to_the_exit = Server("127.0.0.1:{auto}")
never_closed = Server("127.0.0.1:{auto}")
never_closed.start(block=False)
"""


def test_a_forgotten_server_does_not_hang_its_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORGOTTEN], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "collected\n"
