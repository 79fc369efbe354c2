"""Kills a writing process again and again, and audits the directory after each kill.

Run as `replay_kill_driver.py DIRECTORY KILLS`. Prints the number of kills, and how many of them hit
a batch that was stored but not yet acknowledged. A process of its own, because it forks.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

from replay_history import History, add, audit, open_replay

_ACK = struct.Struct("<q")


def write_until_killed(directory: Path, history: History, number: int, pipe: int) -> None:
    """Add batches, acknowledging each; some of them make chunks, some evict."""
    replay = open_replay(directory)
    os.write(pipe, _ACK.pack(-1))
    while True:
        add(replay, history, number)
        os.write(pipe, _ACK.pack(number))
        number += 1
        if number % 3 == 0 and len(replay):
            data = replay.sample(2)
            replay.update({"stepid": data["stepid"], "state": data["state"]})


def main(directory: Path, kills: int) -> tuple[int, int]:
    rng = random.Random(0)
    history = History()
    held = inside = 0
    for _ in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                write_until_killed(directory, history, held, writer)
            finally:
                os._exit(1)
        os.close(writer)
        os.read(reader, _ACK.size)
        deadline = time.perf_counter() + rng.uniform(0, 0.005)
        while time.perf_counter() < deadline:
            pass
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        acks = b""
        while data := os.read(reader, 1 << 16):
            acks += data
        os.close(reader)
        if acks:
            held = _ACK.unpack(acks[-_ACK.size :])[0] + 1
        with open_replay(directory) as replay:
            stored = replay._journal.newest("writer")
            inside += stored is not None and stored + 1 > held
            held = audit(replay, history, held)
    return kills, inside


if __name__ == "__main__":
    counts = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write(f"{counts[0]} {counts[1]}\n")
