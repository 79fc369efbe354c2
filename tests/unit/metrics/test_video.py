"""MP4 files are whole or not there."""

from pathlib import Path

import numpy as np
import pytest

from dreamfleet.metrics import MetricsError
from dreamfleet.metrics.video import Mp4Writer, write_mp4


def test_a_video_of_odd_grey_frames_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "video.mp4"
    write_mp4(path, np.zeros((3, 31, 17, 1), np.uint8), title="grey")
    data = path.read_bytes()
    assert data[4:8] == b"ftyp"
    assert b"grey" in data
    assert [each.name for each in path.parent.iterdir()] == ["video.mp4"]


def test_an_error_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    def frames():
        yield np.zeros((8, 8, 3), np.uint8)
        yield np.zeros((8, 9, 3), np.uint8)

    with pytest.raises(MetricsError, match=r"follows one of \(8, 8, 3\)"):
        write_mp4(tmp_path / "video.mp4", frames())
    assert list(tmp_path.iterdir()) == []


def test_without_a_frame_there_is_no_file(tmp_path: Path) -> None:
    with Mp4Writer(tmp_path / "video.mp4"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match=r"video\.mp4 cannot be written: .*Invalid"):
        write_mp4(tmp_path / "video.mp4", np.zeros((200, 64, 64, 3), np.uint8), fps=-1)
    assert list(tmp_path.iterdir()) == []
