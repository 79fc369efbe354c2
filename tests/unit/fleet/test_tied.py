"""A program that ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dreamfleet.fleet.tied import tied

PROGRAM = """
import signal, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(sys.argv[1:], sys.stdin.read(), flush=True)
if sys.argv[1] != "short":
    while True:
        time.sleep(1000)
sys.exit(3)
"""
PARENT = """
import subprocess, sys
subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True).wait()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "tied_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "tied_program"


def test_it_runs_as_any_other(program: str) -> None:
    with subprocess.Popen(
        tied([program, "short"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read().strip() == "['short']"
        assert process.wait() == 3


@pytest.mark.parametrize("kind", ["obedient", "stubborn"])
def test_it_ends_when_its_parent_is_killed(program: str, kind: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *tied([program, kind])], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip() == f"['{kind}']"
        parent.send_signal(signal.SIGKILL)
        # The end of what it writes is its end.
        assert parent.stdout.read() == ""
