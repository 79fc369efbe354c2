"""A replay on disk several times larger than the memory its process may use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds memory as Linux does")

# 64 KB a step and 256 MB in all, in a process that may have 48 MB more than it starts with. Pages
# of mapped files do not count: the kernel takes them back when it needs the memory. Everything that
# it cannot take back does count, and asking for more of it fails.
PROGRAM = """
import re, resource, sys
from pathlib import Path
import numpy as np
from dreamfleet.replay import Replay, Selector, StorageFullError

STEPS, WIDTH, MORE, LENGTH = 4096, 65536, 48 << 20, 4
directory = sys.argv[1] or None


def status(name):
    return 1024 * int(re.search(name + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])


def expected(tags):
    return np.repeat((tags % 251).astype(np.uint8)[..., None], 64, -1)


def check(replay, first, last):
    seen = []
    while len(seen) < len(replay):
        data = replay.sample(min(32, len(replay) - len(seen)))
        assert (data["wide"][..., ::1024] == expected(data["tag"])).all()
        assert (np.diff(data["tag"]) == 1).all()
        seen += data["tag"][:, 0].tolist()
        del data
    assert seen == list(range(first, last - LENGTH + 1)), (seen[0], seen[-1])


class OldestFirst(Selector):
    def __init__(self):
        self.next = 0

    def draw(self, request):
        numbers = (self.next + np.arange(request.count)) % (request.high - request.low)
        self.next = int(numbers[-1]) + 1
        return request.low + numbers


def open_replay():
    return Replay(LENGTH, 10**6, directory, chunk=64, online=False, selector=OldestFirst())


allowed = status("VmData") + MORE
start = status("RssAnon")
_, most = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (allowed, most))
replay, added = open_replay(), 0
try:
    while added < STEPS:
        tags = np.arange(added, added + 16)
        wide = np.repeat((tags % 251).astype(np.uint8)[:, None], WIDTH, 1)
        added += replay.add_batch({"tag": tags, "wide": wide}, [0] * 16)
except StorageFullError as error:
    assert directory is None and "refused to map" in str(error), error
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # A batch needs memory of its own.
    check(replay, 0, added)
    sys.exit(7)
assert replay.stats()["disk_bytes"] > 5 * MORE
check(replay, 0, STEPS)
replay.close()
replay = open_replay()
check(replay, 0, STEPS)
data = replay.sample(8, "report")
assert replay.update({"stepid": data["stepid"], "tag": data["tag"]}) == 8 * LENGTH
assert status("RssAnon") - start < MORE
replay.close()
"""


def run(directory: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, directory], check=False, capture_output=True, text=True
    )


def test_a_replay_on_disk_may_be_larger_than_memory(tmp_path: Path) -> None:
    """It is filled, sampled, closed, opened again, sampled and updated within the bound."""
    done = run(str(tmp_path / "replay"))
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_replay_in_memory_says_when_it_is_full() -> None:
    """The same bound does bite, and what was stored by then stays readable."""
    done = run("")
    assert done.returncode == 7, done.stderr[-3000:]
