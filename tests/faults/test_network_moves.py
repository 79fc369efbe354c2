"""Roles that come back elsewhere are found again, and networks that answer nothing are named."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.audit import audit
from chaos.env import TASK
from fleet_parts import rows, small_run

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.roles.addresses import published_address, remove_addresses
from dreamfleet.transport import Client, Disconnected, Keys

LONG = 180.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, f"this never came: {what}"
        time.sleep(0.02)


def step(logdir: Path) -> int:
    """The newest step that the logger has written."""
    return max((row["step"] for row in rows(logdir / "metrics.jsonl")), default=0)


class Hands:
    """Roles of a run that are started by hand, each in a process of its own."""

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, *options: str) -> None:
        command = [sys.executable, "-m", "dreamfleet.cli", "role", role]
        with (self._logdir / f"hand-{role}.log").open("ab") as log:
            self.running[role] = subprocess.Popen(
                [*command, "--trust", "--logdir", str(self._logdir), *options],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end(self, role: str, how: signal.Signals) -> int:
        process = self.running.pop(role)
        process.send_signal(how)
        return process.wait(LONG)

    def kill_all(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def test_agent_replay_and_logger_are_moved_and_found_again(tmp_path: Path) -> None:
    """With their state in the run's directory, which is shared."""
    config = small_run(
        tmp_path,
        task=TASK,
        env_options={"seconds": 0.002},
        steps=0,
        envs_per_process=4,
        env_lanes=2,
        on_failure="restart",
        log_every=0.2,
        save_every=0.5,
        train_ratio=0.1,
        keys=str(tmp_path / "keys"),
        remote_envs=True,
        remote_replay=True,
        **{f"{role}_addr": "tcp://127.0.0.1:{auto}" for role in ("actor", "replay", "logger")},
    )
    Keys.generate().save(tmp_path / "keys")
    (tmp_path / "config.json").write_text(config.to_json())
    hands = Hands(tmp_path)
    try:
        for role in ("env", "agent", "logger", "replay"):  # in any order
            hands.start(role)
        until(lambda: step(tmp_path) > 200, "steps")
        moves = (
            ("replay", "replay", signal.SIGKILL),
            ("logger", "logger", signal.SIGTERM),
            ("agent", "actor", signal.SIGTERM),
        )
        for number, (role, server, how) in enumerate(moves, 2):
            before = published_address(tmp_path, server)
            hands.end(role, how)
            at_move = step(tmp_path)
            hands.start(role, f"--{server}-addr", f"tcp://127.0.0.{number}:{{auto}}")
            until(lambda at=at_move: step(tmp_path) > at + 200, f"steps after {role} has moved")
            assert published_address(tmp_path, server).startswith(f"tcp://127.0.0.{number}:")
            assert before.startswith("tcp://127.0.0.1:")
        hands.end("env", signal.SIGTERM)
        for role in ("agent", "replay", "logger"):
            assert hands.end(role, signal.SIGTERM) == 0, (tmp_path / f"hand-{role}.log").read_text()
    finally:
        hands.kill_all()
    found = audit([tmp_path / "replay"])
    assert found.faults == {}
    assert found.environments == 4
    assert found.rows > 800
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot.step == snapshot.parts["replay"]["steps"] == found.rows
    steps = [row["step"] for row in rows(tmp_path / "metrics.jsonl")]
    assert steps == sorted(steps)


def test_a_replay_that_others_have_started_stays_in_the_address_book(tmp_path: Path) -> None:
    folder = tmp_path / "addresses"
    folder.mkdir()
    for name in ("actor", "replay", "replay-1"):
        (folder / name).write_text("tcp://127.0.0.1:5")
    remove_addresses(tmp_path, elsewhere=("replay",))
    assert sorted(path.name for path in folder.iterdir()) == ["replay", "replay-1"]
    remove_addresses(tmp_path)
    assert not folder.exists()


def test_a_machine_that_answers_nothing_is_told_from_a_closed_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a firewall that drops packets: the kernel drops those of connections for which a
    listener has no room."""
    monkeypatch.setattr("dreamfleet.transport.remote._CONNECT_TIMEOUT", 300)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with socket.create_connection(listener.getsockname()) as filler:
            with (
                Client(address, keys=Keys.generate()) as client,
                pytest.raises(Disconnected, match="firewall drops the packets"),
            ):
                client.connect(3)
            assert filler.fileno() >= 0
    with Client(address) as client, pytest.raises(Disconnected, match="no server listens there"):
        client.connect(1)
