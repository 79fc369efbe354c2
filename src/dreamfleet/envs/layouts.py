"""Which observations are images, the order of their axes, and what becomes of other arrays.

Agents take images as uint8 (height, width, channels). Environments also have them with the channels
first, as a stack of frames, gray without an axis for channels, or as floats from 0 to 1. A *layout*
names the axes: `hwc`, `chw`, `hw`, `shwc` (s for the frames of a stack) and so on. An observation
that is no image is `none`, which keeps its shape, or `flat`, which makes it a vector.

An array of bytes, or of numbers from 0 to 255 or floats from 0 to 1, is an image if height and
width are longer than its other axes, and at least 16 (bytes may be a smaller square). Anything else
with three axes or more needs the option `image_layout`, for all observations or by key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import NotFiniteError
from dreamfleet.errors import ConfigError
from dreamfleet.spaces import Space, SpaceError, without_logs

NONE, FLAT = "none", "flat"
Asked = str | Mapping[str, str] | None
"""The option `image_layout`."""
Read = Callable[[Any], NDArray[Any]]
"""Converts an observation or an action."""

UINT8 = np.dtype(np.uint8)
# The agent gets an integer vector as one-hot codes, unless an element has more choices than this,
# or all its codes together are longer.
MOST_CLASSES = 256
_MOST_INPUTS = 32_768

_LEAST_SIDE = 16
# Layouts by number of axes, and the axis of the height in them; the width follows.
_PLACES = {3: {"hwc": 0, "chw": 1}, 4: {"hwsc": 0, "shwc": 1, "schw": 2}}
_OPTION = "the option image_layout"
_LETTERS = "name each axis by a letter"


class Box(NamedTuple):
    """An array as an environment declares it; both bounds are inclusive."""

    key: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    low: NDArray[Any]
    high: NDArray[Any]

    @property
    def range(self) -> tuple[float, float]:
        """The one smallest and the one largest value; NaN if elements differ."""
        if self.dtype.kind == "b":
            return 0.0, 1.0
        low, high = (
            float(bound.flat[0]) if np.all(bound == bound.flat[0]) else np.nan
            for bound in (self.low, self.high)
        )
        return low, high


@dataclass(frozen=True)
class Layout:
    """How an observation becomes an image."""

    key: str
    axes: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: float
    high: float
    """The values of black and white; uint8 is taken as it is."""

    @cached_property
    def image(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        size = dict(zip(self.axes, self.shape, strict=True))
        return size["h"], size["w"], size.get("c", 1) * size.get("s", 1)

    @cached_property
    def plain(self) -> bool:
        """Whether the environment already has it as agents take it."""
        return self.axes == "hwc" and self.dtype == np.uint8

    @property
    def note(self) -> str:
        """What was recognised; empty if nothing is changed."""
        if self.plain:
            return ""
        what = {"hwc": "an image", "chw": "an image with the channels first (chw)"}.get(self.axes)
        what = what or ("a stack of frames" if "s" in self.axes else "a gray image")
        axes = "" if "c" in self.axes and len(self.axes) == 3 else f" ({self.axes})"
        scaled = "" if self.dtype == np.uint8 else f" from {self.low:g} to {self.high:g}"
        return (
            f"Observation {self.key!r}, {self.dtype} {self.shape}, is taken as {what}{axes}{scaled}"
            f" and becomes uint8 {self.image}; {_OPTION} changes that."
        )

    def __call__(self, value: Any) -> NDArray[np.uint8]:
        array = np.asarray(value)
        if self.plain:
            return as_dtype(self.key, array, UINT8)
        lead = array.ndim - len(self.shape)  # a batch has a leading axis
        if array.shape[max(0, lead) :] != self.shape:
            raise SpaceError(
                f"Observation {self.key!r} has shape {array.shape}, but its space says "
                f"{self.shape}: correct the space or the value."
            )
        is_bytes = self.dtype == UINT8
        pixels = as_dtype(self.key, array, UINT8) if is_bytes else self._brightness(array)
        ordered = pixels.transpose(*range(lead), *(lead + axis for axis in self._order))
        image = np.empty(ordered.shape, np.uint8)
        # Channel by channel: that is four times faster than all at once.
        for channel in np.ndindex(ordered.shape[lead + 2 :]):
            image[(..., *channel)] = ordered[(..., *channel)]
        return image.reshape(*array.shape[:lead], *self.image)

    @cached_property
    def _order(self) -> list[int]:
        return sorted(range(len(self.axes)), key=lambda axis: "hwsc".index(self.axes[axis]))

    def _brightness(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        scale = 255 / (self.high - self.low)
        bright = np.rint((array.astype(np.float32) - np.float32(self.low)) * np.float32(scale))
        # NaN compares false.
        if not (np.min(bright) >= 0 and np.max(bright) <= 255):
            if not np.all(np.isfinite(bright)):
                raise NotFiniteError(
                    f"Observation {self.key!r} holds NaN or infinity: the environment must "
                    "return finite numbers.",
                    self.key,
                )
            raise SpaceError(
                f"Observation {self.key!r} runs from {array.min():g} to {array.max():g}, and its "
                f"space says {self.low:g} to {self.high:g}: correct the space or the value."
            )
        pixels: NDArray[np.uint8] = bright.astype(np.uint8)
        return pixels


def as_dtype(key: str, value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An observation with its dtype. Floats are refused where integers are expected, because they
    would silently lose their fractions: an image from 0 to 1 would be black."""
    array = np.asarray(value)
    if array.dtype.kind == "f" and dtype.kind in "iu":
        raise SpaceError(
            f"Observation {key!r} has dtype {array.dtype}, but its space says {dtype}: return "
            "integers, or declare a float space."
        )
    return array if array.dtype == dtype else array.astype(dtype)


def read_box(
    box: Box, asked: str = "", *, image: str = "", otherwise: str = ""
) -> tuple[Space, Read, str]:
    """The space of an array for agents, its conversion, and a note.

    Args:
        box: The array.
        asked: The layout that the option sets; empty to recognise it.
        image: The key if it is an image; empty for the same.
        otherwise: The layout of bytes with three axes that are not recognised.

    Raises:
        SpaceError: The layout is ambiguous.
        ConfigError: The layout that the option sets does not fit.
    """
    key, dtype, shape, *_ = box
    axes = asked or _recognise(box) or (otherwise if dtype == np.uint8 and len(shape) == 3 else "")
    if not axes:
        layouts = "".join(f"{axes}, " for axes in _PLACES.get(len(shape), ()))
        what = "may or may not be an image" if layouts else "is not an image that agents accept"
        raise SpaceError(
            f"Observation {key!r} has dtype {dtype} and shape {shape}, which {what}: set {_OPTION} "
            f"to {layouts}flat for a vector, or none to keep its shape for an encoder of your own."
        )
    if axes in (NONE, FLAT):
        large = not asked and len(shape) == 2 and min(shape) >= _LEAST_SIDE
        told = f"Observation {key!r}, {dtype} {shape}, is taken as a vector; {_OPTION}=hw takes "
        return *_numbers(box, flat=axes == FLAT), f"{told}it as an image." if large else ""
    if not set("hw") <= set(axes) <= set("hwcs") or len(set(axes)) < len(axes):
        raise ConfigError(
            f"image_layout={axes} is not a layout: {_LETTERS}, h for height, w for width, c for "
            "channels and s for the frames of a stack, or use flat or none."
        )
    if len(axes) != len(shape):
        raise ConfigError(
            f"image_layout={axes} names {len(axes)} axes, and observation {key!r} has shape "
            f"{shape}: {_LETTERS}, or use flat or none."
        )
    black, white = (0.0, 255.0) if dtype == np.uint8 else box.range
    if not (np.isfinite(black) and np.isfinite(white) and black < white):
        raise SpaceError(
            f"Observation {key!r} has no bounds for black and white, so it cannot be an image: "
            f"give its space one low and one high for all pixels, such as 0 and 1, "
            f"or set {_OPTION} to flat or none."
        )
    layout = Layout(image or key, axes, shape, dtype, black, white)
    return Space(np.uint8, layout.image), layout, layout.note


def arranged(
    obs_space: Mapping[str, Space], asked: Asked
) -> tuple[dict[str, tuple[Space, Read]], list[str]]:
    """Conversions of the images of a native environment, and notes about them.

    Bytes with three axes that are not recognised are taken as hwc, the native layout.
    """
    spaces = without_logs(obs_space)
    wanted = layouts_asked(asked, {key: space.shape for key, space in spaces.items()})
    readers: dict[str, tuple[Space, Read]] = {}
    notes: list[str] = []
    for key, space in spaces.items():
        box = Box(key, space.dtype, space.shape, space.low, space.high - space.discrete)
        target, read, note = read_box(box, wanted.get(key, ""), otherwise="hwc")
        notes += [note] if note else []
        changed = not read.plain if isinstance(read, Layout) else len(space.shape) > 2
        readers |= {key: (target, read)} if changed else {}
    return readers, notes


def _numbers(box: Box, *, flat: bool = False) -> tuple[Space, Read]:
    """The space and the conversion of an array that is no image. A leading axis stays."""
    shape = (int(np.prod(box.shape)),) if flat else box.shape
    with np.errstate(over="ignore"):
        low, high = (bound.reshape(shape).astype(np.float64) for bound in (box.low, box.high))
        classes = high - low + 1
        small = np.all(classes <= MOST_CLASSES) and np.sum(classes) <= _MOST_INPUTS
        # More axes are for a custom encoder, and the default decoder predicts floats for them.
        if box.dtype.kind in "iub" and small and np.all(low >= 0) and len(shape) <= 2:
            space = Space(np.int32, shape, 0, high + 1)
        else:
            space = Space(np.float32, shape, low.astype(np.float32), high.astype(np.float32))
    dtype, axes = space.dtype, len(box.shape)

    def read(value: Any) -> NDArray[Any]:
        array = as_dtype(box.key, value, dtype)
        lead = array.shape[: max(0, array.ndim - axes)]
        return array.reshape((*lead, *shape)) if flat else array

    return space, read


def layouts_asked(asked: Asked, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The layouts that the option sets, by key. One layout for all sets those observations that
    have as many axes.

    Raises:
        ConfigError: The option fits no observation.
    """
    if asked is None:
        return {}
    if isinstance(asked, str):
        any_shape = asked in (NONE, FLAT)
        fitting = [key for key in shapes if any_shape or len(shapes[key]) == len(asked)]
        if not fitting:
            found = ", ".join(f"{key!r} with shape {shape}" for key, shape in shapes.items())
            raise ConfigError(
                f"image_layout={asked} fits no observation ({found}): {_LETTERS}, such as "
                "hwc, chw, hw or shwc, or use flat or none."
            )
        return dict.fromkeys(fitting, asked)
    if len(shapes) == 1 and set(asked) <= {"image", "vector"}:  # a single one may be called so
        return dict.fromkeys(shapes, next(iter(asked.values())))
    for key in asked:
        if key not in shapes:
            raise ConfigError(
                f"image_layout names an observation {key!r}, and there is only {', '.join(shapes)}."
            )
    return dict(asked)


def _recognise(box: Box) -> str:
    """The axes, `none`, or nothing if that is ambiguous."""
    _, dtype, shape, *_ = box
    low, high = box.range
    bright = high == 255 or (dtype.kind == "f" and high == 1)
    ranged = low == 0 and bright and dtype.kind != "b"
    if len(shape) < 2:
        return NONE
    if len(shape) == 2:
        # A matrix of other numbers is a board or a table more often than an image.
        return "hw" if dtype == np.uint8 and ranged and min(shape) >= _LEAST_SIDE else NONE
    if len(shape) > 4 or not (ranged or dtype == np.uint8):
        return ""
    for axes, place in _PLACES[len(shape)].items():
        height, width = shape[place : place + 2]
        others = (*shape[:place], *shape[place + 2 :])
        square = dtype == np.uint8 and height == width
        if min(height, width) > max(others) and (square or min(height, width) >= _LEAST_SIDE):
            return axes  # at most one place has the two longest axes
    return ""
