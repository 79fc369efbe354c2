"""What one key of an observation or an action may hold, and which keys have a fixed meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import ConfigError, DreamfleetError


class SpaceError(DreamfleetError, ValueError):
    """A space, or a value in it, that an agent or an environment cannot have."""


FLAGS = ("is_first", "is_last", "is_terminal", "reward")
"""Keys that every observation holds; an agent neither encodes nor decodes them."""
RESET = "reset"
"""The key of an action that starts an episode. The runtime sets it, never the agent."""
LOG_PREFIX = "log/"
"""Keys of an observation that go to the metrics, and never to the agent or the replay."""

Value = TypeVar("Value")


def without_logs(obs: Mapping[str, Value]) -> dict[str, Value]:
    """An observation, or its space, without the keys that are only logged."""
    return {key: value for key, value in obs.items() if not key.startswith(LOG_PREFIX)}


def join_observed(parts: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """The rows of all parts, in order. Environments may log different keys: -inf stands for a
    number that a part lacks."""
    joined = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        found = [part.get(key) for part in parts]
        shape = next(each for each in found if each is not None).shape[1:]
        joined[key] = np.concatenate(
            [
                np.full((len(part[FLAGS[0]]), *shape), -np.inf)
                if each is None or each.shape[1:] != shape
                else each
                for part, each in zip(parts, found, strict=True)
            ]
        )
    return joined


def without_reset(action: Mapping[str, Value]) -> dict[str, Value]:
    """An action, or its space, without `reset`: what an agent chooses."""
    return {key: value for key, value in action.items() if key != RESET}


def is_image(dtype: Any, shape: tuple[int, ...]) -> bool:
    """Whether values of this dtype and shape (without batch axes) are images: uint8, (height,
    width, channels)."""
    return np.dtype(dtype) == np.uint8 and len(shape) == 3


def is_frame(dtype: Any, shape: tuple[int, ...]) -> bool:
    """Whether values of this dtype and shape (without batch axes) are images that can be shown:
    with 1 or 3 channels."""
    return is_image(dtype, shape) and shape[-1] in (1, 3)


@dataclass(frozen=True, eq=False)
class Space:
    """A dtype, a shape and bounds.

    Integer and bool spaces are discrete: `low` is inclusive and `high` exclusive, as in Python's
    `range`, so the range of n choices is [0, n). Float spaces are continuous: both bounds are
    inclusive and may be infinite, [-1, 1]. Bounds broadcast to the shape.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    low: NDArray[Any]
    high: NDArray[Any]

    def __init__(
        self,
        dtype: Any,
        shape: int | tuple[int, ...] = (),
        low: Any = None,
        high: Any = None,
    ) -> None:
        kind = np.dtype(dtype)
        dims = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        if kind.kind not in "biuf":
            raise ConfigError(f"A space holds bools, integers or floats, not {kind}.")
        if any(n < 1 for n in dims):
            raise ConfigError(f"A space has positive dimensions, not {dims}.")
        bounds = np.float64 if kind.kind == "f" else np.int64
        lowest, highest = _natural_bounds(kind)
        object.__setattr__(self, "dtype", kind)
        object.__setattr__(self, "shape", dims)
        for name, given, natural in (("low", low, lowest), ("high", high, highest)):
            value = np.asarray(natural if given is None else given, bounds)
            try:
                value = np.broadcast_to(value, dims)
            except ValueError:
                raise ConfigError(
                    f"{name} has shape {value.shape}, which does not fit a space of shape {dims}."
                ) from None
            object.__setattr__(self, name, value)
        if not np.all(self.low < self.high if self.discrete else self.low <= self.high):
            raise ConfigError(f"A space needs low below high, got {self.low} and {self.high}.")

    @property
    def image(self) -> bool:
        """Whether its values are images."""
        return is_image(self.dtype, self.shape)

    @property
    def discrete(self) -> bool:
        return self.dtype.kind in "biu"

    @property
    def classes(self) -> NDArray[np.int64]:
        """Number of choices of each element of a discrete space."""
        if not self.discrete:
            raise ConfigError(f"{self} is continuous and has no classes.")
        return np.asarray(self.high - self.low, np.int64)

    @property
    def range(self) -> str:
        """The lowest and highest bound, as [0, 5) for integers from 0 to 4, [-1, 1] for floats."""
        return f"[{self.low.min():g}, {self.high.max():g}{')' if self.discrete else ']'}"

    def contains(self, value: Any) -> bool:
        array = np.asarray(value)
        if array.shape != self.shape or array.dtype != self.dtype:
            return False
        above = array < self.high if self.discrete else array <= self.high
        return bool(np.all(array >= self.low) and np.all(above))

    def sample(self, rng: np.random.Generator, count: int | None = None) -> NDArray[Any]:
        """A uniform draw, or `count` of them along a leading axis; unbounded sides are drawn from
        a standard normal."""
        shape = self.shape if count is None else (count, *self.shape)
        if self.discrete:
            return np.asarray(rng.integers(self.low, self.high, shape), self.dtype)
        finite = np.isfinite(self.low) & np.isfinite(self.high)
        low, high = np.where(finite, self.low, 0.0), np.where(finite, self.high, 1.0)
        draw = np.where(finite, rng.uniform(low, high, shape), rng.normal(size=shape))
        return np.clip(draw, self.low, self.high).astype(self.dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Space):
            return NotImplemented
        return (
            (self.dtype, self.shape) == (other.dtype, other.shape)
            and np.array_equal(self.low, other.low)
            and np.array_equal(self.high, other.high)
        )

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self.low.tobytes(), self.high.tobytes()))

    def __repr__(self) -> str:
        low, high = (
            bound.flat[0] if np.all(bound == bound.flat[0]) else "..."
            for bound in (self.low, self.high)
        )
        return f"Space({self.dtype.name}, shape={self.shape}, low={low}, high={high})"


def _natural_bounds(dtype: np.dtype[Any]) -> tuple[float, float]:
    if dtype.kind == "b":
        return 0, 2
    if dtype.kind == "f":
        return -np.inf, np.inf
    info = np.iinfo(dtype)
    # The exclusive upper bound of a 64-bit space does not fit an int64.
    return max(info.min, -(2**62)), min(info.max + 1, 2**62)


def summary(space: Space | None) -> str:
    """What an agent's parameters depend on, in words."""
    if space is None:
        return "missing"
    words = f"{space.dtype.name}{list(space.shape)}"
    if not space.discrete or space.image:
        return words
    most, least = int(space.classes.max()), int(space.classes.min())
    return f"{words} with {most} choices" if most == least else f"{words} of {space!r}"


def space_differences(
    one: Sequence[Mapping[str, Space]], two: Sequence[Mapping[str, Space]]
) -> Iterator[tuple[str, str, str, str]]:
    """Where two pairs of observations and actions differ: kind, key, and both spaces in words."""
    for what, first, second in (
        ("observation", without_logs(one[0]), without_logs(two[0])),
        ("action", without_reset(one[1]), without_reset(two[1])),
    ):
        for key in dict.fromkeys([*first, *second]):
            before, now = summary(first.get(key)), summary(second.get(key))
            if before != now:
                yield what, key, before, now


def spaces_to_json(spaces: Mapping[str, Space]) -> str:
    """Spaces as JSON text."""
    return json.dumps(
        {
            key: {"dtype": space.dtype.name, "shape": list(space.shape)}
            | {"low": _bound(space.low), "high": _bound(space.high)}
            for key, space in spaces.items()
        }
    )


def spaces_from_json(text: str) -> dict[str, Space]:
    """The spaces that `spaces_to_json` wrote."""
    return {key: _from_plain(plain) for key, plain in json.loads(text).items()}


def _bound(bound: NDArray[Any]) -> Any:
    """One number where all are the same, which keeps images short; text, because of infinity."""
    same = np.all(bound == bound.flat[0])
    return str(bound.flat[0]) if same else [str(value) for value in bound.flat]


def _from_plain(plain: Mapping[str, Any]) -> Space:
    shape = tuple(plain["shape"])
    number = float if np.dtype(plain["dtype"]).kind == "f" else int

    def bound(value: Any) -> Any:
        if isinstance(value, list):
            return np.array([number(each) for each in value]).reshape(shape)
        return number(value)

    return Space(plain["dtype"], shape, bound(plain["low"]), bound(plain["high"]))
