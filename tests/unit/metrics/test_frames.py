"""Frames become files that are complete or not there, and labels that can be read."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dreamfleet.metrics import MetricsError, frames
from dreamfleet.metrics.frames import (
    Mp4Writer,
    contact_sheet,
    encode_gif,
    encode_png,
    labelled,
    write_mp4,
    write_video,
)


@pytest.mark.parametrize("shape", [(5, 7, 3), (64, 64, 3), (9, 4, 1), (1, 1, 3)])
def test_png_is_lossless(shape: tuple) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    decoded = np.asarray(Image.open(io.BytesIO(encode_png(image)))).reshape(shape)
    np.testing.assert_array_equal(decoded, image)


def colourful(count: int, height: int, width: int, channels: int) -> np.ndarray:
    """Smooth gradients that move."""
    time, row, column = np.meshgrid(*map(np.arange, (count, height, width)), indexing="ij")
    ramps = [255 * row // height, 255 * column // width, 40 * time % 256]
    return np.stack(ramps[:channels], -1).astype(np.uint8)


@pytest.mark.parametrize("shape", [(3, 5, 7, 3), (4, 64, 64, 3), (1, 1, 1, 3)])
def test_gif_keeps_frames_and_nearly_the_colours(shape: tuple) -> None:
    video = colourful(*shape)
    decoded = Image.open(io.BytesIO(encode_gif(video, fps=10)))
    assert decoded.n_frames == shape[0]
    assert decoded.size == (shape[2], shape[1])
    for number in range(shape[0]):
        decoded.seek(number)
        frame = np.asarray(decoded.convert("RGB")).astype(int)
        assert np.abs(frame - video[number]).max() <= 26
    if shape[0] > 1:
        assert decoded.info["duration"] == 100
        assert decoded.info["loop"] == 0


def test_gif_is_exact_where_there_are_few_colours() -> None:
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (3, 30, 40, 1), np.uint8)
    few = rng.integers(0, 256, (60, 3), np.uint8)[rng.integers(0, 60, (3, 30, 40))]
    for video in (grey, few):
        decoded = Image.open(io.BytesIO(encode_gif(video)))
        for number, frame in enumerate(video):
            decoded.seek(number)
            shown = np.asarray(decoded.convert("RGB"))
            np.testing.assert_array_equal(shown, np.broadcast_to(frame, shown.shape))


def test_black_and_white_stay_black_and_white() -> None:
    video = np.zeros((2, 4, 4, 3), np.uint8)
    video[1] = 255
    decoded = Image.open(io.BytesIO(encode_gif(video)))
    decoded.seek(1)
    assert np.asarray(decoded.convert("RGB")).min() == 255


def test_a_contact_sheet_shows_all_frames_in_order() -> None:
    frames = [np.full((4, 6, 3), value, np.uint8) for value in (10, 20, 30, 40, 50)]
    sheet = contact_sheet(frames, gap=1)
    assert sheet.shape == (2 * 5 + 1, 3 * 7 + 1, 3)
    centers = [
        [int(sheet[2 + 5 * row, 3 + 7 * column, 0]) for column in range(3)] for row in (0, 1)
    ]
    assert centers == [[10, 20, 30], [40, 50, 128]]


def test_a_contact_sheet_takes_gray_frames() -> None:
    assert contact_sheet([np.full((4, 4, 1), 9, np.uint8)]).shape == (8, 8, 3)


def test_a_video_of_odd_grey_frames_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "video.mp4"
    write_mp4(path, np.zeros((3, 31, 17, 1), np.uint8), title="grey")
    data = path.read_bytes()
    assert data[4:8] == b"ftyp"
    assert b"grey" in data
    assert [each.name for each in path.parent.iterdir()] == ["video.mp4"]


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
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


def ink(image: np.ndarray) -> np.ndarray:
    return image[..., 0] > 64


def test_letters_can_be_told_apart() -> None:
    frame = np.zeros((4, 64, 3), np.uint8)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHJKLMNOPQRSTUVWXYZ0123456789 .,:/-_=+%()"
    drawn = {letter: labelled(frame, letter)[:-4].tobytes() for letter in letters}
    assert len(set(drawn.values())) == len(letters)


def test_a_label_stands_above_the_frame() -> None:
    for shape in ((16, 40, 3), (8, 600, 1), (64, 64, 3)):
        frame = np.full(shape, 7, np.uint8)
        shown = labelled(frame, "step 12")
        assert shown.dtype == np.uint8
        height = shown.shape[0] - shape[0]
        np.testing.assert_array_equal(shown[height:], frame)
        assert ink(shown[:height]).any()
        assert not ink(shown[: height : height - 1]).any(), "letters keep to the middle"
        for text in ("step 13", "a line that is much too long for any of them" * 9, ""):
            assert labelled(frame, text).shape == shown.shape, "the text of a video may change"


@pytest.mark.parametrize("size", [24, 32, 64, 200])
def test_the_whole_label_of_a_small_video_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    label = "episode/video/image step 12,000"
    videos: list[np.ndarray] = []
    monkeypatch.setattr(
        frames, "write_mp4", lambda path, shown, **_: videos.append(np.stack(list(shown)))
    )
    write_video(tmp_path / "x", np.full((3, size, size, 3), 7, np.uint8), label=label)
    (video,) = videos
    height = video.shape[1] - video.shape[2]
    written = ink(video[0, :height])
    assert written.any()
    assert not written[:, -2:].any(), "it ends before the frame does"
    shorter = labelled(video[0, height:], label[:-1])[:height]
    assert (ink(shorter) != written).any(), "the last letter is there"
    assert (video[:, height:] == 7).all()


def test_without_an_encoder_it_is_a_gif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    black = np.zeros((3, 16, 16, 3), np.uint8)
    assert write_video(tmp_path / "a" / "x", black, label="step 1").name == "x.mp4"
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    made = write_video(tmp_path / "b" / "x", black, label="step 1")
    assert made.name == "x.gif"
    assert made.read_bytes()[:6] == b"GIF89a"
    assert [each.name for each in made.parent.iterdir()] == ["x.gif"]


def test_pillow_is_loaded_where_frames_are_made_only() -> None:
    code = "import sys, dreamfleet.metrics.frames, dreamfleet.envs; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
