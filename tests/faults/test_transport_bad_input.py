"""Whatever a server is sent, it keeps answering everyone else, and its memory does not grow."""

import itertools
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from transport_processes import ServerProcess, greet, server_process

from benchmarks.malformed import LIES, addressed, malformed, raw_socket
from dreamfleet.transport import Client, wire
from dreamfleet.transport.codec import encode

MALFORMED = 10_000
MEGABYTE = 1 << 20
TCP = "tcp://127.0.0.1:{auto}"


class GoodClient:
    """Calls the server all the time, and counts the answers."""

    def __init__(self, address: str, batching: bool) -> None:
        self.answers = 0
        self.wrong: list[Any] = []
        self._stop = threading.Event()
        self._client = Client(address, "Good", timeout=30)
        self._call = self._act if batching else self._echo
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._call(self.answers)
                self.answers += 1
        except Exception as problem:
            self.wrong.append(problem)

    def _echo(self, number: int) -> None:
        answer = self._client.echo(number, np.full(2000, number)).result()
        if answer[0] != number or set(answer[1].tolist()) != {number}:
            self.wrong.append(answer)

    def _act(self, number: int) -> None:
        obs = {"x": np.full((1, 3), number, np.float32)}
        answer = self._client.call_block("act", obs).result()
        if answer["action"].tolist() != [[2 * number] * 3]:
            self.wrong.append(answer)

    @property
    def alive(self) -> bool:
        self._thread.join(0.01)
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


@pytest.mark.parametrize("batching", [False, True], ids=["Server", "BatchServer"])
def test_ten_thousand_malformed_messages_hurt_no_other_client(batching: bool) -> None:
    with server_process(TCP, batching=batching, patient=True) as server:
        memory = psutil.Process(server.pid).memory_info
        good = GoodClient(server.address, batching)
        try:
            with raw_socket(server.address) as (peer, incarnation):
                throw(peer, incarnation, itertools.islice(malformed(0), 1000))
                before, answers = memory().rss, good.answers
                throw(peer, incarnation, itertools.islice(malformed(1), MALFORMED))
                after = memory().rss
            await_answers(good, answers + 1)
            assert good.wrong == []
            assert after - before < 64 * MEGABYTE
        finally:
            good.stop()
        assert good.wrong == []


def throw(peer: zmq.Socket[bytes], incarnation: int, messages: Iterator[list[bytes]]) -> None:
    """Send messages, read what comes back so that it does not pile up, and return when the server
    has read all of them: it answers to a greeting that comes after them."""
    for frames in messages:
        peer.send_multipart(addressed(frames, incarnation))
        while peer.poll(0):
            peer.recv_multipart()
    peer.send_multipart(wire.pack(wire.HELLO, 0, encode(None)))
    while not is_welcome(peer.recv_multipart()[0]):
        pass


def is_welcome(first: bytes) -> bool:
    return wire.unpack(first).kind == wire.WELCOME


def await_answers(good: GoodClient, count: int) -> None:
    while good.answers < count and not good.wrong:
        assert good.alive


def answers_to(server: ServerProcess, messages: list[list[bytes]]) -> Iterator[str]:
    with raw_socket(server.address) as (peer, incarnation):
        for frames in messages:
            peer.send_multipart(addressed(frames, incarnation))
            first, *rest = peer.recv_multipart()
            answer = wire.unpack(first)
            assert answer.kind == wire.ERROR
            yield wire.value_of(answer, rest)[1]


@pytest.mark.parametrize("batching", [False, True], ids=["Server", "BatchServer"])
def test_every_lie_is_answered_with_an_error(batching: bool) -> None:
    with server_process(TCP, batching=batching, patient=True) as server:
        for text in answers_to(server, LIES):
            assert text.endswith((".", "data", "bytes")) or "cannot be read" in text


def test_a_message_above_the_limit_costs_the_connection() -> None:
    """libzmq reads the announced length of a frame, and hangs up without allocating it."""
    with server_process("tcp://127.0.0.1:{auto}") as server:
        port = int(server.address.rpartition(":")[2])
        before = psutil.Process(server.pid).memory_info().rss
        with socket.create_connection(("127.0.0.1", port), timeout=20) as peer:
            greet(peer)
            peer.sendall(b"\x02" + (wire.MAX_MESSAGE + 1).to_bytes(8, "big"))
            while peer.recv(4096):
                pass
        assert psutil.Process(server.pid).memory_info().rss - before < 64 * MEGABYTE
        with Client(server.address) as client:
            assert client.echo(1).result(20) == (1,)


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_bytes_that_are_no_message_hurt_no_one_else(scheme: str) -> None:
    address = "tcp://127.0.0.1:{auto}" if scheme == "tcp" else "ipc://{auto}"
    rng = random.Random(0)
    with server_process(address) as server:
        good = GoodClient(server.address, batching=False)
        try:
            for _ in range(200):
                with connect(server.address) as peer:
                    try:
                        peer.sendall(rng.randbytes(rng.randrange(1, 5000)))
                    except (BrokenPipeError, ConnectionResetError):
                        continue  # the server had seen enough
        finally:
            good.stop()
        assert good.wrong == []
        assert good.answers > 0


def connect(address: str) -> socket.socket:
    if address.startswith("ipc"):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect(str(Path(address.removeprefix("ipc://"))))
        return peer
    return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20)


def test_a_client_that_stops_reading_costs_a_bounded_amount() -> None:
    """It sends thousands of calls that want large answers, and never looks at one."""
    size = MEGABYTE
    value = encode((np.zeros(size, np.uint8),))
    with server_process(TCP) as server, raw_socket(server.address) as (lazy, incarnation):
        frames = wire.pack(wire.CALL, 1, value, incarnation, "echo")
        lazy.rcvhwm = 1
        good = GoodClient(server.address, batching=False)
        try:
            for _ in range(3000):
                lazy.send_multipart(frames)
            rss = psutil.Process(server.pid).memory_info().rss
            await_answers(good, good.answers + 100)
        finally:
            good.stop()
        assert good.wrong == []
        # What one client can make the server hold: its calls in flight and their answers.
        assert rss < 3 * wire.MAX_INFLIGHT * size


def test_more_calls_in_flight_than_allowed_are_refused() -> None:
    with server_process(TCP) as server, raw_socket(server.address) as (greedy, incarnation):
        total = wire.MAX_INFLIGHT + 50
        for number in range(1, total + 1):
            greedy.send_multipart(wire.pack(wire.CALL, number, encode(()), incarnation, "block"))
        for _ in range(50):
            first, *rest = greedy.recv_multipart()
            answer = wire.unpack(first)
            assert answer.id > wire.MAX_INFLIGHT
            assert "requests are in flight" in wire.value_of(answer, rest)[1]
        with Client(server.address) as client:
            assert client.echo(1).result(20) == (1,)


def test_a_call_for_another_incarnation_is_not_carried_out(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with server_process(TCP) as server, raw_socket(server.address) as (peer, incarnation):
        late, now = encode((str(record), "late")), encode((str(record), "now"))
        peer.send_multipart(wire.pack(wire.CALL, 7, late, incarnation + 1, "note"))
        answer = wire.unpack(peer.recv_multipart()[0])
        assert (answer.kind, answer.id) == (wire.STALE, 7)
        peer.send_multipart(wire.pack(wire.CALL, 8, now, incarnation, "note"))
        assert wire.unpack(peer.recv_multipart()[0]).kind == wire.REPLY
    assert record.read_text() == "now\n"
