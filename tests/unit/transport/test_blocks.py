"""Blocks of one layout that are sent again and again, over a local connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dreamfleet.transport import (
    BatchServer,
    Block,
    Client,
    Closed,
    Disconnected,
    RemoteError,
    Timeout,
    local,
)

pytestmark = pytest.mark.skipif(not local.AVAILABLE, reason="libzmq serves socket files here")

ROUNDS = 40


class Echo:
    """Answers a block with twice its numbers, or as a test asks."""

    def __init__(self, address: str = "ipc://{auto}", *, repeatable: bool = False) -> None:
        self.seen: list[int] = []
        self.called, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.server = BatchServer(address)
        self.server.bind("act", self._act, batch=1, wait=0.0, repeatable=repeatable)
        self.server.start(block=False)

    def _act(self, obs: dict[str, Any]) -> tuple[dict[str, Any], None]:
        number = int(obs["number"][0])
        self.called.set()
        assert self.go.wait(30)
        self.seen.append(number)
        if number < 0:
            raise ValueError("negative")
        assert (obs["image"] == number % 256).all()
        dtype = np.int64 if number == 7 else np.int32
        return {"twice": 2 * obs["number"].astype(dtype), "odd": obs["number"] % 2 == 1}, None


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    with made.server:
        yield made


def make_block(rows: int = 1) -> Block:
    return Block({"number": np.zeros(rows, np.int32), "image": np.zeros((rows, 80, 80), np.uint8)})


def fill(block: Block, number: int) -> Block:
    block["number"][:] = number
    block["image"][:] = number % 256
    return block


@pytest.mark.parametrize("rows", [1, 16])  # inside the packet, and in shared memory
def test_blocks_and_their_answers_arrive_whole(echo: Echo, rows: int) -> None:
    block = make_block(rows)
    with Client(echo.server.address, timeout=30.0) as client:
        for number in range(ROUNDS):  # one of them is answered in another layout
            answer = client.call_block("act", fill(block, number)).result()
            assert answer["twice"].tolist() == rows * [2 * number]
            assert answer["twice"].dtype == (np.int64 if number == 7 else np.int32)
            assert answer["odd"].tolist() == rows * [number % 2 == 1]
            assert not answer["twice"].flags.writeable
        assert client.stats()["requests"] == client.stats()["replies"] == ROUNDS
    assert echo.seen == list(range(ROUNDS))


def test_an_error_is_raised_and_the_next_call_is_answered(echo: Echo) -> None:
    block = make_block()
    with Client(echo.server.address, timeout=30.0) as client:
        for number in (1, 2, -1, 3, -2, 4):
            reply = client.call_block("act", fill(block, number))
            if number < 0:
                with pytest.raises(RemoteError, match="negative"):
                    reply.result()
            else:
                assert reply.result()["twice"] == 2 * number


def test_a_wait_that_ends_early_may_be_repeated(echo: Echo) -> None:
    block = make_block()
    with Client(echo.server.address, timeout=30.0) as client:
        for number in range(3):
            client.call_block("act", fill(block, number)).result()
        echo.go.clear()
        reply = client.call_block("act", fill(block, 5))
        assert not reply.wait(0.01)
        with pytest.raises(Timeout):
            reply.result(0.01)
        echo.go.set()
        assert reply.result()["twice"] == 10


@pytest.mark.parametrize("repeatable", [False, True])
def test_a_server_that_is_lost_fails_the_call_unless_it_may_be_repeated(repeatable: bool) -> None:
    block = make_block()
    first = Echo(repeatable=repeatable)
    address = first.server.address
    with Client(address, timeout=30.0) as client:
        for number in range(3):
            client.call_block("act", fill(block, number)).result()
        first.go.clear()
        first.called.clear()
        reply = client.call_block("act", fill(block, 9))
        assert first.called.wait(30)
        closing = threading.Thread(target=first.server.close, args=(0.0,))
        # The running call never answers: its connection ends first.
        first.server._listener.close()  # as the kernel does it for a process that is killed
        second = Echo(address, repeatable=repeatable)
        with second.server:
            if repeatable:
                assert reply.result()["twice"] == 18
                assert second.seen == [9]
            else:
                with pytest.raises(Disconnected):
                    reply.result()
                assert second.seen == []
            assert client.call_block("act", fill(block, 4)).result()["twice"] == 8
            first.go.set()
            closing.start()
            closing.join()


def test_a_client_that_is_closed_ends_the_wait(echo: Echo) -> None:
    block = make_block()
    client = Client(echo.server.address, timeout=30.0)
    for number in range(3):
        client.call_block("act", fill(block, number)).result()
    echo.go.clear()
    echo.called.clear()
    reply = client.call_block("act", fill(block, 5))
    closing = threading.Thread(target=lambda: echo.called.wait(30) and client.close(0.0))
    closing.start()
    with pytest.raises(Closed):
        reply.result()
    closing.join()
    echo.go.set()
