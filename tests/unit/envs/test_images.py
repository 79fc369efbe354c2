import numpy as np
import pytest
from PIL import Image

from dreamfleet.envs.images import resize, to_gray


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((210, 160), (96, 96)),
        ((210, 160), (64, 64)),
        ((400, 600), (64, 64)),
        ((56, 56), (64, 64)),
        ((17, 31), (40, 8)),
        ((1, 1), (3, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [1, 3])
def test_resizing_equals_pillow(source: tuple, target: tuple, channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*source, channels), np.uint8)
    ours = resize(image, target)
    planes = [Image.fromarray(image[..., number]) for number in range(channels)]
    resized = [each.resize(target[::-1], Image.Resampling.BILINEAR) for each in planes]
    theirs = np.stack([np.asarray(each) for each in resized], -1)
    # Pillow works in fixed point and rounds between its two passes.
    assert np.abs(ours.astype(int) - theirs).max() <= 1


def test_the_same_size_costs_nothing() -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    assert resize(image, (8, 8)) is image


def test_extremes_do_not_wrap_around() -> None:
    image = np.zeros((10, 10, 1), np.uint8)
    image[::2] = 255
    assert set(np.unique(resize(image, (20, 20)))) >= {0, 255}


def test_gray_weighs_the_colours() -> None:
    pixels = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]], np.uint8)
    assert to_gray(pixels)[..., 0].tolist() == [[76, 150, 29, 255]]
