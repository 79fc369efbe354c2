"""MP4 files are whole or not there."""

import sys
from pathlib import Path

import numpy as np
import pytest

from dreamfleet.metrics import MetricsError, video
from dreamfleet.metrics.lettering import labelled, lettering
from dreamfleet.metrics.video import Mp4Writer, write_mp4, write_video


def test_a_video_of_odd_grey_frames_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "video.mp4"
    write_mp4(path, np.zeros((3, 31, 17, 1), np.uint8), title="grey")
    data = path.read_bytes()
    assert data[4:8] == b"ftyp"
    assert b"grey" in data
    assert [each.name for each in path.parent.iterdir()] == ["video.mp4"]


def test_an_error_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    def frames():
        while not list(tmp_path.iterdir()):  # until the encoder has begun its file
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


def test_letters_can_be_read() -> None:
    rows = ["".join("#" if dot else "." for dot in row) for row in lettering("a7")]
    assert rows == [".#..###.", "#.#...#.", "###...#.", "#.#..#..", "#.#..#.."]
    drawn = {
        letter: lettering(letter).tobytes() for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    }
    assert len(set(drawn.values())) == len(drawn)


def test_a_label_stands_above_the_video() -> None:
    video = np.full((3, 16, 40, 3), 7, np.uint8)
    shown = labelled(video, "step 12")
    assert shown.shape == (3, 25, 40, 3)
    np.testing.assert_array_equal(shown[:, 9:], video)
    np.testing.assert_array_equal(shown[0, 2:7, 2:30, 0] > 0, lettering("step 12"))
    assert labelled(video, "a line that is much too long").shape == (3, 25, 40, 3)
    assert labelled(np.zeros((1, 8, 400, 1), np.uint8), "abc").shape == (1, 32, 400, 1)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_whole_label_of_a_small_film_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    label = "episode/video/image step 12,000"
    films: list[np.ndarray] = []
    monkeypatch.setattr(video, "write_mp4", lambda path, frames, **_: films.append(frames))
    write_video(tmp_path / "x", np.full((3, size, size, 3), 7, np.uint8), label=label)
    (film,) = films
    ink = lettering(label)
    assert film.shape[2] == 128
    np.testing.assert_array_equal(film[0, 2:7, 2 : 2 + ink.shape[1], 0] > 0, ink)
    assert (film[:, 9:] == 7).all()


def test_without_an_encoder_it_is_a_gif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    black = np.zeros((3, 16, 16, 3), np.uint8)
    assert write_video(tmp_path / "a" / "x", black, label="step 1").name == "x.mp4"
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    made = write_video(tmp_path / "b" / "x", black, label="step 1")
    assert made.name == "x.gif"
    assert made.read_bytes()[:6] == b"GIF89a"
    assert [each.name for each in made.parent.iterdir()] == ["x.gif"]
