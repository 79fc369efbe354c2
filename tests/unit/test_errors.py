"""The command that a message tells works where it is read."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from dreamfleet.errors import install_command


def command(monkeypatch: pytest.MonkeyPatch, pip: Path | None, *, installed: bool) -> str:
    monkeypatch.setattr(shutil, "which", lambda _: pip and str(pip))
    found = importlib.util.find_spec("sys") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    return install_command("dmc")


def test_the_extra_goes_to_the_interpreter_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    short, whole = "pip install 'dreamfleet[dmc]'", f"{sys.executable} -m pip install"
    mine, other = Path(sys.executable).with_name("pip"), Path("/usr/bin/pip")
    assert command(monkeypatch, mine, installed=True) == short
    assert command(monkeypatch, other, installed=True) == f"{whole} 'dreamfleet[dmc]'"
    assert command(monkeypatch, None, installed=True) == f"{whole} 'dreamfleet[dmc]'"
    assert command(monkeypatch, other, installed=False) == short
