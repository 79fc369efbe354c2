"""How roles find each other, and how they are asked to stop."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from fleet_parts import small_run

from dreamfleet.roles.addresses import (
    find_server,
    listen_address,
    publish_address,
    published_address,
    remove_addresses,
)
from dreamfleet.roles.runtime import STOP_SIGNAL, StopSignal, stop_event
from dreamfleet.transport import AddressError, Client, Server


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


def leave_socket(path: Path) -> None:
    """The socket file of a server that was killed."""
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def test_socket_files_of_killed_servers_are_removed() -> None:
    with tempfile.TemporaryDirectory(prefix="s-") as folder:  # paths of sockets have to be short
        logdir = Path(folder)
        run = small_run(logdir)
        old, new = logdir / "a" / "old", logdir / "b" / "new"
        leave_socket(old)
        leave_socket(new)
        publish_address(run, "replay", f"ipc://{old}")
        publish_address(run, "replay", f"ipc://{new}")
        assert not old.parent.exists()
        assert new.exists()
        assert published_address(logdir, "replay") == f"ipc://{new}"
        remove_addresses(logdir)
        assert not new.parent.exists()
        assert published_address(logdir, "replay") == ""
        remove_addresses(logdir)


def test_what_is_no_abandoned_socket_is_never_removed(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    precious = tmp_path / "data" / "precious"
    precious.parent.mkdir()
    precious.write_text("not a socket")
    publish_address(run, "replay", f"ipc://{precious}")
    with serve("ipc://{auto}", "alive") as server:
        publish_address(run, "logger", server.address)
        remove_addresses(tmp_path)
        with Client(server.address) as client:
            assert client.get().result(60) == "alive"
    assert precious.exists()


def test_a_server_on_all_interfaces_is_published_under_the_machines_name(tmp_path: Path) -> None:
    run = small_run(tmp_path, actor_addr="tcp://0.0.0.0:{auto}")
    publish_address(run, "actor", "tcp://0.0.0.0:5551")
    assert published_address(tmp_path, "actor") == f"tcp://{socket.gethostname()}:5551"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tcp://10.0.0.5:5560", "tcp://10.0.0.5:5562"),
        ("somewhere:5560", "tcp://somewhere:5562"),
        ("ipc:///run/me/replay", "ipc:///run/me/replay-2"),
        ("tcp://10.0.0.5:{auto}", "tcp://10.0.0.5:{auto}"),
    ],
)
def test_a_fixed_address_is_that_of_the_first_server_and_the_others_follow(
    tmp_path: Path, first: str, second: str
) -> None:
    run = small_run(tmp_path, replay_addr=first)
    assert listen_address(run, "replay") == first
    assert listen_address(run, "replay", 2) == second


def test_ports_end_somewhere(tmp_path: Path) -> None:
    run = small_run(tmp_path, replay_addr="tcp://10.0.0.5:65535")
    with pytest.raises(AddressError, match="65535"):
        listen_address(run, "replay", 1)


def test_the_servers_of_a_role_are_found_and_forgotten_one_by_one(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    publish_address(run, "replay", "tcp://10.0.0.1:1")
    publish_address(run, "replay", "tcp://10.0.0.1:2", 1)
    (tmp_path / "addresses" / ".replay.killed").write_text("half an addr")
    assert published_address(tmp_path, "replay") == "tcp://10.0.0.1:1"
    assert published_address(tmp_path, "replay", 1) == "tcp://10.0.0.1:2"
    remove_addresses(tmp_path)
    assert published_address(tmp_path, "replay", 1) == ""
    assert not (tmp_path / "addresses").exists()


def test_a_role_in_a_thread_stops_when_its_signal_says_so() -> None:
    stopped: list[str] = []
    running = threading.Event()

    def role() -> None:
        event = stop_event(on_stop=lambda: stopped.append("callback"))
        running.set()
        event.wait()
        stopped.append("returned")

    stop = StopSignal()
    thread = threading.Thread(target=stop.run, args=[role])
    thread.start()
    assert running.wait(60)
    stop.stop()
    stop.stop()
    thread.join(60)
    assert stopped == ["callback", "returned"]
    stop.on_stop(lambda: stopped.append("late"))
    assert stopped[-1] == "late"


STOPPED_WHILE_IT_WAITS = """
import os, sys
from dreamfleet.roles.runtime import process_was_asked_to_stop, stop_event
stop = stop_event()
with stop._cond:  # where Event.wait is for a moment each time it is called
    print("waiting", flush=True)
    while not os.path.exists(sys.argv[1]):
        pass
stop.wait()
assert process_was_asked_to_stop()
"""


def test_a_signal_that_comes_inside_of_the_event_does_not_hang_the_role(tmp_path: Path) -> None:
    """A handler that sets the event itself would wait for a lock that its own thread holds."""
    go = tmp_path / "go"
    command = [sys.executable, "-c", STOPPED_WHILE_IT_WAITS, str(go)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)  # handled by the main thread, which holds the lock
    go.touch()
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


SLEEPS_THROUGH_IT = """
import signal, threading
from dreamfleet.roles.runtime import obey_supervisor, stop_event
obey_supervisor()
stop = stop_event()
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
print("waiting", flush=True)
stop.wait()
print("stopped", flush=True)
"""
LEAVES = """
import threading
from dreamfleet.roles.runtime import obey_supervisor, stop_event, user_code
obey_supervisor()
stop_event(exit_process=True)
try:
    with user_code:
        print("waiting", flush=True)
        threading.Event().wait()
finally:
    print("stopped", flush=True)
"""
LEAVES_LATER = """
import threading
from dreamfleet.roles.runtime import obey_supervisor, stop_event, user_code
obey_supervisor()
stop = stop_event(exit_process=True)
changed = threading.Condition()
with changed:
    print("waiting", flush=True)
    while not stop.is_set():
        changed.wait(0.01)
print("not left in the wait", flush=True)
with user_code:
    print("not left", flush=True)
"""


@pytest.mark.parametrize(
    ("code", "signals"),
    [
        (SLEEPS_THROUGH_IT, [STOP_SIGNAL]),
        (LEAVES, [signal.SIGSTOP, signal.SIGTERM, STOP_SIGNAL, signal.SIGCONT]),
    ],
    ids=["another thread", "stopped"],
)
def test_a_signal_that_does_not_wake_the_main_thread_is_noticed(
    code: str, signals: list[signal.Signals]
) -> None:
    """The kernel may give it to any thread if another one came just before, or if the process was
    stopped; it wakes nobody but that thread."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    for each in signals:
        process.send_signal(each)
    try:
        assert process.wait(60) == 0
        assert process.stdout.read() == "stopped\n"
    finally:
        process.kill()
        process.communicate()


def test_a_process_is_left_in_their_code_only() -> None:
    """Anywhere else, as in a wait with a lock, an exception would leave locks as nobody expects."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVES_LATER], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(STOP_SIGNAL)
    assert process.communicate(timeout=60) == ("not left in the wait\n", None)
    assert process.returncode == 0


FORKS = """
import os, signal, threading, time
from dreamfleet.roles.runtime import obey_supervisor, stop_event
obey_supervisor()
stop = stop_event()
child = os.fork()
if not child:
    print("waiting", flush=True)
    time.sleep(600)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM, status
child = os.fork()
if not child:
    time.sleep(600)
os.kill(child, signal.SIGUSR2)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -signal.SIGUSR2, status
assert not stop.wait(0.2)
"""


def test_processes_that_a_role_forks_have_their_signals_to_themselves() -> None:
    """A simulator's process that is ended must not end the environment, nor live on."""
    subprocess.run([sys.executable, "-c", FORKS], timeout=60, check=True, capture_output=True)
