import numpy as np
import pytest

from dreamfleet import ConfigError, Space
from dreamfleet.spaces import is_frame, is_image, without_logs, without_reset


def test_discrete_spaces_count_their_choices() -> None:
    space = Space(np.int32, (3,), 0, [2, 3, 4])
    assert space.discrete
    assert space.classes.tolist() == [2, 3, 4]
    assert space.contains(np.array([1, 2, 3], np.int32))
    assert not space.contains(np.array([1, 3, 3], np.int32))
    assert not space.contains(np.array([1, 2, 3], np.int64))


def test_bools_have_two_choices() -> None:
    assert Space(bool).classes.tolist() == 2
    assert Space(bool).contains(np.array(True))


def test_continuous_bounds_are_inclusive() -> None:
    space = Space(np.float32, 2, -1, 1)
    assert space.contains(np.array([-1, 1], np.float32))
    assert not space.contains(np.array([0, 1.1], np.float32))
    with pytest.raises(ConfigError, match="continuous"):
        _ = space.classes


@pytest.mark.parametrize(
    "space",
    [
        Space(np.float32, (2, 3), -1, 2),
        Space(np.float32, (4,)),
        Space(np.float32, (), -np.inf, 0),
        Space(np.uint8, (5, 5, 3)),
        Space(np.int32, (2,), 0, [3, 7]),
        Space(bool),
        Space(np.int64),
    ],
    ids=repr,
)
def test_samples_lie_inside(space: Space) -> None:
    rng = np.random.default_rng(0)
    assert all(space.contains(space.sample(rng)) for _ in range(50))


def test_equality_compares_bounds() -> None:
    assert Space(np.int32, (), 0, 5) == Space(np.int32, (), 0, 5)
    assert Space(np.int32, (), 0, 5) != Space(np.int32, (), 0, 6)
    assert len({Space(np.int32, (), 0, 5), Space(np.int32, (), 0, 5)}) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((np.complex64,), "bools, integers or floats"),
        ((np.float32, (0,)), "positive dimensions"),
        ((np.int32, (), 5, 5), "low below high"),
        ((np.float32, (2,), [0, 0, 0]), "does not fit"),
    ],
)
def test_impossible_spaces_are_refused(args: tuple, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Space(*args)


def test_images_have_any_channels_and_frames_can_be_shown() -> None:
    assert is_image(np.uint8, (8, 6, 4))
    assert not is_image(np.float32, (8, 6, 3))
    assert not is_image(np.uint8, (8, 6))
    assert [n for n in range(1, 6) if is_frame(np.uint8, (8, 6, n))] == [1, 3]
    assert not is_frame(np.uint8, (3, 8, 6, 3))


def test_fixed_keys_are_taken_out() -> None:
    assert without_logs({"x": 1, "log/y": 2, "logs": 3}) == {"x": 1, "logs": 3}
    assert without_reset({"action": 1, "reset": True}) == {"action": 1}
