"""The environment is probed in a child process, where it may hang, crash or print."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dreamfleet.envs import EnvError, UnknownTaskError, make_env
from dreamfleet.errors import ConfigError
from dreamfleet.fleet import isolated
from dreamfleet.fleet.isolated import probe_in_subprocess
from dreamfleet.training import train


def test_what_is_found_comes_from_another_process(capfd: pytest.CaptureFixture[str]) -> None:
    here = os.getpid()

    def make(number: int) -> Any:
        assert os.getpid() != here
        sys.stdout.write(f"made {number}\n")
        return make_env("bundled:catch", seed=number)

    lines: list[str] = []
    probe = probe_in_subprocess(make, both=True, timeout=0, say=lines.append)
    env = make_env("bundled:catch")
    assert (probe.obs_space, probe.act_space) == (env.obs_space, env.act_space)
    assert probe.bytes > 0
    assert probe.output == "made 0\nmade 1\n"
    assert capfd.readouterr().out == ""
    assert not any("made" in line for line in lines)


def test_environments_of_different_processes_are_tried_beside_each_other(tmp_path: Path) -> None:
    lines: list[str] = []

    def one_in_a_process(number: int) -> Any:
        sys.stdout.write(f"made {number}\n")
        if hasattr(sys, "taken"):
            raise RuntimeError("this process has one")
        sys.taken = True  # type: ignore[attr-defined]
        return make_env("bundled:catch")

    probe = probe_in_subprocess(
        one_in_a_process, both=True, apart=True, timeout=0, say=lines.append
    )
    assert probe.output == "made 0\nmade 1\n"
    words = r"first: RuntimeError\('this process has one'\)\. If .*, use --envs-per-process 1\."
    with pytest.raises(EnvError, match=words):
        probe_in_subprocess(one_in_a_process, both=True, timeout=0, say=lines.append)

    def robot(_: int) -> Any:
        env, lock = make_env("bundled:catch"), tmp_path / "robot"
        lock.touch(exist_ok=False)
        env.close = lock.unlink  # type: ignore[method-assign]
        return env

    probe_in_subprocess(robot, both=False, timeout=0, say=lines.append)
    with pytest.raises(EnvError, match=r"raised FileExistsError: .* at a time, use --envs 1, "):
        probe_in_subprocess(robot, both=True, apart=True, timeout=0, say=lines.append)
    assert not (tmp_path / "robot").exists(), "the first one is closed all the same"


def test_a_constructor_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_SAY_SECONDS", 0.5)

    def hang(_: int) -> None:
        sys.stdout.write("looking for the robot\n")
        threading.Event().wait()

    lines: list[str] = []
    words = (
        r"The constructor did not return within 6 s; the traceback above .*or raise env_timeout if"
    )
    with pytest.raises(EnvError, match=words):
        probe_in_subprocess(hang, both=False, timeout=6, say=lines.append)
    said = "\n".join(lines)
    assert re.search(r"Waiting for the constructor, 0:\d\d", said)
    assert "looking for the robot" in said
    assert "in hang" in said


def test_a_constructor_that_crashes_does_not_end_this_process() -> None:
    lines: list[str] = []
    with pytest.raises(EnvError, match="The process ended with SIGSEGV in the constructor"):
        probe_in_subprocess(lambda _: ctypes.string_at(0), both=False, timeout=0, say=lines.append)
    assert "Segmentation fault" in "\n".join(lines)


def test_what_a_constructor_raises_is_shown(tmp_path: Path) -> None:
    lines: list[str] = []

    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("no robot is connected")

    with pytest.raises(EnvError, match="The constructor raised RuntimeError: no robot is conn"):
        train(env=Broken, logdir=tmp_path / "run", say=lines.append)
    assert lines[0].startswith("Training dreamer on ")
    assert 'raise RuntimeError("no robot is connected")' in "\n".join(lines)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UnknownTaskError, match="CartPole"):
        train(env="gym:CartPoel-v1", logdir=tmp_path / "run", say=lines.append)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="The code of the environment cannot be sent"):
        probe_in_subprocess(lambda _: lock, both=False, timeout=0, say=lines.append)
