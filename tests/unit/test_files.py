"""Files are replaced whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dreamfleet import files
from dreamfleet.files import atomic_rename, atomic_write


def test_content_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    atomic_write(path, "text", mode=0o600)
    assert path.read_text() == "text"
    assert path.stat().st_mode & 0o777 == 0o600
    atomic_write(path, b"bytes")
    assert path.read_bytes() == b"bytes"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    atomic_write(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_complete_file_or_directory_gets_its_name(tmp_path: Path) -> None:
    (tmp_path / ".part").write_text("new")
    (tmp_path / "file").write_text("old")
    atomic_rename(tmp_path / ".part", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "new"
    (tmp_path / ".folder").mkdir()
    atomic_rename(tmp_path / ".folder", tmp_path / "folder")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


HOLDS_A_FOLDER = """
import sys
from pathlib import Path
from dreamfleet.files import temporary_folder

with temporary_folder("held-") as folder:
    (folder / "file").write_text("something")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_temporary_folder_is_removed_also_if_its_process_is_killed(
    tmp_path: Path, killed: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_FOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "file").read_text() == "something"
        if killed:
            process.kill()
        process.stdin.close()
        process.wait()
    deadline = time.monotonic() + 120
    while folder.exists():
        assert killed, "it is gone when the block ends"
        assert time.monotonic() < deadline
        time.sleep(0.01)
