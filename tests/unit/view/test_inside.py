"""No file outside of a run can be read, whatever its name or the links on the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dreamfleet.view.reading import list_inside, open_inside, read_tail


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "1.mp4").write_text("other")
    run = tmp_path / "run"
    (run / "media" / "key").mkdir(parents=True)
    (run / "media" / "key" / "1.mp4").write_text("video")
    (run / "media" / "linked").symlink_to(tmp_path / "media")
    (run / "media" / "key" / "2.mp4").symlink_to(tmp_path / "secret")
    os.mkfifo(run / "media" / "key" / "3.mp4")
    return run


def test_what_is_inside_is_read(run: Path) -> None:
    with open_inside(run, "media", "key", "1.mp4") as file:
        assert file.read() == b"video"


@pytest.mark.parametrize(
    "names",
    [
        ("..", "secret"),
        ("media", "..", "..", "secret"),
        ("media", "key", "../../../secret"),
        ("media", "key/1.mp4"),
        ("media", "linked", "1.mp4"),
        ("media", "key", "2.mp4"),
        ("media", "key", "3.mp4"),
        ("media", "key"),
        ("", "secret"),
        (".", "media", "key", "1.mp4"),
        ("media", "key", "1.mp4\0"),
        ("/etc/passwd",),
    ],
)
def test_what_is_outside_is_not(run: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(OSError), open_inside(run, *names):  # noqa: PT011 - any of them will do
        pass


def test_lists_leave_links_out(run: Path) -> None:
    assert list_inside(run, "media") == ["key"]
    assert list_inside(run, "media", "key") == ["1.mp4", "3.mp4"]
    for names in (("media", "linked"), ("..",), ("nothing",)):
        assert list_inside(run, *names) == []


def test_a_tail_begins_with_a_whole_line(run: Path) -> None:
    (run / "log").write_bytes(b"first\nsecond\n")
    assert read_tail(run, "log", max_bytes=9) == b"second\n"
    assert read_tail(run, "log", max_bytes=99) == b"first\nsecond\n"
    assert read_tail(run, "media", "key", "2.mp4", max_bytes=9) == b""
