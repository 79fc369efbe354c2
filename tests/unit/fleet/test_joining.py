"""What a machine does that joins: whom it believes, and what it tells the person."""

from __future__ import annotations

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
from fleet_parts import small_run, until_stopped

from dreamfleet import __version__
from dreamfleet.envs import make_env
from dreamfleet.errors import ConfigError
from dreamfleet.fleet import joining
from dreamfleet.fleet.joining import JoinError, Offer, join, publish_addresses
from dreamfleet.fleet.launchers import Worker, find_launcher
from dreamfleet.fleet.nodes import JoinedNodes
from dreamfleet.fleet.record import MachineStatus
from dreamfleet.fleet.supervisor import FleetError, Supervisor
from dreamfleet.roles.addresses import Registry
from dreamfleet.roles.fences import read_fences
from dreamfleet.roles.invitations import Place, first_invitation, revoke, url
from dreamfleet.roles.spaces_file import write_spaces
from dreamfleet.transport import Caller, Keys, RoleKey, Server
from dreamfleet.transport.address import Address, parse

LONG = 120.0


def eventually(question: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LONG
    while not (answer := question()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return answer


class Run:
    """A run without an agent: its supervisor, which drives machines that join."""

    def __init__(self, folder: Path, address: str = "tcp://127.0.0.1:{auto}", **changes: Any):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        if not (folder / "keys").exists():
            Keys.generate().save(folder / "keys")
        settings: dict[str, Any] = {"actor_addr": "tcp://127.0.0.1:9", "log_every": 0.2, **changes}
        run = small_run(folder, keys=str(folder / "keys"), bind="127.0.0.1", **settings)
        self._launcher = find_launcher("serial")(folder)
        leader = Worker("agent", "agent", until_stopped, ends_run=True)
        self._supervisor = Supervisor([leader], self._launcher)
        self.nodes = JoinedNodes(run, address, self._supervisor)
        self.address = self.nodes.address
        self._thread = threading.Thread(target=self._watch)
        self.error: FleetError | None = None

    @property
    def line(self) -> str:
        place = Place("127.0.0.1", parse(self.address).port, {})
        return url(place, first_invitation(self.folder, Keys.load(self.folder / "keys")))

    def _watch(self) -> None:
        try:
            self._supervisor.run()
        except FleetError as error:
            self.error = error

    def machines(self) -> list[MachineStatus]:
        return [each for each in self.nodes.machines() if each.state != "left"]

    def __enter__(self) -> Run:
        self._launcher.__enter__()
        self._thread.start()
        self.nodes.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.nodes.__exit__()
        self._supervisor.stop()
        self._thread.join()
        self._launcher.__exit__()


def machine_of(run: Run) -> tuple[Caller, str]:
    """By which the run knows its only machine."""
    ((invitation, token),) = run.nodes._nodes
    return Caller("env", invitation, "127.0.0.1", b"1"), token


def listening(folder: Path, **changes: Any) -> tuple[Run, str]:
    """A run, and the line to join it with."""
    run = Run(folder, **changes)
    return run, run.line


def joined(line: str, **changes: Any) -> list[str]:
    said: list[str] = []
    offer = Offer(**{key: changes.pop(key) for key in list(changes) if key != "logdir"})
    join(line, offer, logdir=changes.get("logdir"), patience=LONG, say=said.append)
    return said


def test_only_servers_that_a_machine_may_call_are_looked_up(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "here")
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
    publish_addresses(tmp_path / "here", Address("tcp", "gpu-box", 5550), told)
    found = {name: registry.find(name) for name in registry.names()}
    assert found == {
        "actor": "tcp://gpu-box:5551",
        "actor-1": "tcp://10.0.0.9:5552",
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
        JoinError, match=r"10\.0\.0\.5:5550 .*within 10 s.*firewall.*port 5550 and the other"
    ):
        joined(line)


def test_a_port_that_drops_packets_keeps_a_machine_from_joining_and_all_ports_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.create_connection
    dropped = {7001}

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[1] in dropped:
            raise TimeoutError
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    run, line = listening(tmp_path, actor_addr="tcp://127.0.0.1:7001", actors=2, envs=2)
    first = parse(run.address).port
    with run:
        with pytest.raises(JoinError) as error:
            joined(line)
        assert "TCP port 7001 of 127.0.0.1 (actor) cannot be reached" in str(error.value)
        assert "firewall" in str(error.value)
        assert f"open for this machine: {first}, 7001, 7002 of 127.0.0.1." in str(error.value)
    assert run.machines() == []


def test_a_joined_machine_without_steps_says_why_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_STILL_SECONDS", 0.0)
    monkeypatch.setattr(joining, "POLL_SECONDS", 0.05)
    run, line = listening(tmp_path / "run", on_failure="restart")
    said: list[str] = []

    def errors() -> list[str]:
        return [each.error for each in run.machines() if each.error]

    with run:
        thread = threading.Thread(
            target=join,
            args=(line, Offer(1)),
            kwargs={"logdir": None, "patience": LONG, "say": said.append},
        )
        thread.start()
        (told,) = eventually(errors)
        run.nodes.end("The run is over.")
        thread.join(LONG)
    assert "TCP port 9 of 127.0.0.1 (actor) cannot be reached: nothing listens there" in told
    assert f"{parse(run.address).port}, 9 of 127.0.0.1" in told
    assert f"This machine makes no steps: {told}." in said


def test_a_line_of_another_run_is_recognised_soon(tmp_path: Path) -> None:
    run, line = listening(tmp_path)
    with run:
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
    run, line = listening(tmp_path / "run", task="no_such_module:make")
    with run:
        with pytest.raises(ConfigError, match="add --task no_such_module:make, or --trust"):
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
    run, line = listening(tmp_path)
    with run, pytest.raises(JoinError, match="the observation 'image' is"):
        joined(line)


def test_another_version_is_refused_with_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, line = listening(tmp_path)
    monkeypatch.setattr(joining, "__version__", "0.0.1")
    words = f"The run has Dreamfleet {__version__} and this machine 0.0.1"
    with run, pytest.raises(JoinError, match=words) as error:
        joined(line)
    assert "Traceback" not in str(error.value)


def test_answers_that_make_no_sense_are_not_believed(tmp_path: Path) -> None:
    keys = Keys.generate()
    server = Server("tcp://127.0.0.1:{auto}", keys=keys)
    server.bind("poll", lambda *_: {"config": 5}, roles=("env",))
    line = f"dreamfleet://{server.address.removeprefix('tcp://')}/#{keys.for_role('env').text}"
    with server, pytest.raises(JoinError, match="same version of Dreamfleet on both"):
        joined(line)


class Joining:
    """A machine that joins a run, on a thread."""

    def __init__(self, line: str, patience: float = LONG, logdir: Path | None = None) -> None:
        self.said: list[str] = []
        self.error: JoinError | None = None
        self._options: Any = (line, Offer(2), logdir, patience)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        line, offer, logdir, patience = self._options
        try:
            join(line, offer, logdir=logdir, patience=patience, say=self.said.append)
        except JoinError as error:
            self.error = error

    def says(self, words: str, times: int = 1) -> None:
        eventually(lambda: sum(words in each for each in self.said) >= times)

    def ends(self) -> list[str]:
        self._thread.join(LONG)
        assert not self._thread.is_alive()
        return self.said


def test_a_machine_that_the_run_has_given_up_joins_again_and_ends_with_the_run(
    tmp_path: Path,
) -> None:
    """Also: what a machine has joined with is where nothing else looks, and is removed."""
    run, line = listening(tmp_path / "run", on_failure="restart")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "keys").write_text("of another program")
    with run:
        machine = Joining(line, logdir=tmp_path / "here")
        machine.says("Joined")
        registry = Registry(tmp_path / "here")
        assert eventually(lambda: registry.find("actor")) == "tcp://127.0.0.1:9"
        (before,) = eventually(lambda: read_fences(run.folder).workers)
        run.nodes.leave(*machine_of(run))  # as if it had been away for too long
        (after,) = eventually(lambda: read_fences(run.folder).workers)
        assert after.ids == before.ids
        assert after.incarnation > before.incarnation
        run.nodes.end("The run is over.")
        said = machine.ends()
    assert said[-1] == "The run is over. This machine's part is done."
    assert (tmp_path / "here" / "keys").read_text() == "of another program"
    assert not list((tmp_path / "here").glob("*.key"))


def test_a_revoked_machine_is_told_so_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_POLL_TIMEOUT", 6.0)  # in which a busy machine connects again
    run, line = listening(tmp_path / "run", on_failure="restart")
    with run:
        machine = Joining(line)
        machine.says("Joined")
        revoke(tmp_path / "run", "first")
        said = machine.ends()
    assert "was revoked" in str(machine.error)
    assert not any("does not answer" in each for each in said), said


def test_the_directory_of_a_run_is_not_written_to(tmp_path: Path) -> None:
    run, line = listening(tmp_path / "run")
    old = tmp_path / "old"
    old.mkdir()
    for name in ("config.json", "keys", "status.json"):
        (old / name).write_text(name)
    with run, pytest.raises(ConfigError, match="is the directory of a run: choose another"):
        joined(line, logdir=old)
    assert {path.name: path.read_text() for path in old.iterdir()} == {
        name: name for name in ("config.json", "keys", "status.json")
    }


def test_environments_wait_for_a_run_that_does_not_answer_and_it_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No longer than the machine was told to."""
    monkeypatch.setattr(joining, "_POLL_TIMEOUT", 0.5)
    monkeypatch.setattr(joining, "_CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(joining, "POLL_SECONDS", 0.05)
    run, line = listening(tmp_path / "run", on_failure="restart")
    with run:
        machine = Joining(line)
        machine.says("Joined")
        (before,) = eventually(lambda: read_fences(run.folder).workers)
    machine.says("The run does not answer; the environments wait for it")
    with Run(tmp_path / "run", run.address, on_failure="restart") as resumed:
        machine.says("The run answers again.")
        (after,) = eventually(lambda: read_fences(run.folder).workers)
        assert after.incarnation > before.incarnation
        resumed.nodes.end("The run is over.")
        machine.ends()
    assert machine.error is None
    with Run(tmp_path / "run", run.address, on_failure="restart"):
        machine = Joining(line, patience=0.0)
        machine.says("Joined")
    machine.ends()
    assert "does not answer" in str(machine.error)


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
    run, line = listening(tmp_path / "run", task="broken:make", env_options={})
    with run:
        done = subprocess.run(
            [sys.executable, "-m", "dreamfleet.cli", "join", line, "--trust"],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LONG,
        )  # fmt: skip
        (left,) = run.nodes.machines()
    assert done.returncode == 1
    assert "the pole is broken" in done.stderr
    assert str(run.error).startswith("The joined machine ")
    assert left.state == "left"
    assert "/env-0 ended with code 1 (RuntimeError: the pole is broken)" in left.error
    assert "The end of" not in left.error  # which is in a file of that machine
