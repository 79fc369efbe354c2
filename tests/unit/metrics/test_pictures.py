import io

import numpy as np
import pytest

from dreamfleet.metrics.pictures import contact_sheet, encode_gif, encode_png

PIL = pytest.importorskip("PIL.Image", reason="Pillow reads the pictures back")


@pytest.mark.parametrize("shape", [(5, 7, 3), (64, 64, 3), (9, 4, 1), (1, 1, 3)])
def test_png_is_lossless(shape: tuple) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    decoded = np.asarray(PIL.open(io.BytesIO(encode_png(image)))).reshape(shape)
    np.testing.assert_array_equal(decoded, image)


@pytest.mark.parametrize("shape", [(3, 5, 7, 3), (4, 64, 64, 3), (2, 30, 40, 1), (1, 1, 1, 3)])
def test_gif_keeps_frames_and_nearly_the_colours(shape: tuple) -> None:
    video = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    decoded = PIL.open(io.BytesIO(encode_gif(video, fps=10)))
    assert decoded.n_frames == shape[0]
    assert decoded.size == (shape[2], shape[1])
    for number in range(shape[0]):
        decoded.seek(number)
        frame = np.asarray(decoded.convert("RGB")).astype(int)
        # Half a step between the six levels of red and blue.
        assert np.abs(frame - video[number]).max() <= 26
    if shape[0] > 1:
        assert decoded.info["duration"] == 100
        assert decoded.info["loop"] == 0


def test_black_and_white_stay_black_and_white() -> None:
    video = np.zeros((2, 4, 4, 3), np.uint8)
    video[1] = 255
    decoded = PIL.open(io.BytesIO(encode_gif(video)))
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
