"""What a process of the fleet runs: `python -m dreamfleet.fleet.child`, told by its parent what
to do over its standard input.

A line of JSON comes first (where modules are found, the process title), then a function pickled
by cloudpickle. The pipe stays open; when it ends, the parent is gone and the child ends too, so
that nothing is left behind even when the parent is killed.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
from io import FileIO

import cloudpickle
import setproctitle

_GRACE = 10.0


def main() -> None:
    # Ctrl-C reaches every process of a terminal at once; the parent decides who ends when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    # Unbuffered: a thread that waits in a buffered reader cannot be left behind at the end.
    pipe = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    header = json.loads(pipe.readline())
    sys.path[:] = header["path"]
    setproctitle.setproctitle(header["title"])
    function = cloudpickle.loads(_read(pipe, header["bytes"]))
    threading.Thread(target=_end_with_parent, args=[pipe], name="parent", daemon=True).start()
    function()


def _read(pipe: FileIO, size: int) -> bytes:
    parts = []
    while size:
        part = pipe.read(size)
        if not part:
            sys.exit("The parent was gone before it said what to do.")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _end_with_parent(pipe: FileIO) -> None:
    pipe.read(1)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE)
    os._exit(1)


if __name__ == "__main__":
    main()
