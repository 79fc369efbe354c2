"""A queued call that blocks right after an answer must not leave others' calls unread."""

from __future__ import annotations

import threading

import numpy as np

from dreamfleet.transport import BatchServer, Client, Server

ROUNDS = 1500


def test_a_call_that_comes_while_another_is_answered_is_read_at_once() -> None:
    gate = threading.Semaphore(0)
    server = Server("ipc://{auto}")
    server.bind("through", lambda wait: gate.acquire() if wait else True, workers=1)
    server.bind("open", gate.release, workers=1)
    with server, Client(server.address, timeout=10.0) as writer:
        writer.connect()
        start, done = threading.Semaphore(0), threading.Semaphore(0)
        failures: list[Exception] = []

        def opener() -> None:
            with Client(server.address, timeout=10.0) as client:
                client.connect()
                for _ in range(ROUNDS):
                    start.acquire()
                    try:
                        client.open().result()
                    except Exception as error:
                        failures.append(error)
                        gate.release()
                    done.release()

        thread = threading.Thread(target=opener)
        thread.start()
        for _ in range(ROUNDS):
            calls = [writer.through(False), writer.through(False), writer.through(True)]
            start.release()
            for call in calls:
                call.result(30.0)
            done.acquire()
            if failures:
                for _ in range(ROUNDS):
                    start.release()
                break
        thread.join()
    assert failures == []


def test_a_call_that_comes_while_a_server_asks_who_is_connected_is_read_at_once() -> None:
    connections: set[bytes] = set()
    server = BatchServer("ipc://{auto}")
    server.bind(
        "act",
        lambda x: (x, None),
        batch=1,
        check=lambda origin, _: connections.add(origin.caller.connection),
    )
    start = threading.Semaphore(0)

    def ask() -> None:
        for _ in range(ROUNDS):
            start.acquire()
            server.between_calls(lambda: [server.connected(each) for each in connections])

    with server, Client(server.address, timeout=10.0) as client:
        client.connect()
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            for value in range(ROUNDS):
                start.release()
                assert client.call_block("act", np.array([value])).result() == value
        finally:
            start.release(ROUNDS)
            thread.join()
