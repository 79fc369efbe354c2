import numpy as np
import pytest
from PIL import Image

from dreamfleet import Space
from dreamfleet.dream.reality import image_of
from dreamfleet.envs import EpisodicEnv, noop, renderer
from dreamfleet.envs.images import resize, side_by_side, to_gray


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
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_every_channel_is_resized_by_itself(source: tuple, target: tuple, channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*source, channels), np.uint8)
    ours = resize(image, target)
    planes = [Image.fromarray(image[..., number]) for number in range(channels)]
    resized = [each.resize(target[::-1], Image.Resampling.BILINEAR) for each in planes]
    theirs = np.stack([np.asarray(each) for each in resized], -1)
    np.testing.assert_array_equal(ours, theirs)


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


class TwoCameras(EpisodicEnv):
    """A large camera in colour, a small one in grey, and a number."""

    def __init__(self) -> None:
        spaces = {"wrist": Space(np.uint8, (2, 2, 1)), "eye": Space(np.uint8, (4, 6, 3))}
        super().__init__({**spaces, "joint": Space(np.float32)}, {"push": Space(np.float32)})

    def _begin(self):
        eye, wrist = np.full((4, 6, 3), 9, np.uint8), np.full((2, 2, 1), 5, np.uint8)
        return {"wrist": wrist, "eye": eye, "joint": np.zeros((), np.float32)}

    def _advance(self, action):
        raise NotImplementedError


def test_all_images_of_an_observation_are_shown() -> None:
    env = TwoCameras()
    obs = env.step(noop(env.act_space))
    frame = image_of(obs)
    assert frame is not None
    assert frame.shape == (4, 6 + 1 + 4, 3)  # a gap, and the small one twice as large
    assert (frame[:, :6] == 9).all()
    assert (frame[:, 6] == 0).all()
    assert (frame[:, 7:] == 5).all()
    shown = renderer(env)(obs)
    assert shown is not None
    assert shown.shape == (4, 4 + 1 + 6, 3)  # in the order of the environment


def test_one_image_is_shown_as_it_is_and_of_a_stack_the_newest() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert side_by_side([image]) is image
    stack = np.stack([image[..., 0], image[..., 1], image[..., 2], 7 * image[..., 0]], -1)
    np.testing.assert_array_equal(side_by_side([stack]), stack[..., 3:])
    assert image_of({"vector": np.zeros(3, np.float32)}) is None
