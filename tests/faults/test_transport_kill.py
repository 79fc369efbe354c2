"""Servers that are killed, stopped or idle."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest
from transport_processes import ServerProcess, server_process

from dreamfleet.transport import Client, Disconnected, Keys, resolve

TRANSPORTS = {
    "ipc": ("ipc://{auto}", None),
    "tcp": ("127.0.0.1:{auto}", None),
    "tcp with keys": ("127.0.0.1:{auto}", Keys.generate()),
}


class Caller:
    """Calls without pause, each call with a line of its own to put on record."""

    def __init__(
        self, address: str | Callable[[], str], keys: Keys | None, method: str, record: Path
    ) -> None:
        self.answered: list[str] = []
        self.lost = 0
        self.errors: list[Exception] = []
        self.record = record
        self._client = Client(address, keys=keys, timeout=60)
        self._method = method
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for number in count():
            if self._stop.is_set():
                return
            try:
                self._client.call(self._method, str(self.record), str(number)).result()
                self.answered.append(str(number))
            except Disconnected:
                self.lost += 1
            except Exception as error:
                self.errors.append(error)
                return

    def stop(self) -> dict[str, float]:
        self._stop.set()
        self._thread.join()
        stats = self._client.stats()
        self._client.close()
        return stats


def await_progress(callers: list[Caller], steps: int) -> None:
    goals = [len(caller.answered) + steps for caller in callers]
    deadline = time.monotonic() + 60
    while any(
        len(caller.answered) < goal and not caller.errors
        for caller, goal in zip(callers, goals, strict=True)
    ):
        assert time.monotonic() < deadline, "the callers do not get any further"
        time.sleep(0.01)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same address", "another address"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kill_nine_under_load_and_return(transport: str, elsewhere: bool, tmp_path: Path) -> None:
    template, keys = TRANSPORTS[transport]
    address = resolve(template)
    server = ServerProcess(address, keys)
    callers = [
        Caller(
            (lambda: address) if elsewhere else address,
            keys,
            method,
            tmp_path / f"{method}-{index}",
        )
        for method in ("note", "note_again")
        for index in range(2)
    ]
    kills = 3
    gone: list[str] = []
    try:
        for _ in range(kills):
            await_progress(callers, 50)
            server.kill()
            gone.append(server.address)
            if elsewhere:
                server = ServerProcess(template, keys)
                address = server.address  # known to the callers only now
            else:
                server = ServerProcess(address, keys)
        await_progress(callers, 50)
    finally:
        stats = [caller.stop() for caller in callers]
        server.stop()
        if transport == "ipc":  # a server that was killed leaves its file, which a fleet removes
            for each in gone:
                shutil.rmtree(Path(each.removeprefix("ipc://")).parent, ignore_errors=True)
    assert [caller.errors for caller in callers] == [[]] * 4
    for caller, counts in zip(callers, stats, strict=True):
        assert counts["connects"] == kills + 1
        carried_out = Counter(caller.record.read_text().split())
        assert set(caller.answered) <= set(carried_out)
        if "again" in caller.record.name:
            assert caller.lost == 0
        else:
            # At most the one call in flight is lost with each kill, and nothing is done twice.
            assert caller.lost <= kills
            assert max(carried_out.values()) == 1


_ENDLESS_CALLS = """
import sys
import numpy as np
from dreamfleet.transport import Client

with Client(sys.argv[1], maxinflight=8) as client:
    number = 0
    while True:
        calls = [client.echo(np.full(200_000, (number + n) % 251, np.uint8)) for n in range(8)]
        answers = [call.result(60)[0] for call in calls]
        assert [set(a.tolist()) for a in answers] == [{(number + n) % 251} for n in range(8)]
        number += 8
        print(number, flush=True)
"""


def test_clients_that_are_killed_leave_no_shared_memory_behind() -> None:
    """At any moment: with arrays of theirs that the server has mapped, and of the server's."""
    with server_process() as server, Client(server.address, timeout=60) as friend:
        maps = Path(f"/proc/{server.pid}/maps")
        for rounds in range(1, 4):
            killed = subprocess.Popen(
                [sys.executable, "-c", _ENDLESS_CALLS, server.address],
                stdout=subprocess.PIPE,
                text=True,
            )
            with killed:
                assert killed.stdout
                for _ in range(rounds):
                    assert int(killed.stdout.readline())
                assert "memfd:dreamfleet" in maps.read_text()
                killed.kill()
        deadline = time.monotonic() + 60
        while "memfd:dreamfleet" in maps.read_text():
            assert time.monotonic() < deadline
            friend.echo(1).result()
        big = np.ones(200_000, np.uint8)
        for _ in range(3):
            np.testing.assert_array_equal(friend.echo(big).result()[0], big)


def test_a_server_that_hangs_is_given_up_by_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process answers nothing, but its connections stay open."""
    monkeypatch.setattr("dreamfleet.transport.wire.HEARTBEAT", 200)
    monkeypatch.setattr("dreamfleet.transport.wire.HEARTBEAT_TIMEOUT", 2000)
    with server_process("127.0.0.1:{auto}") as server:
        client = Client(server.address)
        client.echo(1).result(20)
        os.kill(server.pid, signal.SIGSTOP)
        while psutil.Process(server.pid).status() != psutil.STATUS_STOPPED:
            pass
        try:
            with pytest.raises(Disconnected, match="was lost before it answered"):
                client.echo(2).result(30)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert client.echo(3).result(30) == (3,)
        client.close()


def test_a_busy_server_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a method takes: heartbeats are answered by libzmq, not by Python."""
    monkeypatch.setattr("dreamfleet.transport.wire.HEARTBEAT", 100)
    monkeypatch.setattr("dreamfleet.transport.wire.HEARTBEAT_TIMEOUT", 1500)
    with server_process("127.0.0.1:{auto}") as server, Client(server.address) as client:
        future = client.block()
        assert not future.wait(3)
        assert client.echo(1).result(20) == (1,)
        assert client.stats()["connects"] == 1


def test_an_idle_server_uses_no_measurable_cpu() -> None:
    """After its start, which takes some seconds on a busy machine."""
    with server_process(batching=True) as server, Client(server.address) as client:
        client.connect(20)
        process = psutil.Process(server.pid)

        def used() -> float:
            before = process.cpu_times()
            time.sleep(3)  # the time over which it is measured
            after = process.cpu_times()
            return after.user + after.system - before.user - before.system

        assert any(used() < 0.01 * 3 for _ in range(5))
