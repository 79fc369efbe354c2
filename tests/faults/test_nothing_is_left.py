"""Commands that start processes: whatever ends them, no process and no temporary file is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.policy import BLUEPRINT, Blueprint

# The tests may have been started with SIGHUP ignored, as by nohup.
HEARS_SIGHUP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
MARK = "DREAMFLEET_TEST_FOLDER"
"""A variable that all processes of a command inherit."""
ENOUGH = 200.0
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)

ENDLESS = """
from dreamfleet.envs.bundled import Catch


class Endless(Catch):
    def _advance(self, action):
        while True:
            pass
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """The temporary directory of a command. It is short, as paths of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        yield Path(name)


def marked(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get(MARK) == str(folder)
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def titles(folder: Path) -> str:
    words = []
    for process in marked(folder):
        try:
            words.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return "\n".join(words)


def wait_until(condition: Callable[[], object], problem: Callable[[], object]) -> None:
    deadline = time.monotonic() + ENOUGH
    while not condition():
        assert time.monotonic() < deadline, problem()
        time.sleep(0.05)


def check(folder: Path, words: list[str], runs: str, end: signal.Signals) -> None:
    """Start a command, end it when a process with this title runs, and see what is left."""
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        Path(log.name).unlink()
        command = subprocess.Popen(
            [sys.executable, "-c", HEARS_SIGHUP, sys.executable, "-m", "dreamfleet.cli", *words],
            # The title of a process would overwrite its variables: SPT_NOENV.
            env={**os.environ, MARK: str(folder), "TMPDIR": str(folder), "SPT_NOENV": "1"},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:

            def said() -> str:
                log.seek(0)
                return f"{titles(folder)}\n{[*folder.iterdir()]}\n{log.read()}"

            wait_until(lambda: runs in titles(folder) or command.poll() is not None, said)
            assert command.poll() is None, said()
            command.send_signal(end)
            code = command.wait(ENOUGH)
            assert code in ((-end,) if end == signal.SIGKILL else (143, 130)), said()
            wait_until(lambda: not marked(folder), said)
            assert [each.name for each in folder.iterdir() if each.name not in KEPT] == []
        finally:
            command.kill()
            command.wait()
            for process in marked(folder):
                with suppress(psutil.Error):
                    process.kill()


KEPT = ("my_env.py", "__pycache__", "run")
"""What a test has put there, and what was asked for."""


@pytest.mark.parametrize("end", ENDS)
def test_check_env(folder: Path, end: signal.Signals) -> None:
    (folder / "my_env.py").write_text(ENDLESS)
    check(folder, ["check-env", "my_env:Endless"], "dreamfleet probe", end)


@pytest.mark.parametrize("end", ENDS)
def test_eval(folder: Path, end: signal.Signals) -> None:
    task = "bundled:dummy"
    config = RunConfig(task=task, agent="random", envs=1)
    env = make_env(task)
    agent = RandomAgent(env.obs_space, env.act_space)
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    Checkpoint(folder / "run" / "ckpt" / "agent").save(parts, step=1)
    words = ["eval", str(folder / "run"), "--episodes", "1000000"]
    check(folder, words, "dreamfleet eval-0", end)
