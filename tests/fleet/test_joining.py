"""Machines that join a run, leave it, vanish, are sent away, and find it again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos.audit import audit
from chaos.env import TASK
from fleet_parts import fixed_address, rows

from dreamfleet.config import read_config
from dreamfleet.fleet.record import MachineStatus, RunStatus
from dreamfleet.fleet.status import Watcher
from dreamfleet.roles.addresses import published_address
from dreamfleet.roles.invitations import read_place, read_url
from dreamfleet.transport import Client, Disconnected, RemoteError, RoleKey, Timeout
from dreamfleet.transport.address import parse

COMMAND = [sys.executable, "-m", "dreamfleet.cli"]
LONG = 300.0


class Program:
    """A command that runs, with what it says."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self._file = folder / f"{name}.out"
        with self._file.open("ab") as out:
            self.process = subprocess.Popen([*COMMAND, *words], stdout=out, stderr=out)

    @property
    def text(self) -> str:
        return self._file.read_text()

    def ends(self, code: int) -> str:
        assert self.process.wait(LONG) == code, self.text
        return self.text

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextmanager
def programs(folder: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(name: str, *words: str) -> Program:
        started.append(Program(folder, name, *words))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            children = (
                psutil.Process(each.process.pid).children(recursive=True)
                if (each.process.poll() is None)
                else []
            )
            for process in (*children, each.process):
                process.kill()
            each.process.wait(LONG)


def eventually(question: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        if answer := question():
            return answer
        time.sleep(0.1)
    raise AssertionError(f"{what} did not come")


class Run:
    """A run in a directory, looked at from outside."""

    def __init__(self, logdir: Path) -> None:
        self._watcher = Watcher(logdir)

    def status(self) -> RunStatus:
        found: RunStatus = eventually(lambda: self._watcher.look(1.0), "a status")
        return found

    def machine(self, number: int) -> MachineStatus | None:
        found = self.status().machines
        return found[number] if len(found) > number else None

    def has_made(self, more: int) -> None:
        start = self.status().step
        eventually(lambda: self.status().step >= start + more, f"{more} more steps")


def line_of(text: str) -> str | None:
    found = re.search(r"dreamfleet join '(\S+)'", text)
    return found.group(1) if found else None


def refused(address: str, key: RoleKey, method: str, *arguments: Any) -> bool:
    """Whether a call is answered with the sentence that it is not allowed, or not at all because
    the key does not even connect."""
    with Client(address, keys=key, patience=1.0) as client:
        try:
            client.call(method, *arguments).result(LONG)
        except RemoteError as error:
            return "may not call" in str(error)
        except (Disconnected, Timeout) as error:
            return "refused the key" in str(error)
    return False


def test_machines_join_and_leave_and_nothing_is_lost(tmp_path: Path) -> None:
    logdir = tmp_path / "run"
    bind = fixed_address().removeprefix("tcp://")
    local = "tcp://127.0.0.1:{auto}"
    with programs(tmp_path) as start:
        train = start(
            "train", "train", "--task", TASK, "--env-options", "seconds=0.002",
            "--agent", "random", "--logdir", str(logdir), "--steps", "0", "--eval-episodes", "2",
            "--remote-envs", "--bind", bind, "--expect-envs", "6", "--log-every", "0.5",
            "--batch-size", "2", "--batch-length", "4", "--train-ratio", "0.5",
            "--envs-per-process", "2", "--replay-addr", local, "--logger-addr", local,
        )  # fmt: skip
        line: str = eventually(lambda: line_of(train.text), "the line to type")
        place = read_place(logdir)
        assert place is not None
        run = Run(logdir)
        said = eventually(lambda: "no machine has joined" in train.text, "who is waited for")
        assert said

        def join(name: str, url: str, *words: str) -> Program:
            own = ("--task", TASK, "--logdir", str(tmp_path / name))
            return start(name, "join", url, *own, *words)

        # The run begins when those are there that it expects.
        stays = join("stays", line, "--envs", "2", "--eval-envs", "1")
        leaves = join("leaves", line, "--envs", "2")
        text = "the run begins when 6 environments are there (expect_envs): 5 are"
        eventually(lambda: text in train.text, "why the run waits")
        assert run.status().step == 0
        vanishes = join("vanishes", line, "--envs", "1", "--eval-envs", "1")
        run.has_made(300)
        eventually(
            lambda: all(m.state == "joined" and m.steps > 0 for m in run.status().machines),
            "what machines have made",
        )
        eventually(
            lambda: sum(m.steps_per_second for m in run.status().machines) > 0, "how fast they are"
        )
        found = run.status()
        assert sorted((m.envs, m.eval_envs) for m in found.machines) == [(1, 1), (2, 0), (2, 1)]
        assert '"machines":[{"name":' in found.to_json()
        eventually(lambda: "3 machines joined (7 environments)" in train.text, "a line of the run")

        # The key of the line opens what environments need, and nothing else.
        _, key = read_url(line)
        servers = {
            "replay": ("stats", "position", "add_batch", "sample_train", "update"),
            "logger": ("status", "add", "tran"),
        }
        for role in ("replay", "logger"):
            for method in servers[role]:
                assert refused(published_address(logdir, role), key, method), method
        actor = f"tcp://127.0.0.1:{place.ports['actor']}"
        coordinator = f"tcp://{bind}"
        assert refused(actor, key, "stats")
        assert refused(coordinator, key, "revoke", "first")
        # What it may call is checked, and costs its sender an error only.
        with Client(coordinator, keys=key) as client:
            for wrong in (None, 7, {"envs": -1}, {"version": "0.0.1"}):
                with pytest.raises(RemoteError):
                    client.call("poll", "token", wrong, {}).result(LONG)
            numbers = {"envs": 1, "eval_envs": 0, "envs_per_process": 1}
            asked = {"version": "0.0.1", "digest": "", "host": "box", **numbers}
            with pytest.raises(RemoteError, match=r"and this machine 0\.0\.1"):
                client.call("poll", "token", asked, {}).result(LONG)

        # The run's supervisor starts a process of a joined machine again that was killed.
        children = psutil.Process(stays.process.pid).children()
        (killed, *_) = [each for each in children if each.name().startswith("dreamfleet env")]
        killed.kill()
        events = eventually(lambda: [e for e in run.status().events if e.event == "started"], "it")
        assert events[-1].worker.endswith("/env-0")

        # Machines that have joined for it evaluate all the time.
        eventually(lambda: len(rows(logdir / "eval_scores.jsonl")) >= 2, "evaluation episodes")

        # One leaves in order: its ids are free at once. One vanishes without a word.
        leaves.signal(signal.SIGTERM)
        assert "has left the run" in leaves.ends(0)
        eventually(lambda: [m.state for m in run.status().machines].count("left") == 1, "its end")
        vanishes.signal(signal.SIGKILL)
        vanishes.ends(-signal.SIGKILL)
        eventually(lambda: "away" in [m.state for m in run.status().machines], "who is away")
        run.has_made(100)

        # Another line, with a key of its own, which is revoked while the run goes on.
        made = subprocess.run(
            [*COMMAND, "invite", str(logdir), "--name", "other"], capture_output=True, text=True
        )
        other = line_of(made.stdout)
        assert other is not None
        assert made.returncode == 0
        guest = join("guest", other, "--envs", "2")
        eventually(lambda: any(m.steps > 0 for m in run.status().machines[2:3]), "the guest")
        revoke = [*COMMAND, "invite", str(logdir), "--revoke", "other"]
        assert subprocess.run(revoke, check=False).returncode == 0
        assert "was revoked" in guest.ends(1)
        again = start("again", "join", other)
        assert "refused the key: it was revoked" in again.ends(1)
        run.has_made(100)

        # The run is killed and resumed. Who still waits finds it again by itself.
        steps = run.status().step
        children = psutil.Process(train.process.pid).children(recursive=True)
        train.signal(signal.SIGKILL)
        train.ends(-signal.SIGKILL)
        psutil.wait_procs(children, timeout=LONG)
        eventually(lambda: "The run does not answer" in stays.text, "that the run is away")
        train = start("train2", "resume", str(logdir), "--trust", "--expect-envs", "0")
        assert eventually(lambda: line_of(train.text), "the line to type") == line
        eventually(lambda: "answers again" in stays.text, "that the run is back")
        eventually(lambda: run.status().step > steps, "further steps")
        run.has_made(100)
        train.signal(signal.SIGINT)
        train.ends(130)
        assert "The run was stopped." in stays.ends(0)
    assert read_config(logdir).bind == bind
    found_rows = audit([logdir / "replay"])
    # With the agent that was killed went what the replay had not acknowledged, and nothing else.
    assert found_rows.faults.keys() <= {"lost_ends"}
    assert found_rows.lost_ends <= 8
    assert found_rows.rows > 600
    assert found_rows.environments >= 5


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("dreamfleet://127.0.0.1:{free}/#{key}", "nothing listens there: the run has ended"),
        ("dreamfleet://no-such-host.invalid:5550/#{key}", "does not know the name"),
        ("dreamfleet://127.0.0.1:{free}/", "has no key"),
    ],
)
def test_a_run_that_is_not_there_is_said_in_one_sentence(
    url: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from dreamfleet.cli import main
    from dreamfleet.transport import Keys

    free = parse(fixed_address()).port
    text = url.format(free=free, key=Keys.generate().invite("env").text)
    assert main(["join", text]) in (1, 2)
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not list(Path(tempfile.gettempdir()).glob(f"dreamfleet-join-{os.getpid()}-*"))
