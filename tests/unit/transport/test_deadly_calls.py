"""A call that kills its server is not sent to one successor after the other."""

from __future__ import annotations

import itertools
import select
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dreamfleet.transport import Client, Disconnected, client, resolve, wire
from dreamfleet.transport.address import parse
from dreamfleet.transport.codec import encode
from dreamfleet.transport.local import LocalListener


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
        while not self._stop.is_set():
            listener, poller = LocalListener(parse(self.address), "mortal"), select.poll()
            listener.register(poller)
            try:
                self._live(listener, poller, next(self._incarnations))
            finally:
                listener.close()

    def _live(self, listener: LocalListener, poller: select.poll, incarnation: int) -> None:
        welcome = {"protocol": wire.PROTOCOL, "name": "mortal", "incarnation": incarnation}
        welcome |= {"limit": 256, "repeatable": ["deadly", "good"]}  # type: ignore[dict-item]
        while not self._stop.is_set():
            for descriptor, events in poller.poll(20):
                listener.notice(descriptor, events)
            while message := listener.receive():
                origin, frames = message
                header = wire.unpack(frames[0])
                if header.kind == wire.HELLO:
                    listener.send(origin.peer, wire.pack(wire.WELCOME, 0, encode(welcome)))
                    continue
                if header.to != incarnation:
                    listener.send(origin.peer, wire.pack(wire.STALE, header.id, encode(None)))
                    continue
                self.calls[header.method] += 1
                if header.method == "deadly" and self.calls["deadly"] <= self._deaths:
                    return
                listener.send(origin.peer, wire.pack(wire.REPLY, header.id, encode("survived")))


@contextmanager
def mortal(deaths: int, reborn: bool = True) -> Iterator[MortalServer]:
    server = MortalServer(resolve("ipc://{auto}"), deaths, reborn)
    try:
        yield server
    finally:
        server.stop()


def test_a_call_that_kills_its_server_again_and_again_is_given_up() -> None:
    with (
        mortal(deaths=1000) as server,
        Client(server.address, "guilty") as guilty,
        Client(server.address, "innocent") as innocent,
    ):
        deadly = guilty.deadly()
        with pytest.raises(Disconnected, match="died 5 times right after it received this call"):
            deadly.result(120)
        assert server.calls["deadly"] == 5
        # Others are served by the last of them, and so is its sender.
        assert innocent.good().result(120) == guilty.good().result(120) == "survived"


def test_an_innocent_call_survives_a_few_deaths() -> None:
    with mortal(deaths=4) as server, Client(server.address) as caller:
        assert caller.deadly().result(120) == "survived"


def test_a_call_in_flight_for_long_is_not_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has worked on it for a while was killed by something else."""
    monkeypatch.setattr(client, "_DEATH_SECONDS", 0.0)
    with mortal(deaths=12) as server, Client(server.address) as caller:
        assert caller.deadly().result(120) == "survived"


def test_a_connection_that_is_lost_is_not_a_death() -> None:
    with mortal(deaths=12, reborn=False) as server, Client(server.address) as caller:
        assert caller.deadly().result(120) == "survived"
