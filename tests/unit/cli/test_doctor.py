"""`dreamfleet doctor` finds what is wrong and says what to do."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import resource
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import dreamfleet.cli.doctor as doctor
from dreamfleet.cli import main
from dreamfleet.cli.doctor import Check, attempt, disk, extras, jax, rendering, sockets
from dreamfleet.errors import install_command


def only(findings: object) -> Check:
    (finding,) = findings  # type: ignore[misc]
    return finding


def test_this_machine_is_looked_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "TRIES", {})  # they are tried by a test of their own
    monkeypatch.setattr(doctor, "draw", lambda: "egl")
    assert main(["doctor", "--logdir", str(tmp_path / "new")]) == 0
    text = capsys.readouterr().out
    for word in ("Python", "JAX", "cpu", "memory", "disk", "socket files", "ports", "open files"):
        assert word in text
    assert "ready for training" in text
    tried = ("compiled function", "file was written", "calls get through", "renders", "✓ works")
    for line in text.splitlines():
        assert ("✓" in line) == any(words in line for words in tried), line
    assert re.search(r"· +extra plot +matplotlib [\d.]+, not tried", text)
    assert not list(tmp_path.iterdir()), "what was tried leaves nothing behind"


@pytest.mark.parametrize(
    ("extra", "module", "made"),
    [("classic", "pygame", "rendered a frame"), ("video", "imageio_ffmpeg", "wrote video.mp4")],
)
def test_an_extra_is_ticked_only_if_it_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: str, module: str, made: str
) -> None:
    pytest.importorskip(module)
    monkeypatch.setattr(doctor, "TRIES", {extra: doctor.TRIES[extra]})
    found = {finding.what: finding for finding in extras()}
    assert found[f"extra {extra}"].state == "fine"
    assert made in found[f"extra {extra}"].found
    assert {each.state for each in found.values()} <= {"fine", "untried", "absent"}
    # A package that is installed and broken.
    (tmp_path / f"{module}.py").write_text("raise OSError('libGL.so.1 is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = {finding.what: finding for finding in extras()}[f"extra {extra}"]
    assert broken.state == "hint"
    assert "libGL.so.1 is missing" in broken.found
    assert install_command(extra) in broken.fix


def test_all_suites_and_files_are_tried() -> None:
    suites, files = {"dmc", "atari", "crafter", "minigrid"}, {"video", "tensorboard", "plot"}
    assert suites | files | {"classic"} == set(doctor.TRIES)


def failing(_: object) -> tuple[str, bool]:
    return "libcuda is broken", False


def test_an_attempt_may_fail_hang_or_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TIMEOUT_SECONDS", 1.0)
    assert attempt(lambda: "it works") == ("it works", True)
    assert attempt(lambda: str(1 / 0)) == ("ZeroDivisionError: division by zero", False)
    found, works = attempt(lambda: str(threading.Event().wait()))
    assert (works, found.partition(";")[0]) == (False, "check() did not return within 1 s")
    found, works = attempt(lambda: str(os.kill(os.getpid(), signal.SIGSEGV)))
    assert not works
    assert "The process ended with SIGSEGV in check()" in found


def test_a_jax_that_fails_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "attempt", failing)
    finding = only(jax())
    assert (finding.state, finding.found) == ("problem", "libcuda is broken")
    monkeypatch.setattr(doctor, "_installed", lambda _: True)  # dm-control, which is not everywhere
    assert only(rendering()).state == "hint"
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "attempt", failing)
    assert main(["doctor"]) == 1
    assert "1 problem" in capsys.readouterr().err


def test_a_gpu_that_jax_does_not_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor, "attempt", lambda _: ("0.6 on 1 x cpu", True))
    assert "dreamfleet[cuda]" in only(jax()).fix


def test_little_is_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(doctor, "memory_free", lambda: 1e9)  # also of a container
    found = {each.what: each for each in doctor.machine()}
    assert "ulimit -n" in found["open files"].fix
    assert found["memory"].state == "hint"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=1e9))
    assert only(disk(tmp_path)).state == "hint"


def test_a_disk_that_cannot_be_written_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    assert only(disk(tmp_path)).state in ("fine", "hint")
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    finding = only(disk(tmp_path / "a" / "b"))
    assert finding.state == "problem"
    assert "Read-only file system" in finding.found


def test_sockets_that_carry_nothing_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no sockets here")

    monkeypatch.setattr(doctor, "Server", refuse)
    assert [finding.state for finding in sockets()] == ["problem", "problem"]


def test_an_extra_that_is_missing_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: name != "matplotlib")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.0")
    monkeypatch.setattr(doctor, "TRIES", {})
    found = {finding.what: finding for finding in extras()}
    assert found["extra plot"].found == f"not installed: {install_command('plot')}"
    assert found["extra dmc"].found.startswith("dm-control 1.0, mujoco 1.0")
    assert "extra dev" not in found
    assert "extra ray" in found


def test_rendering_is_tried_with_what_a_run_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dm_control")
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    finding = only(rendering())
    assert finding.state == "hint"
    assert "MUJOCO_GL=nonsense does not work here" in finding.fix


def test_a_screen_that_is_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda _: True)
    monkeypatch.setattr(doctor, "attempt", failing)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("DISPLAY", ":99")
    assert "set MUJOCO_GL to egl" in only(rendering()).fix
