"""What commands print."""

import os
import pty
import subprocess
import sys


def test_output_that_a_closed_terminal_does_not_take_changes_no_exit_code() -> None:
    master, terminal = pty.openpty()
    program = """
import sys
from dreamfleet.cli.console import close_streams
print("ready", flush=True)
sys.stdin.readline()
sys.stdout.write("lost")
close_streams()
sys.exit(130)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=terminal,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
    )
    os.close(terminal)
    assert b"ready" in os.read(master, 100)
    os.close(master)
    process.communicate("\n", 60)
    assert process.returncode == 130
