"""An encoder of one's own: Dreamer observes the point clouds of two sensors.

    dreamfleet train --task examples.point_cloud:make --logdir runs/points --steps 20000 \
        --env-options image_layout=none --dreamer.model.encoder examples.point_cloud:PointEncoder

The points have no order, so each goes through the same small network, and the largest value of each
feature over all points of a sensor is kept. Floats with three dimensions may be an image or not;
`image_layout=none` says that they are not. `docs/agents.md` explains what an encoder has to offer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import gymnasium
import numpy as np
from jax import Array

from dreamfleet import Space
from dreamfleet.agents import ModelConfig, SpaceError
from dreamfleet.agents.dreamer.layers import MLP


class PointEncoder(eqx.Module):
    """Tokens of the key `cloud`: an array of points for each sensor."""

    points: MLP
    width: int = eqx.field(static=True)

    @classmethod
    def check(cls, spaces: Mapping[str, Space], model: ModelConfig) -> None:
        if set(spaces) != {"cloud"} or len(spaces["cloud"].shape) != 3:
            raise SpaceError(f"PointEncoder takes 'cloud' (sensors, points, axes), not {spaces}.")

    @classmethod
    def init(
        cls, rng: np.random.Generator, model: ModelConfig, spaces: Mapping[str, Space]
    ) -> PointEncoder:
        sensors, _, axes = spaces["cloud"].shape
        return cls(MLP.init(rng, axes, model.units, 2), sensors * model.units)

    def __call__(self, obs: Mapping[str, Array]) -> Array:
        dtype = self.points.layers[0].kernel.dtype  # the precision that the settings ask for
        features = self.points(obs["cloud"].astype(dtype)).max(-2)
        return features.reshape(*features.shape[:-2], self.width)


class Flock(gymnasium.Env[dict[str, Any], Any]):
    """Follow the flock: an action is right if it is the side on which most points are."""

    observation_space = gymnasium.spaces.Dict({"cloud": gymnasium.spaces.Box(-3, 3, (2, 16, 3))})
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], Any]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, Any]:
        self._steps += 1
        reward = float(int(action) == (self._side > 0))
        return self._observe(), reward, False, self._steps >= 20, {}

    def _observe(self) -> dict[str, Any]:
        self._side = self.np_random.choice([-1.0, 1.0])
        cloud = self.np_random.normal((self._side, 0, 0), 1.0, (2, 16, 3))
        return {"cloud": cloud.clip(-3, 3).astype(np.float32)}


def make() -> Flock:
    """What `--task examples.point_cloud:make` names."""
    return Flock()
