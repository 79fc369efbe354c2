"""Runs that are ended at awkward moments; `tests/ends.py` is the long version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ENDS = Path(__file__).parents[1] / "ends.py"


def test_a_run_ends_in_order_while_it_saves_and_while_others_are_away() -> None:
    """The replay is killed right before the end, then the end comes while a checkpoint is written,
    then the logger is killed, then the replay is stopped: all is saved, in time, and nothing is
    left behind."""
    command = [sys.executable, str(ENDS), "--ends", "4", "--dreamer", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 of 4 ends were in order" in ended.stdout
