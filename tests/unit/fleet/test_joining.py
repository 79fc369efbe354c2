"""What a machine does that joins: whom it believes, and what it tells the person."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import small_run

from dreamfleet import __version__
from dreamfleet.envs import make_env
from dreamfleet.errors import ConfigError
from dreamfleet.fleet import joining
from dreamfleet.fleet.coordinator import Coordinator
from dreamfleet.fleet.joining import JoinError, Offer, join, publish_addresses
from dreamfleet.roles.addresses import DirectoryBook
from dreamfleet.roles.invitations import Place, first_invitation, revoke, url
from dreamfleet.roles.spaces_file import write_spaces
from dreamfleet.transport import Keys, RoleKey, Server
from dreamfleet.transport.address import Address, parse

LONG = 120.0


def eventually(question: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LONG
    while not (answer := question()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return answer


def listening(folder: Path, **changes: Any) -> tuple[Coordinator, str]:
    """A run's coordinator without the rest of the run, and the line to join it with."""
    folder.mkdir(exist_ok=True)
    keys = Keys.generate()
    keys.save(folder / "keys")
    settings: dict[str, Any] = {"actor_addr": "tcp://127.0.0.1:9", "log_every": 0.2, **changes}
    run = small_run(folder, keys=str(folder / "keys"), bind="127.0.0.1", **settings)
    coordinator = Coordinator(run, "tcp://127.0.0.1:{auto}")
    place = Place("127.0.0.1", parse(coordinator.address).port, {})
    return coordinator, url(place, first_invitation(folder, keys))


def joined(line: str, **changes: Any) -> list[str]:
    said: list[str] = []
    offer = Offer(**{key: changes.pop(key) for key in list(changes) if key != "logdir"})
    join(line, offer, logdir=changes.get("logdir"), patience=LONG, say=said.append)
    return said


def test_only_servers_that_a_machine_may_call_are_looked_up(tmp_path: Path) -> None:
    book = DirectoryBook()
    told = {
        "actor": "tcp://*:5551",
        "actor-1": "tcp://10.0.0.9:5552",
        "evaluator": "tcp://*:5553",
        "replay": "tcp://*:5554",
        "../actor": "tcp://*:5555",
        "actor-x": "tcp://*:5556",
        "actor-2": "ipc:///tmp/somewhere",
        "actor-3": "nonsense",
    }
    publish_addresses(book, tmp_path / "here", Address("tcp", "gpu-box", 5550), told)
    found = {name: book.find(tmp_path / "here", name) for name in book.names(tmp_path / "here")}
    assert found == {
        "actor": "tcp://gpu-box:5551",
        "actor-1": "tcp://10.0.0.9:5552",
        "evaluator": "tcp://gpu-box:5553",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_firewall_is_named_with_how_long_was_waited_and_which_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(*_: Any, timeout: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", nothing)
    line = f"dreamfleet://10.0.0.5:5550/#{Keys.generate().invite('env').text}"
    with pytest.raises(
        JoinError, match=r"10\.0\.0\.5:5550 within 10 s.*firewall.*port 5550 and the others"
    ):
        joined(line)


def test_a_port_that_drops_packets_keeps_a_machine_from_joining_and_all_ports_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.create_connection
    dropped = {7001, 7003}

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[1] in dropped:
            raise TimeoutError
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    coordinator, line = listening(
        tmp_path, actor_addr="tcp://127.0.0.1:7001", evaluator_addr="tcp://127.0.0.1:7003",
        actors=2, envs=2, eval_every=100,
    )  # fmt: skip
    first = parse(coordinator.address).port
    with coordinator:
        with pytest.raises(JoinError) as error:
            joined(line)
        assert "TCP port 7001 of 127.0.0.1 (actor) cannot be reached" in str(error.value)
        assert "firewall" in str(error.value)
        assert f"open for this machine: {first}, 7001, 7002 of 127.0.0.1." in str(error.value)
        with pytest.raises(
            JoinError, match=r"7003 of 127\.0\.0\.1 \(evaluator\) cannot be reached"
        ):
            joined(line, envs=0, eval_envs=1)  # which does not need the actors
    assert coordinator._leases.machines() == []


def test_a_joined_machine_without_steps_says_why_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_STILL_SECONDS", 0.0)
    monkeypatch.setattr(joining, "BEAT_SECONDS", 0.05)
    coordinator, line = listening(tmp_path / "run", on_failure="restart")
    said: list[str] = []

    def errors() -> list[str]:
        return [each.error for each in coordinator._leases.machines() if each.error]

    with coordinator:
        thread = threading.Thread(
            target=join,
            args=(line, Offer(1)),
            kwargs={"logdir": None, "patience": LONG, "say": said.append},
        )
        thread.start()
        (told,) = eventually(errors)
        coordinator.end("The run is over.")
        thread.join(LONG)
    assert "TCP port 9 of 127.0.0.1 (actor) cannot be reached: nothing listens there" in told
    assert f"{parse(coordinator.address).port}, 9 of 127.0.0.1" in told
    assert f"This machine makes no steps: {told}." in said


def test_a_line_of_another_run_is_recognised_soon(tmp_path: Path) -> None:
    coordinator, line = listening(tmp_path)
    with coordinator:
        other = Keys.generate().invite("env").text
        start = time.monotonic()
        with pytest.raises(JoinError, match="does not know this key"):
            joined(f"{line.partition('#')[0]}#{other}")
        # The key of the right servers that nobody was invited with.
        key = RoleKey.from_text(line.partition("#")[2])
        stranger = replace(key, secret=bytes(32)).text
        with pytest.raises(JoinError, match="refused the key"):
            joined(f"{line.partition('#')[0]}#{stranger}")
        assert time.monotonic() - start < 2 * joining._CONNECT_SECONDS


def test_code_that_the_run_names_is_named_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    coordinator, line = listening(tmp_path / "run", task="no_such_module:make")
    with coordinator:
        with pytest.raises(ConfigError, match="say --task no_such_module:make, or --trust"):
            joined(line)
        with pytest.raises(ConfigError, match="is no_such_module:make, not mine:make"):
            joined(line, task="mine:make")
        for offer in ({"task": "no_such_module:make"}, {"trust": True}):
            with pytest.raises(JoinError) as error:
                joined(line, **offer)
            assert "cannot be made here" in str(error.value)
            assert "There is no module 'no_such_module'" in str(error.value)
            assert "in the directory that holds its module" in str(error.value)
    assert not list(Path(tempfile.gettempdir()).glob(f"dreamfleet-join-{os.getpid()}-*"))


def test_another_version_of_the_environment_is_refused(tmp_path: Path) -> None:
    env = make_env("bundled:dummy", length=25, size=(8, 8), channels=1)
    run = small_run(tmp_path)
    write_spaces(run, env.obs_space, env.act_space)  # as an older version had it
    coordinator, line = listening(tmp_path)
    with coordinator, pytest.raises(JoinError, match="the observation 'image' is"):
        joined(line)


def test_another_version_is_refused_with_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, line = listening(tmp_path)
    monkeypatch.setattr(joining, "__version__", "0.0.1")
    words = f"The run has Dreamfleet {__version__} and this machine 0.0.1"
    with coordinator, pytest.raises(JoinError, match=words) as error:
        joined(line)
    assert "Traceback" not in str(error.value)


def test_answers_that_make_no_sense_are_not_believed(tmp_path: Path) -> None:
    keys = Keys.generate()
    server = Server("tcp://127.0.0.1:{auto}", keys=keys)
    server.bind("describe", lambda version: {"config": 5, "version": version}, roles=("env",))
    line = f"dreamfleet://{server.address.removeprefix('tcp://')}/#{keys.for_role('env').text}"
    with server, pytest.raises(JoinError, match="same version of Dreamfleet on both"):
        joined(line)


def test_a_machine_that_lost_its_ids_gets_others_and_ends_with_the_run(tmp_path: Path) -> None:
    """Also: what a machine has joined with is where nobody else looks, and is removed."""
    coordinator, line = listening(tmp_path / "run", on_failure="restart")
    said: list[str] = []
    ended = threading.Event()

    def run() -> None:
        join(line, Offer(2), logdir=tmp_path / "here", patience=LONG, say=said.append)
        ended.set()

    def machines() -> list[Any]:
        return [each for each in coordinator._leases.machines() if each.state != "left"]

    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "keys").write_text("of somebody else")
    with coordinator:
        thread = threading.Thread(target=run)
        thread.start()
        (before,) = eventually(machines)
        book = DirectoryBook()
        assert eventually(lambda: book.find(tmp_path / "here", "actor")) == "tcp://127.0.0.1:9"
        coordinator._leases.revoke({before.invitation})  # as if it had been away for too long
        (after,) = eventually(lambda: [m for m in machines() if m.holder != before.holder])
        assert after.envs == before.envs
        assert any("given this machine's environment numbers away" in line for line in said)
        coordinator.end("The run is over.")
        assert ended.wait(LONG)
        thread.join()
    assert said[-1] == "The run is over. This machine's part is done."
    assert len([line for line in said if line.startswith("Joined")]) == 2
    assert (tmp_path / "here" / "keys").read_text() == "of somebody else"
    assert not list((tmp_path / "here").glob("*.key"))


def test_a_revoked_machine_is_told_so_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_BEAT_SECONDS", 6.0)  # in which a busy machine connects again
    coordinator, line = listening(tmp_path / "run", on_failure="restart")
    said: list[str] = []
    ended: list[str] = []

    def run() -> None:
        try:
            join(line, Offer(1), logdir=None, patience=LONG, say=said.append)
        except JoinError as error:
            ended.append(str(error))

    with coordinator:
        thread = threading.Thread(target=run)
        thread.start()
        eventually(lambda: said and said[-1].startswith("Joined"))
        revoke(tmp_path / "run", "first")
        thread.join(LONG)
    assert "it was revoked" in ended[0]
    assert not any("does not answer" in each for each in said), said


def test_the_directory_of_a_run_is_not_written_to(tmp_path: Path) -> None:
    coordinator, line = listening(tmp_path / "run")
    old = tmp_path / "old"
    old.mkdir()
    for name in ("config.json", "keys", "status.json"):
        (old / name).write_text(name)
    with coordinator, pytest.raises(ConfigError, match="is the directory of a run: choose another"):
        joined(line, logdir=old)
    assert {path.name: path.read_text() for path in old.iterdir()} == {
        name: name for name in ("config.json", "keys", "status.json")
    }


def test_a_machine_that_hears_nothing_ends_its_environments_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so before others may get its ids; and it waits for the run no longer than it was
    told to."""
    monkeypatch.setattr(joining, "HOLD_SECONDS", 0.5)
    monkeypatch.setattr(joining, "_BEAT_SECONDS", 0.5)
    monkeypatch.setattr(joining, "_CONNECT_SECONDS", 1.0)
    coordinator, line = listening(tmp_path / "run", on_failure="restart")
    said: list[str] = []
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            join(line, Offer(1), logdir=tmp_path / "here", patience=patience, say=said.append)
            ended.append(None)
        except JoinError as error:
            ended.append(error)

    for patience in (LONG, 0.0):
        thread = threading.Thread(target=run)
        with coordinator:
            thread.start()
            eventually(lambda: said and said[-1].startswith("Joined"))
        eventually(lambda: any("The environments have ended" in each for each in said))
        coordinator = Coordinator(coordinator._run, coordinator.address)
        if patience:
            with coordinator:
                eventually(lambda: said[-1].startswith("Joined"))
                coordinator.end("The run is over.")
                thread.join(LONG)
            coordinator = Coordinator(coordinator._run, coordinator.address)
        thread.join(LONG)
        said.clear()
    assert ended[0] is None
    assert "does not answer" in str(ended[1])


def test_environments_that_fail_here_send_the_machine_away_with_the_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from dreamfleet.envs import make_env\n"
        "def make(seed):\n"
        f"    if Path({str(tmp_path / 'looked')!r}).exists():\n"
        "        raise RuntimeError('the pole is broken')\n"
        f"    Path({str(tmp_path / 'looked')!r}).touch()\n"
        "    return make_env('bundled:dummy', seed=seed)\n"
    )
    told: list[str] = []
    coordinator, line = listening(tmp_path / "run", task="broken:make", env_options={})
    coordinator._on_failure = told.append
    with coordinator:
        done = subprocess.run(
            [sys.executable, "-m", "dreamfleet.cli", "join", line, "--trust"],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LONG,
        )  # fmt: skip
    assert done.returncode == 1
    assert "the pole is broken" in done.stderr
    assert len(told) == 1
    assert told[0].startswith("The joined machine ")
    (left,) = json.loads((tmp_path / "run" / "machines.json").read_text())
    assert left["state"] == "left"
    assert "env-1048576" in left["error"]
    assert "The end of" not in left["error"]  # which is in a file of that machine


def test_what_killed_machines_left_behind_is_removed_by_the_next_one() -> None:
    """One that lives in another container, whose process ids are others, is left alone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale, other = (Path(tempfile.mkdtemp(prefix=f"dreamfleet-join-{gone.pid}-")) for _ in range(2))
    for each in (stale, other):
        (each / "keys").write_text("secret")
        (each / "lock").touch()
    with (other / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with joining._place(None) as place:
            assert not stale.exists()
            assert other.exists()
            assert place.stat().st_mode & 0o077 == 0
            with joining._place(None):  # another one on this machine
                assert place.exists()
    assert not place.exists()
    with joining._place(None):
        assert not other.exists()
