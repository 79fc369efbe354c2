"""Small environments that need no package: to try, to test and to measure with."""

from __future__ import annotations

from collections.abc import Callable

from dreamfleet.envs.base import Env
from dreamfleet.envs.bundled.catch import Catch
from dreamfleet.envs.bundled.corridor import Corridor
from dreamfleet.envs.bundled.dummy import Dummy
from dreamfleet.envs.bundled.pointmass import PointMass

_BUNDLED: dict[str, Callable[..., Env]] = {
    "catch": Catch,
    "corridor": Corridor,
    "dummy": Dummy,
    "pointmass": PointMass,
}


def tasks() -> list[str]:
    return sorted(_BUNDLED)


def constructor(name: str) -> Callable[..., Env] | None:
    return _BUNDLED.get(name)
