"""`python -m dreamfleet.view LOGDIR`: the page of `dreamfleet train --view`.

It prints its address, and ends when its standard input does: with the process that started it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from dreamfleet.view.app import Address, serve


def _end_with_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)


def _say(address: Address) -> None:
    print(address.url, flush=True)  # noqa: T201 - read by the parent
    threading.Thread(target=_end_with_input, name="parent", daemon=True).start()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), ready=_say)
