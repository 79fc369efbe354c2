"""How roles find each other, and how they are asked to stop."""

from __future__ import annotations

import threading
from pathlib import Path

from fleet_parts import small_run

from dreamfleet.roles.runtime import (
    StopSignal,
    find_server,
    publish_address,
    published_address,
    remove_addresses,
    stop_event,
)
from dreamfleet.transport import Client, Server


def serve(address: str, value: str) -> Server:
    server = Server(address, "logger")
    server.bind("get", lambda: value, repeatable=True)
    server.start(block=False)
    return server


def test_a_server_that_comes_back_elsewhere_is_found_again(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    with Client(find_server(run, "logger"), patience=60.0) as client:
        waiting = client.get()  # nobody has published an address yet
        with serve("ipc://{auto}", "first") as first:
            publish_address(run, "logger", first.address)
            assert waiting.result(60) == "first"
        with serve("tcp://127.0.0.1:{auto}", "second") as second:
            publish_address(run, "logger", second.address)
            assert client.get().result(60) == "second"


def test_a_fixed_address_is_never_looked_up(tmp_path: Path) -> None:
    run = small_run(tmp_path, logger_addr="tcp://127.0.0.1:5000")
    publish_address(run, "logger", "tcp://127.0.0.1:5000")
    assert find_server(run, "logger") == "tcp://127.0.0.1:5000"
    assert not (tmp_path / "addresses").exists()


def test_socket_files_of_killed_servers_are_removed(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    old, new = tmp_path / "a" / "old", tmp_path / "b" / "new"
    for path in (old, new):
        path.parent.mkdir()
        path.touch()
    publish_address(run, "replay", f"ipc://{old}")
    publish_address(run, "replay", f"ipc://{new}")
    assert not old.parent.exists()
    assert new.exists()
    assert published_address(tmp_path, "replay") == f"ipc://{new}"
    remove_addresses(tmp_path)
    assert not new.parent.exists()
    assert published_address(tmp_path, "replay") == ""
    remove_addresses(tmp_path)


def test_a_role_in_a_thread_stops_when_its_signal_says_so() -> None:
    stopped: list[str] = []
    running = threading.Event()

    def role() -> None:
        event = stop_event(on_stop=lambda: stopped.append("callback"))
        running.set()
        event.wait()
        stopped.append("returned")

    signal = StopSignal()
    thread = threading.Thread(target=signal.run, args=[role])
    thread.start()
    assert running.wait(60)
    signal.stop()
    signal.stop()
    thread.join(60)
    assert stopped == ["callback", "returned"]
    signal.on_stop(lambda: stopped.append("late"))
    assert stopped[-1] == "late"
