"""Local connections: packets, parts, shared memory and what happens without it."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import socket as sockets
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from transport_processes import ServerProcess

from dreamfleet.transport import (
    BatchServer,
    Block,
    Client,
    RemoteError,
    Server,
    answer_memory,
    local,
    renew,
    shared_arrays,
    slab,
    wire,
)
from dreamfleet.transport.address import parse, resolve
from dreamfleet.transport.codec import Buffer
from dreamfleet.transport.errors import MessageError
from dreamfleet.transport.local import LocalSocket
from dreamfleet.transport.slab import MAX_SLOTS, Slab, SlabView

Ends = tuple[LocalSocket, LocalSocket]
LARGE = 100_000


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = map(LocalSocket, sockets.socketpair(sockets.AF_UNIX, sockets.SOCK_SEQPACKET))
    yield one, other
    one.close()
    other.close()


def share(one: LocalSocket, other: LocalSocket) -> None:
    """Have one end use shared memory: the first large message offers it."""
    assert one.send([b"first", bytes(LARGE)])
    assert receive(other) == [b"first", bytes(LARGE)]
    assert one.receive() is None  # the other one has mapped it
    assert one._slab_ready


def receive(end: LocalSocket) -> list[bytes]:
    frames = None
    while frames is None:
        frames = end.receive()
        assert not end.ended
    return list(map(bytes, frames))


@pytest.mark.parametrize(
    "frames",
    [
        [b"x"],
        [b"abc", b"", bytes(1000)],
        [b"h", memoryview(bytes(range(17)))] * 300,
        [b"h", bytes(LARGE), b"small", bytes(range(256)) * 200],
        [b"h", os.urandom(3 << 20)],
    ],
    ids=["one", "some", "many", "large", "very large"],
)
@pytest.mark.parametrize("sharing", [True, False], ids=["shared memory", "packets"])
def test_frames_arrive_as_they_were_sent(
    frames: list[Buffer], sharing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SHARING", sharing)
    one, other = map(LocalSocket, sockets.socketpair(sockets.AF_UNIX, sockets.SOCK_SEQPACKET))
    for _ in range(3):  # the first time there is no shared memory yet
        assert one.send(frames)
        got = None
        while got is None:
            one.flush()
            got = other.receive()
        assert list(map(bytes, got)) == list(map(bytes, frames))
        assert all(np.frombuffer(each, np.uint8).ctypes.data % 8 == 0 for each in got if each)
        assert one.receive() is None
    assert one.send([b"last"])
    one.close()
    assert receive(other) == [b"last"], "what was sent before the end is read"
    assert other.receive() is None
    assert other.ended
    other.close()


def test_view_keeps_its_slot_and_nothing_else_waits(ends: Ends) -> None:
    one, other = ends
    share(one, other)
    views = []
    for number in range(MAX_SLOTS + 5):  # more than there are slots: the last ones are packets
        one.send([b"h", np.full(LARGE, number, np.uint8).data])
        frames = other.receive()
        assert frames
        views.append(np.frombuffer(frames[1], np.uint8))
    assert [int(view[0]) for view in views] == list(range(MAX_SLOTS + 5))
    assert all((view == view[0]).all() for view in views)
    assert one._slab
    assert one._slab._free_slot() == -1
    del views[3], frames
    assert one._slab._free_slot() == 3
    views.clear()
    assert one._slab._free_slot() == 0


def test_what_is_kept_for_another_attempt_keeps_its_slot(ends: Ends) -> None:
    one, other = ends
    share(one, other)
    kept = one.keep([bytes(LARGE)])
    assert kept
    one.send([b"h", *kept])
    assert receive(other)[1] == bytes(LARGE)  # the receiver has no view left
    assert one._slab
    assert one._slab._free_slot() == 1
    one.send([b"again", *kept])
    assert receive(other) == [b"again", bytes(LARGE)]
    del kept
    assert one._slab._free_slot() == 0


def test_received_memory_cannot_be_written(ends: Ends) -> None:
    one, other = ends
    share(one, other)
    one.send([b"h", bytes(LARGE)])
    frames = other.receive()
    assert frames
    assert isinstance(frames[1], memoryview)
    assert frames[1].readonly


@pytest.mark.parametrize("trouble", ["no memfd", "memory is full", "cannot map", "no descriptor"])
def test_without_shared_memory_bytes_travel_in_packets(
    trouble: str, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: Any) -> Any:
        raise PermissionError("denied")

    if trouble == "no memfd":
        monkeypatch.setattr(os, "memfd_create", deny)
    elif trouble == "memory is full":
        monkeypatch.setattr(slab, "MAX_RESERVED", 0)
    elif trouble == "cannot map":
        monkeypatch.setattr(local, "SlabView", deny)
    else:
        monkeypatch.setattr(local, "_descriptors", lambda _: [])
    one, other = ends
    for number in range(3):
        one.send([b"h", bytes([number]) * LARGE])
        assert receive(other) == [b"h", bytes([number]) * LARGE]
        assert one.receive() is None


def test_memory_that_could_shrink_or_is_no_slab_is_refused() -> None:
    good = Slab(LARGE)
    SlabView(good.descriptor, good.slot_bytes)
    odd = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
    os.ftruncate(odd, os.fstat(good.descriptor).st_size)
    for descriptor, size in ((odd, good.slot_bytes), (good.descriptor, 4096), (good.descriptor, 0)):
        with pytest.raises(MessageError, match="may shrink"):
            SlabView(descriptor, size)
    view = SlabView(good.descriptor, good.slot_bytes)
    for slot, places in (
        (MAX_SLOTS, [(0, 1)]),
        (0, [(0, 1), (good.slot_bytes, 1)]),
        (0, [(1, good.slot_bytes)]),
    ):
        with pytest.raises(MessageError, match="outside of a slot"):
            view.frames(slot, places)
    os.close(odd)


@pytest.mark.parametrize(
    "packet",
    [
        b"\0",
        struct.pack("<4I", 1, 0, 0, 0),
        struct.pack("<4I", 5, 0, 0, 0) + bytes(16),
        struct.pack("<8I", 1, 0, 0, 0, 1000, 0, 0, 0),
        struct.pack("<8I", 1, 1, 0, 0, 1 << 31 | 100, 0, 0, 0),
        struct.pack("<4I", 9 << 24, 0, 0, 0),
        struct.pack("<4I", 1 << 24 | 1, 0, 0, 0),
        struct.pack("<4I", 2 << 24, 1, 4096, 0),
        os.urandom(500),
    ],
)
def test_nonsense_is_no_message(packet: bytes) -> None:
    raw, socket = sockets.socketpair(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
    end = LocalSocket(socket)
    raw.send(packet)
    assert not end.receive()
    assert not end.ended
    raw.close()
    end.close()


def is_shared(array: np.ndarray) -> bool:
    memory: Any = array
    while isinstance(memory, np.ndarray):
        memory = memory.base
    return isinstance(memory, mmap.mmap)


def test_floats_are_copied_and_images_are_views() -> None:
    """A sender could change what a server has checked; of an image every value is valid."""
    seen: dict[str, Any] = {}

    def take(value: dict[str, np.ndarray]) -> bool:
        seen.update(value)
        return True

    value = {"image": np.ones(LARGE, np.uint8), "flags": np.ones(LARGE, bool), "x": np.ones(LARGE)}
    server = Server("ipc://{auto}")
    server.bind("take", take)
    server.bind("give", lambda: value)
    with server, Client(server.address, timeout=60) as client:
        for _ in range(2):  # the first time there is no shared memory yet
            client.take(value).result()
            answer = client.give().result()
        assert {key: is_shared(array) for key, array in seen.items()} == {
            "image": True,
            "flags": False,
            "x": False,
        }
        assert all(map(is_shared, answer.values()))
        for key, array in value.items():
            np.testing.assert_array_equal(answer[key], array)
            np.testing.assert_array_equal(seen[key], array)


def test_a_reply_may_be_larger_than_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of a large agent are one reply."""
    monkeypatch.setattr(local, "SHARING", False)
    monkeypatch.setattr(wire, "MAX_CALL", 1 << 20)
    monkeypatch.setattr(wire, "MAX_MESSAGE", 1 << 20)
    server = Server("ipc://{auto}")
    server.bind("give", lambda: [np.ones(1 << 20, np.uint8)] * 3)
    with server, Client(server.address, timeout=60) as client:
        for _ in range(2):
            assert sum(map(np.sum, client.give().result())) == 3 << 20


def test_a_socket_that_is_full_holds_no_thread_up() -> None:
    seen: list[int] = []
    server = Server("ipc://{auto}")
    server.bind("note", lambda number, _: seen.append(number))
    with server, Client(server.address, maxinflight=64, timeout=60) as client:
        client.note(0, b"").result()
        with server._lock:  # so that it reads nothing
            calls = [client.note(number, bytes(20_000)) for number in range(1, 65)]
            assert client._connection.waiting
        for call in calls:
            call.result()
    assert seen == list(range(65))


def test_messages_of_many_packets_wait_like_small_ones(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_MAX_WAITING", 4)
    one, other = ends
    one._slab_limit = 0  # bytes travel in packets
    messages = [[b"h", bytes([number]) * (2 << 20)] for number in range(4)]
    assert all(one.send(message) for message in messages)
    assert len(one._outbox) > 4
    for message in messages:
        while (got := other.receive()) is None:
            one.flush()
        assert list(map(bytes, got)) == message


@pytest.mark.parametrize("trouble", ["the outbox is full", "the kernel has no memory"])
def test_a_connection_that_loses_a_message_ends_on_both_sides(
    trouble: str, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ends
    assert one.send([b"first"])
    sent = 1
    if trouble == "the outbox is full":
        while one.send([b"h", bytes(20_000)]):
            sent += 1
            assert sent < 1000
    else:
        monkeypatch.setattr(one, "_transmit", Mock(side_effect=OSError(errno.ENOBUFS, "")))
        assert not one.send([b"second"])
    assert receive(other) == [b"first"], "what was sent before is read"
    while other.receive():
        sent -= 1
    assert sent >= 1
    assert one.receive() is None
    assert one.ended
    assert other.ended


def test_a_server_that_takes_no_more_connections_serves_those_that_it_has() -> None:
    server = Server("ipc://{auto}")
    server.bind("ping", lambda: "pong")
    with server, Client(server.address, timeout=60) as first:
        assert first.ping().result() == "pong"
        listener = server._listener
        assert listener
        listener._most = 1
        with Client(server.address, patience=0.2) as second, pytest.raises(ConnectionError):
            second.ping().result(60)
        assert first.ping().result() == "pong"


def test_a_killed_server_leaves_no_memory_and_its_calls_reach_the_next() -> None:
    """Arrays are in shared memory that the dead server had mapped; the next one has another."""
    address = resolve("ipc://{auto}")
    server = ServerProcess(address)
    arrays = [np.full(LARGE, number, np.uint8) for number in range(8)]
    with Client(address, timeout=60) as client:
        for _ in range(3):
            for _ in range(2):
                answers = [client.echo(array) for array in arrays]
                for array, answer in zip(arrays, answers, strict=True):
                    np.testing.assert_array_equal(answer.result()[0], array)
            views = [answer.result()[0] for answer in answers]
            server.kill()
            server = ServerProcess(address)
            for array, view in zip(arrays, views, strict=True):
                np.testing.assert_array_equal(view, array)  # the sender is dead, its memory is not
    server.stop()
    del answers, answer, views, view
    gc.collect()
    assert "memfd:dreamfleet" not in Path("/proc/self/maps").read_text()
    assert not parse(address).path.exists()


def test_a_value_that_is_refused_costs_no_slot() -> None:
    server = Server("ipc://{auto}")
    server.bind("take", lambda value: None)
    with server, Client(server.address, timeout=60) as client:
        for _ in range(3):
            with pytest.raises(RemoteError):
                client.take(np.zeros(LARGE, np.uint8), 1).result()
        gc.collect()
        link: Any = client._connection._link
        deadline = time.monotonic() + 60  # the thread that has answered lets go of it after that
        while link._slab._free_slot() != 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_arrays_that_are_made_in_shared_memory_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = {"image": ((8, 64, 64, 3), np.dtype(np.uint8)), "x": ((8, 1024), np.dtype("f4"))}

    def double(value: dict[str, Any]) -> dict[str, Any]:
        made = shared_arrays(answer_memory, shapes)
        for key, array in made.items():
            np.multiply(value[key], 2, out=array)
        return {**made, "small": np.arange(3)}

    def act(obs: dict[str, Any]) -> Any:
        return obs["image"][:, 0, 0, 0] + obs["envid"], None

    block = Block({"image": np.zeros((8, 64, 64, 3), np.uint8), "envid": np.arange(8)})
    server, batches = Server("ipc://{auto}"), BatchServer("ipc://{auto}")
    server.bind("double", double)
    batches.bind("act", act, batch=8)
    with (
        server,
        batches,
        Client(server.address, timeout=60) as client,
        Client(batches.address, timeout=60) as env,
    ):
        assert client.memory(LARGE) is None, "before the first call"

        def call(number: int) -> None:
            made = shared_arrays(client.memory, shapes)
            for array in made.values():
                array[:] = number
            answer = client.double(made).result()
            assert {key: set(np.unique(answer[key])) for key in shapes} == {
                key: {2 * number} for key in shapes
            }
            renew(block, env.memory, ["envid"])
            block["image"][:] = number
            assert env.call_block("act", block).result().tolist() == [
                number + envid for envid in range(8)
            ]

        for number in range(3):  # until both sides have shared their memory
            call(number)
        monkeypatch.setattr(Slab, "fill", None)  # a copy fails
        for number in range(3, 100):  # more than there are slots
            call(number)


def test_a_block_that_finds_no_slot_leaves_those_alone_that_are_in_use() -> None:
    held: list[Any] = []

    def act(obs: dict[str, Any]) -> Any:
        held.append(obs["image"])
        return obs["envid"], None

    block = Block({"image": np.zeros((8, 64, 64, 3), np.uint8), "envid": np.arange(8)})
    server = BatchServer("ipc://{auto}")
    server.bind("act", act, batch=8)
    with server, Client(server.address, timeout=60) as client:
        for number in range(MAX_SLOTS + 10):
            renew(block, client.memory, ["envid"])
            block["image"][:] = number
            assert client.call_block("act", block).result().tolist() == list(range(8))
        link: Any = client._connection._link
        assert link._slab._free_slot() == -1
        assert [set(np.unique(each)) for each in held] == [{n} for n in range(MAX_SLOTS + 10)]
        del held[0], held[-3:]
        renew(block, client.memory, ["envid"])
        block["image"][:] = 200
        client.call_block("act", block).result()
        assert set(np.unique(held[-1])) == {200}
