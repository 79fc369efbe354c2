"""Images are recognised however their axes lie, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from dreamfleet import ConfigError, Space
from dreamfleet.envs import EpisodicEnv, Outcome, SpaceError, make_env, noop
from dreamfleet.envs.base import NotFiniteError

U8, F32, INF = np.uint8, np.float32, np.inf


class Camera(gymnasium.Env):
    """Shows samples of its space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: Any) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.observation_space.sample(), 0.0, False, False, {}


class NativeCamera(EpisodicEnv):
    """The same with the native interface."""

    def __init__(self, value: Any, space: Space) -> None:
        super().__init__({"eye": space}, {"action": Space(np.int32, (), 0, 2)})
        self.value = value

    def _begin(self) -> dict:
        return {"eye": self.value}

    def _advance(self, action: Any) -> Outcome:
        return Outcome({"eye": self.value})


def shown(shape: tuple[int, ...], dtype: Any = U8, low: float = 0, high: float = 255) -> Any:
    """A value of such a space, and what makes an environment that shows it."""
    space = spaces.Box(low, high, shape, dtype, seed=3)
    value = space.sample()
    inner = Camera(space)
    inner.reset = lambda **_: (value, {})  # type: ignore[method-assign]
    return value, lambda **options: make_env(lambda: inner, **options)


def stacked(value: Any, *axes: int) -> Any:
    """Height and width to the front, all other axes joined."""
    moved = np.transpose(value, axes)
    return moved.reshape(*moved.shape[:2], -1)


@pytest.mark.parametrize(
    ("shape", "axes", "said"),
    [
        ((3, 64, 64), (1, 2, 0), "channels first (chw)"),
        ((1, 64, 64), (1, 2, 0), "channels first (chw)"),
        ((4, 84, 84), (1, 2, 0), "channels first (chw)"),
        ((12, 84, 84), (1, 2, 0), "channels first (chw)"),
        ((3, 210, 160), (1, 2, 0), "channels first (chw)"),
        ((20, 84, 84), (1, 2, 0), "channels first (chw)"),
        ((4, 84, 84, 1), (1, 2, 0, 3), "a stack of frames (shwc)"),
        ((4, 84, 84, 3), (1, 2, 0, 3), "a stack of frames (shwc)"),
        ((4, 3, 84, 84), (2, 3, 0, 1), "a stack of frames (schw)"),
        ((84, 84, 4, 3), (0, 1, 2, 3), "a stack of frames (hwsc)"),
        ((84, 84), (0, 1), "a gray image (hw)"),
        ((84, 84, 4), (0, 1, 2), ""),
        ((60, 80, 20), (0, 1, 2), ""),
        ((210, 160, 3), (0, 1, 2), ""),
        ((7, 7, 3), (0, 1, 2), ""),
        ((4, 4, 3), (0, 1, 2), ""),
    ],
    ids=str,
)
def test_bytes_are_recognised(shape: tuple, axes: tuple, said: str) -> None:
    value, make = shown(shape)
    env = make()
    image = env.step(noop(env.act_space))["image"]
    np.testing.assert_array_equal(image, stacked(value, *axes))
    assert image.flags.c_contiguous
    assert len(env.notes) == bool(said)
    assert said in "".join(env.notes)
    assert f"becomes uint8 {image.shape}" in "".join(env.notes) or not said


@pytest.mark.parametrize(
    ("shape", "dtype", "low", "high", "axes"),
    [
        ((64, 64, 3), F32, 0, 1, (0, 1, 2)),
        ((3, 64, 48), np.float64, 0, 1, (1, 2, 0)),
        ((64, 64, 3), F32, 0, 255, (0, 1, 2)),
        ((64, 64, 3), np.int64, 0, 255, (0, 1, 2)),
    ],
    ids=str,
)
def test_numbers_become_bytes(
    shape: tuple, dtype: Any, low: float, high: float, axes: tuple
) -> None:
    value, make = shown(shape, dtype, low, high)
    env = make()
    expected = np.rint(stacked(value, *axes).astype(F32) * F32(255 / high)).astype(U8)
    np.testing.assert_array_equal(env.step(noop(env.act_space))["image"], expected)
    assert expected.std() > 50, "neither black nor white"
    assert f"from 0 to {high} and becomes uint8" in env.notes[0]


@pytest.mark.parametrize(
    ("shape", "dtype", "low", "high", "expected"),
    [
        ((10, 12), np.int8, 0, 5, Space(np.int32, (10, 12), 0, 6)),
        ((10, 12), bool, 0, 1, Space(np.int32, (10, 12), 0, 2)),
        ((10, 12), np.int8, -1, 5, Space(F32, (10, 12), -1, 5)),
        ((20, 10), U8, 0, 9, Space(np.int32, (20, 10), 0, 10)),
        ((84, 84), F32, 0, 1, Space(F32, (84, 84), 0, 1)),
        ((84, 84), U8, 0, 1, Space(np.int32, (84, 84), 0, 2)),
        # One-hot codes of all its elements would be a million inputs.
        ((64, 64), np.int64, 0, 255, Space(F32, (64, 64), 0, 255)),
        ((128,), U8, 0, 255, Space(np.int32, (128,), 0, 256)),
    ],
    ids=str,
)
def test_a_matrix_stays_one(
    shape: tuple, dtype: Any, low: float, high: float, expected: Space
) -> None:
    _, make = shown(shape, dtype, low, high)
    env = make()
    assert env.obs_space["vector"] == expected
    assert expected.contains(env.step(noop(env.act_space))["vector"])
    large = len(shape) == 2 and min(shape) > 16
    assert len(env.notes) == large
    assert "taken as a vector; the option image_layout=hw" in "".join(env.notes) or not large


@pytest.mark.parametrize(
    ("shape", "dtype", "low", "high"),
    [
        ((3, 64, 3), U8, 0, 255),
        ((4, 84, 3), U8, 0, 255),
        ((64, 64, 64), U8, 0, 255),
        ((64, 64, 3), F32, -1, 1),
        ((5, 5, 3), F32, 0, 1),
        ((10, 10, 4), bool, 0, 1),
        ((8, 8, 8, 8), U8, 0, 255),
    ],
    ids=str,
)
def test_what_may_be_several_things_is_asked_for(
    shape: tuple, dtype: Any, low: float, high: float
) -> None:
    """And each answer that the question names works."""
    value, make = shown(shape, dtype, low, high)
    with pytest.raises(SpaceError, match="set the option image_layout to ") as asked:
        make()
    sentence = str(asked.value)
    answers = sentence.split("image_layout to ")[1].split(", flat")[0].split(", ")
    assert len(answers) >= 2
    for answer in answers:
        env = make(image_layout=answer)
        order = ["hwsc".index(axis) for axis in answer]
        expected = stacked(value, *np.argsort(order))
        image = env.step(noop(env.act_space))["image"]
        assert image.shape == expected.shape
        scaled = np.rint((expected.astype(F32) - low) * F32(255 / (high - low)))
        np.testing.assert_array_equal(image, expected if dtype is U8 else scaled)
    for answer, expected in (("flat", value.reshape(-1)), ("none", value)):
        env = make(image_layout=answer)
        numbers = env.step(noop(env.act_space))["vector"]
        np.testing.assert_array_equal(numbers, expected)
        assert not env.obs_space["vector"].image
        assert env.notes == []


@pytest.mark.parametrize(
    ("shape", "layout", "words"),
    [
        ((64, 64, 3), "channels_first", r"fits no observation \('vector' with shape \(64"),
        ((64, 64, 3), "hw", "fits no observation"),
        ((64, 64, 3), "rgb", "is not a layout: name each axis by a letter"),
        ((64, 64, 3), "hhw", "is not a layout"),
        ((64, 64, 3), {"image": "hw"}, r"names 2 axes, and observation 'vector' has shape \(64"),
        ((64, 64, 3), {"eye": "hwc"}, "names an observation 'eye', and there is only vector"),
        ((64, 64, 3), 3, "image_layout=3 is not valid"),
    ],
)
def test_wrong_answers_are_refused(shape: tuple, layout: Any, words: str) -> None:
    _, make = shown(shape)
    with pytest.raises(ConfigError, match=words):
        make(image_layout=layout)


def test_an_image_needs_bounds() -> None:
    _, make = shown((64, 64, 3), F32, -INF, INF)
    with pytest.raises(SpaceError, match="no bounds for black and white, so it cannot be an image"):
        make(image_layout="hwc")


def test_the_answer_may_be_by_key_and_overrules() -> None:
    box = spaces.Box(0, 255, (4, 64, 64), U8)
    inner = Camera(spaces.Dict({"left": box, "right": box, "x": spaces.Box(0, 1, (16, 16))}))
    env = make_env(lambda: inner, image_layout={"left": "flat", "x": "hw"}, size=(32, 16))
    shapes = {key: space.shape for key, space in env.obs_space.items()}
    assert shapes["left"] == (4 * 64 * 64,)
    assert shapes["right"] == (32, 16, 4), "what was recognised is resized, with its channels"
    assert shapes["x"] == (32, 16, 1)
    obs = env.step(noop(env.act_space))
    assert obs["right"].shape == (32, 16, 4)
    assert env.obs_space["left"].dtype == F32, "as many one-hot codes would be 4 million inputs"
    everywhere = make_env(lambda: inner, image_layout="chw")
    assert everywhere.obs_space["left"].shape == (64, 64, 4)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.full((64, 64, 3), 7.0), "runs from 7 to 7, and its space says 0 to 1"),
        (np.full((64, 64, 3), -0.5), "runs from -0.5 to -0.5"),
        (np.full((64, 64, 3), np.nan), "holds NaN or infinity"),
        (np.full((64, 64, 3), np.inf), "holds NaN or infinity"),
        (np.zeros((3, 64, 64)), r"has shape \(3, 64, 64\), but its space says \(64, 64, 3\)"),
    ],
    ids=str,
)
def test_values_that_are_no_image_are_named(value: Any, words: str) -> None:
    _, make = shown((64, 64, 3), F32, 0, 1)
    env = make()
    env.env.env.reset = lambda **_: (value, {})
    with pytest.raises(SpaceError, match=f"Observation 'image' {words}") as caught:
        env.step(noop(env.act_space))
    # What a run does then is a setting.
    assert isinstance(caught.value, NotFiniteError) == ("NaN" in words)


def test_native_environments_are_arranged_too() -> None:
    """What may be several layouts is as native environments should have it."""
    value = np.arange(4 * 64 * 64, dtype=U8).reshape(4, 64, 64)
    env = make_env(lambda: NativeCamera(value, Space(U8, (4, 64, 64))), size=(64, 64))
    np.testing.assert_array_equal(env.step(noop(env.act_space))["eye"], stacked(value, 1, 2, 0))
    assert "channels first (chw)" in env.notes[0]
    gray = make_env(lambda: NativeCamera(value[0], Space(U8, (64, 64))))
    assert gray.step(noop(gray.act_space))["eye"].shape == (64, 64, 1)
    bright = make_env(
        lambda: NativeCamera(np.ones((64, 64, 3)), Space(np.float64, (64, 64, 3), 0, 1))
    )
    assert bright.step(noop(bright.act_space))["eye"].min() == 255
    odd = NativeCamera(np.zeros((3, 64, 3), U8), Space(U8, (3, 64, 3)))
    assert make_env(lambda: odd).obs_space["eye"] == Space(U8, (3, 64, 3))
    flat = make_env(lambda: odd, image_layout="flat")
    assert flat.step(noop(flat.act_space))["eye"].shape == (3 * 64 * 3,)
    kept = make_env(lambda: odd, image_layout="none")
    assert kept.obs_space["eye"] == Space(F32, (3, 64, 3), 0, 255), "numbers that are no image"
    assert kept.step(noop(kept.act_space))["eye"].dtype == F32
    twice = make_env(lambda: make_env(lambda: NativeCamera(value, Space(U8, (4, 64, 64)))))
    assert twice.obs_space["eye"].shape == (64, 64, 4)
    with pytest.raises(SpaceError, match="which may or may not be an image: set the option"):
        make_env(lambda: NativeCamera(np.ones((2, 2, 2)), Space(F32, (2, 2, 2))))


def test_suites_need_no_answer() -> None:
    with pytest.raises(ConfigError, match="bundled:catch has no option 'image_layout'"):
        make_env("bundled:catch", image_layout="chw")
    with pytest.raises(ConfigError, match="fits no observation"):
        make_env("gym:CartPole-v1", image_layout="chw")
