"""A call that kills its server is not sent to one successor after the other."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from dreamfleet.transport import Client, Disconnected, client, wire
from dreamfleet.transport.codec import encode


class MortalServer:
    """A server that a call of `deadly` ends, so often; then it answers that call, too. The next one
    is another incarnation, or, as if only the connection had been lost, the same."""

    def __init__(self, address: str, deaths: int, reborn: bool = True) -> None:
        self.address, self._deaths = address, deaths
        self.calls: Counter[str] = Counter()
        self._incarnations = itertools.count(1) if reborn else itertools.repeat(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context:
            while not self._stop.is_set():
                with context.socket(zmq.ROUTER) as socket:
                    socket.linger = 1000
                    socket.bind(self.address)
                    self._live(socket, next(self._incarnations))

    def _live(self, socket: zmq.Socket[bytes], incarnation: int) -> None:
        welcome = {"protocol": wire.PROTOCOL, "name": "mortal", "incarnation": incarnation}
        welcome |= {"limit": 256, "repeatable": ["deadly", "good"]}  # type: ignore[dict-item]
        while not self._stop.is_set():
            if not socket.poll(20):
                continue
            peer, first, *_ = socket.recv_multipart()
            header = wire.unpack(first)
            if header.kind == wire.HELLO:
                socket.send_multipart([peer, *wire.pack(wire.WELCOME, 0, encode(welcome))])
                continue
            if header.to != incarnation:
                socket.send_multipart([peer, *wire.pack(wire.STALE, header.id, encode(None))])
                continue
            self.calls[header.method] += 1
            if header.method == "deadly" and self.calls["deadly"] <= self._deaths:
                return
            reply = wire.pack(wire.REPLY, header.id, encode("survived"))
            socket.send_multipart([peer, *reply])


@contextmanager
def mortal(tmp_path: Path, deaths: int, reborn: bool = True) -> Iterator[MortalServer]:
    server = MortalServer(f"ipc://{tmp_path}/mortal", deaths, reborn)
    try:
        yield server
    finally:
        server.stop()


def test_a_call_that_kills_its_server_again_and_again_is_given_up(tmp_path: Path) -> None:
    with (
        mortal(tmp_path, deaths=1000) as server,
        Client(server.address, "guilty") as guilty,
        Client(server.address, "innocent") as innocent,
    ):
        deadly = guilty.deadly()
        with pytest.raises(Disconnected, match="died 5 times right after it got this call"):
            deadly.result(120)
        assert server.calls["deadly"] == 5
        # Others are served by the last of them, and so is whoever sent it.
        assert innocent.good().result(120) == guilty.good().result(120) == "survived"


def test_an_innocent_call_survives_a_few_deaths(tmp_path: Path) -> None:
    with mortal(tmp_path, deaths=4) as server, Client(server.address) as caller:
        assert caller.deadly().result(120) == "survived"


def test_a_call_in_flight_for_long_is_not_suspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has worked on it for a while was killed by something else."""
    monkeypatch.setattr(client, "_DEATH_SECONDS", 0.0)
    with mortal(tmp_path, deaths=12) as server, Client(server.address) as caller:
        assert caller.deadly().result(120) == "survived"


def test_a_connection_that_is_lost_is_not_a_death(tmp_path: Path) -> None:
    with mortal(tmp_path, deaths=12, reborn=False) as server, Client(server.address) as caller:
        assert caller.deadly().result(120) == "survived"
