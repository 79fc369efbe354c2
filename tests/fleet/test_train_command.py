"""`dreamfleet train` as a person runs it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from fleet_parts import CHILD, rows

from dreamfleet.checkpoint import Checkpoint

COMMAND = [str(Path(sys.executable).with_name("dreamfleet")), "train"]
DUMMY = [*COMMAND, "--task", "bundled:dummy", "--agent", "random", "--steps", "0", "--envs", "2",
         "--envs-per-process", "1", "--env-options", "size=[8,8]", "--log-every",
         "0.1"]  # fmt: skip


ROLES = {f"dreamfleet {name}" for name in ("agent", "env-0", "env-1", "replay", "logger")}


@contextmanager
def running(
    logdir: Path, options: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], dict[str, psutil.Process]]]:
    """An endless run that has made its first steps and whose processes have all come up, and its
    processes by title."""
    process = subprocess.Popen(
        [*DUMMY, "--logdir", str(logdir), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group that a signal can be sent to
    )
    try:
        assert process.stdout is not None
        children: dict[str, psutil.Process] = {}
        for line in process.stdout:
            children = by_title(psutil.Process(process.pid))
            if "score" in line and children.keys() >= ROLES:
                break
        yield process, children
        process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def by_title(parent: psutil.Process) -> dict[str, psutil.Process]:
    found: dict[str, psutil.Process] = {}
    for child in parent.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # A process that a worker is just starting still has the worker's title.
            found.setdefault(" ".join(child.cmdline()).strip(), child)
    return found


def to_all_processes(pid: int, number: int) -> None:
    supervisor = psutil.Process(pid)
    for each in (*supervisor.children(recursive=True), supervisor):
        each.send_signal(number)


@pytest.mark.parametrize(
    ("number", "send"),
    [
        pytest.param(signal.SIGTERM, os.kill, id="docker stop"),
        pytest.param(signal.SIGINT, os.killpg, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, to_all_processes, id="scancel"),
    ],
)
def test_a_signal_saves_and_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    """Also a signal to the whole group, or to every process of a job, as schedulers send it."""
    with running(tmp_path) as (process, children):
        # An encoder of videos may be there too.
        assert {title for title in children if title.startswith("dreamfleet ")} == ROLES
        for title in ("env-0", "replay", "logger"):
            child = children[f"dreamfleet {title}"]
            assert not any("jax" in each.path for each in child.memory_maps())
        assert children["dreamfleet env-0"].memory_info().rss < 80e6
        send(process.pid, number)
        assert process.wait(200) == 130
        assert psutil.wait_procs(children.values(), timeout=60)[1] == []
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot.step > 0


# The tests may have been started with SIGHUP ignored.
IN_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_closed_terminal_saves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and what is written from then on fails. Or ssh has lost its
    connection."""
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *DUMMY, "--logdir", str(tmp_path)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(terminal)
    try:
        scores, children = tmp_path / "scores.jsonl", dict[str, psutil.Process]()
        while not (children.keys() >= ROLES and scores.exists() and scores.stat().st_size):
            assert os.read(master, 1 << 16)
            children = by_title(psutil.Process(process.pid))
        os.close(master)
        assert process.wait(200) == 130
        assert psutil.wait_procs(children.values(), timeout=60)[1] == []
    finally:
        process.kill()
        process.wait()
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot.step > 0


def test_the_fleet_ends_when_its_supervisor_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also workers that are stopped, and what workers have started; no socket file is left."""
    sockets = Path(tempfile.mkdtemp())  # the path of a socket file has to be short
    monkeypatch.setenv("TMPDIR", str(sockets))
    task = ["--task", "fleet_parts:env_with_a_child"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with running(tmp_path / "run", task) as (process, children):
        assert CHILD in children
        assert list(sockets.glob("dreamfleet-*"))
        children["dreamfleet env-1"].suspend()
        children["dreamfleet replay"].suspend()
        process.kill()
        assert psutil.wait_procs(children.values(), timeout=100)[1] == []
    assert list(sockets.iterdir()) == []
    sockets.rmdir()


def test_dreamer_trains_and_resumes(tmp_path: Path) -> None:
    steps = []
    for limit, episodes in ((100, 0), (150, 2)):
        command = [*COMMAND, "--preset", "debug", "--logdir", str(tmp_path), "--steps", str(limit)]
        command += ["--train-ratio", "8", "--eval-episodes", str(episodes)]
        command += ["--dreamer.execution.cache-dir", os.environ["DREAMFLEET_TESTS_CACHE"]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("Evaluation: mean score" in done.stdout) == bool(episodes)
        assert f"Results: {tmp_path}" in done.stdout.replace("\n", "")
        snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
        steps.append((snapshot.step, int(snapshot.parts["agent"]["counters/updates"])))
    (first, first_updates), (second, second_updates) = steps
    (evaluation,) = rows(tmp_path / "evaluations.jsonl")
    assert (evaluation["step"], len(evaluation["returns"])) == (second, 2)
    (video,) = (tmp_path / "media" / "evaluation").iterdir()
    assert video.name == f"{second:012d}.mp4"
    assert 100 <= first < 150 <= second
    assert 0 < first_updates < second_updates
    # Everything was compiled before, once in each run, and the actor's parameters became newer.
    log = (tmp_path / "logs" / "agent.log").read_text()
    assert log.count("Compiling train") == log.count("Compiling report") == 2
    age = "actor/policy/updates_behind"
    behind = [row[age] for row in rows(tmp_path / "metrics.jsonl") if age in row]
    assert behind[-1] < second_updates
    for name in ("config.json", "metrics.jsonl", "scores.jsonl", "replay", "logs/agent.log"):
        assert (tmp_path / name).exists()


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    command = [*COMMAND, "--task", "gym:CartPole-v9", "--logdir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
