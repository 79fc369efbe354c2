"""What a process of the local launcher is given."""

import resource
from functools import partial
from pathlib import Path

from launcher_parts import LONG, note_files

from dreamfleet.fleet.launchers import Worker
from dreamfleet.fleet.launchers.local import LocalLauncher


def test_a_worker_may_open_as_many_files_as_the_machine_allows(tmp_path: Path) -> None:
    """A shell often allows 1,024, and a thousand environments that join are as many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    worker = Worker("agent", "agent", partial(note_files, tmp_path / "files"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2 if hard > 0 else 1024, hard))
    try:
        with LocalLauncher(tmp_path) as launcher:
            launcher.prepare([worker])
            assert launcher.start(worker).wait(LONG) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert int((tmp_path / "files").read_text()) == hard
