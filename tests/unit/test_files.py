"""Files are replaced whole; counters survive kills and notice damage."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dreamfleet import files
from dreamfleet.errors import DreamfleetError
from dreamfleet.files import (
    COUNTER_WORDS,
    DurableCounters,
    Words,
    atomic_rename,
    atomic_write,
    folder_aside,
    map_words,
)


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


# --- counters in a mapped file -------------------------------------------------------------------


def words(count: int = 2) -> Words:
    return np.zeros(count * COUNTER_WORDS, np.uint64)


def test_what_was_set_last_is_read() -> None:
    file = words()
    numbers = DurableCounters(file)
    assert numbers.values == [None, None]
    for value in (0, 5, -7, (1 << 63) - 1, -(1 << 63), 3):
        numbers.set(1, value)
        again = DurableCounters(file)
        assert again.values == [None, value]
        assert again.doubtful == [False, False]


def test_killed_between_any_two_stores() -> None:
    """Either the new value or the one before is read."""
    file = words(1)
    numbers = DurableCounters(file)
    numbers.set(0, 10)
    numbers.set(0, 11)
    before = file.copy()
    numbers.set(0, 12)
    changed = np.flatnonzero(file != before).tolist()
    assert len(changed) == 3
    for count in range(4):
        part = before.copy()
        part[changed[:count]] = file[changed[:count]]  # the order in which they are stored
        read = DurableCounters(part)
        assert read.values == [12 if count == 3 else 11]
        assert read.doubtful == [0 < count < 3]


@pytest.mark.parametrize("salt", [0, 1 << 60])
def test_any_changed_bit_is_noticed(salt: int) -> None:
    file = words(1)
    numbers = DurableCounters(file, salt)
    for value in (41, 42):
        numbers.set(0, value)
    for word in range(COUNTER_WORDS):
        for bit in range(64):
            damaged = file.copy()
            damaged[word] ^= np.uint64(1 << bit)
            read = DurableCounters(damaged, salt)
            assert read.doubtful == [True]
            assert read.values == [42 if word < COUNTER_WORDS // 2 else 41]


@pytest.mark.parametrize("times", [2, 3, 4])
def test_a_copy_that_is_zeroed_is_noticed(times: int) -> None:
    file = words(1)
    numbers = DurableCounters(file)
    for value in range(times):
        numbers.set(0, value)
    newest = 0 if times % 2 else 1
    for copy in range(2):
        damaged = file.copy().reshape(2, -1)
        damaged[copy] = 0
        read = DurableCounters(damaged.reshape(-1))
        assert read.values == [times - 2 if copy == newest else times - 1]
        # One that was set only once has a copy that was never used.
        assert read.doubtful == [read.values != [0]]


def test_words_of_another_file_are_no_numbers() -> None:
    file = words(1)
    DurableCounters(file, salt=1).set(0, 9)
    assert DurableCounters(file, salt=2).values == [None]
    assert DurableCounters(np.full(COUNTER_WORDS, 0x5A5A5A5A5A5A5A5A, np.uint64)).values == [None]


def test_a_number_goes_on_after_damage() -> None:
    file = words(1)
    numbers = DurableCounters(file)
    for value in (1, 2):
        numbers.set(0, value)
    file[0] ^= np.uint64(1)
    numbers = DurableCounters(file)
    numbers.set(0, 3)
    assert DurableCounters(file).values == [3]
    assert DurableCounters(file).doubtful == [False]


def test_a_file_of_numbers_has_its_room_on_the_disk(tmp_path: Path) -> None:
    """Otherwise a full disk kills the process when it sets one (SIGBUS)."""
    path, size = tmp_path / "numbers", 8 * 1024
    map_words(path, 1024).close()
    assert 512 * path.stat().st_blocks >= size
    path.unlink()
    path.touch()
    os.truncate(path, size)  # as an older version made it
    map_words(path, 1024).close()
    assert 512 * path.stat().st_blocks >= size


def test_a_full_disk_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DreamfleetError, match=r"numbers \(No space left on device\): free disk"):
        map_words(tmp_path / "numbers", COUNTER_WORDS)


def test_a_folder_made_aside_is_complete_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder"
    with pytest.raises(FileNotFoundError), folder_aside(target) as made:
        (made / "nowhere" / "file").touch()
    assert list(target.parent.iterdir()) == []
    for text in ("first", "second"):  # the first wins
        with folder_aside(target) as made:
            (made / "file").write_text(text)
            assert text == "second" or not target.exists()
    assert [each.name for each in target.parent.iterdir()] == ["folder"]
    assert (target / "file").read_text() == "first"


def test_writers_with_the_same_process_id_do_not_disturb_each_other(tmp_path: Path) -> None:
    """As in containers that share a directory."""
    target = tmp_path / "folder"
    with folder_aside(target) as made:
        (made / "1").touch()
        (made / "2").touch()
        with folder_aside(tmp_path / "folder") as other:
            (other / "1").touch()
            # The first one is done before the other.
            assert {each.name for each in made.iterdir()} == {"1", "2"}
            (other / "2").touch()
    assert sorted(each.name for each in target.iterdir()) == ["1", "2"]
