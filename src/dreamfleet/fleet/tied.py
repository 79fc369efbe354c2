"""A Python program that ends with the process that started it, also if that was killed.

`python -m dreamfleet.fleet.tied MODULE ARGUMENTS` does what `python -m MODULE ARGUMENTS` does. Its
standard input is a pipe that the parent holds. When the pipe ends, the program gets SIGTERM, and
after two seconds it is killed with all that it has started.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence

_GRACE_SECONDS = 2.0


def tied(module: Sequence[str]) -> list[str]:
    """The command for a module with arguments, to be started with `stdin=PIPE` and
    `start_new_session=True`."""
    # -P: the current directory may be a run of others, and what it holds is not imported.
    # -u: an error stands behind what was printed before it, also in a file.
    return [sys.executable, "-uP", "-m", __name__, *module]


def main() -> None:
    """What the process does."""
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with_parent, args=[pipe], name="parent", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_parent(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
