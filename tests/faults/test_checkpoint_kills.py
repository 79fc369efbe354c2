"""A process that is killed while it saves leaves the old checkpoint or the new one, never less."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from dreamfleet.checkpoint import Checkpoint, read_checkpoint

# Saves checkpoint 2 and kills itself at the n-th system call Python makes on the way: opening,
# making, renaming and removing files and directories. Whether the data was synced cannot be seen
# from a killed process (the kernel keeps what was written), so syncs are counted as points too.
CHILD = """
import os, signal, sys
import numpy as np
from dreamfleet.checkpoint import Checkpoint

directory, deadly = sys.argv[1], int(sys.argv[2])
points = 0

def point():
    global points
    points += 1
    if points == deadly:
        os.kill(os.getpid(), signal.SIGKILL)

def hook(event, args):
    if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
        point()
    elif event == "open" and str(args[0]).startswith(directory):
        point()

fsync = os.fsync
def synced(descriptor):
    point()
    fsync(descriptor)
    point()

os.fsync = synced
state = {"w": np.full(1000, 2.0), "n": 2}
ckpt = Checkpoint(directory)
sys.addaudithook(hook)
ckpt.save({"agent": state, "limiter": {"n": 2}}, step=2)
point()
print(points, flush=True)
"""


def save_and_die(directory: Path, deadly: int) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(directory), str(deadly)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_kill_at_any_point_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    ckpt = Checkpoint(tmp_path / "count")
    ckpt.save({"agent": {"w": np.full(1000, 1.0), "n": 1}, "limiter": {"n": 1}}, step=1)
    counted = save_and_die(tmp_path / "count", 0)
    assert counted.returncode == 0, counted.stderr
    points = int(counted.stdout)
    assert points > 15

    seen = []
    for deadly in range(1, points + 1):
        directory = tmp_path / str(deadly)
        ckpt = Checkpoint(directory)
        ckpt.save({"agent": {"w": np.full(1000, 1.0), "n": 1}, "limiter": {"n": 1}}, step=1)
        assert save_and_die(directory, deadly).returncode == -signal.SIGKILL
        snapshot = ckpt.load()
        step = snapshot.step
        assert (snapshot.parts["agent"]["w"] == step).all()
        assert snapshot.parts["agent"]["n"] == snapshot.parts["limiter"]["n"] == step
        seen.append(step)
        for path in directory.glob("[!.]*"):
            read_checkpoint(path)  # what has a name is whole, also what is being removed
        # The next process goes on as if nothing had happened, and tidies up.
        ckpt.save({"agent": {}}, step=3)
        assert [path.name[6:] for path in directory.iterdir()] == ["-step-000000000003"]
    assert seen == sorted(seen), "once the new one is there it stays"
    assert set(seen) == {1, 2}
