"""Servers in processes of their own, for tests that kill, starve or measure them; and the handshake
of a peer that is no client of ours."""

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dreamfleet.transport import BatchServer, Keys, Server

_spawn = multiprocessing.get_context("spawn")


class ServerProcess:
    """A process that serves `echo`, `block`, `note` and `note_again` (repeatable), or the batched
    `act`."""

    def __init__(
        self, address: str, keys: Keys | None = None, batching: bool = False, patient: bool = False
    ) -> None:
        ours, theirs = _spawn.Pipe()
        self._channel = ours
        self._process = _spawn.Process(
            target=_serve, args=(theirs, address, keys, batching, patient), daemon=True
        )
        self._process.start()
        self.address: str = ours.recv()
        self.pid = self._process.pid
        assert self.pid

    def kill(self) -> None:
        assert self.pid
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def stop(self) -> None:
        if self._process.is_alive():
            self._channel.send("stop")
            self._process.join(60)
        assert not self._process.is_alive()
        self._process.close()


@contextmanager
def server_process(
    address: str = "ipc://{auto}",
    keys: Keys | None = None,
    batching: bool = False,
    patient: bool = False,
) -> Iterator[ServerProcess]:
    """A server, until the end; a `patient` one ends no connection, whatever it is sent."""
    process = ServerProcess(address, keys, batching, patient)
    try:
        yield process
    finally:
        process.stop()


def _serve(
    channel: Connection, address: str, keys: Keys | None, batching: bool, patient: bool
) -> None:
    hold = threading.Event()
    server = _batch_server(address, keys) if batching else _plain_server(address, keys, hold)
    if patient:
        server.most_faults = 10**9
    with server:
        channel.send(server.address)
        channel.recv()
        hold.set()


def _plain_server(address: str, keys: Keys | None, hold: threading.Event) -> Server:
    server = Server(address, "Plain", workers=4, keys=keys)

    def note(file: str, line: str) -> None:
        """Put on record that this call was carried out; a kill does not undo it."""
        with Path(file).open("a") as record:
            record.write(f"{line}\n")

    def block() -> None:
        hold.wait(60)

    server.bind("echo", lambda *args: args)
    server.bind("note", note)
    server.bind("note_again", note, repeatable=True)
    server.bind("block", block, workers=1)
    return server


def _batch_server(address: str, keys: Keys | None) -> BatchServer:
    def act(obs: dict[str, Any]) -> tuple[dict[str, Any], None]:
        return {"action": obs["x"] * 2}, None

    server = BatchServer(address, "Batching", keys=keys)
    server.bind("act", act, batch=4, wait=0.002)
    return server


def greet(peer: socket.socket) -> None:
    """The handshake of ZMTP 3.0 without security, as a DEALER."""
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    left = 64
    while left:  # libzmq hangs up on some who do not wait for its own
        left -= len(peer.recv(left))
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
