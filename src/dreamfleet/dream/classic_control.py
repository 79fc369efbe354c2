"""Classic control of Gymnasium in a dream: setting the state that an observation shows, and names
of actions. Other environments have `restore` and `action_names` of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs import Wrapper
from dreamfleet.envs.gym import GymEnv

Vector = NDArray[np.float64]


def restore(env: Wrapper, obs: Mapping[str, Any]) -> bool:
    """Put a running episode into the state that an observation shows; returns whether that is
    possible."""
    if env.restore(obs):
        return True
    core = _classic(env)
    state = _STATES.get(type(core).__name__)
    if state is None or "vector" not in obs:
        return False
    core.state = state(np.asarray(obs["vector"], np.float64))
    # What else an episode has: CartPole counts steps after its end, Pendulum draws its last action.
    for name in ("steps_beyond_terminated", "last_u"):
        if hasattr(core, name):
            setattr(core, name, None)
    return True


def action_names(env: Wrapper) -> tuple[str, ...]:
    """What the choices of a discrete action are called; empty if they have no names."""
    return env.action_names or _NAMES.get(type(_classic(env)).__name__, ())


def _classic(env: Any) -> Any:
    """The environment of classic control inside; None for any other environment."""
    while isinstance(env, Wrapper):
        env = env.env
    core = env.env.unwrapped if isinstance(env, GymEnv) else None
    return core if type(core).__module__.startswith("gymnasium.envs.classic_control") else None


def _pendulum(vector: Vector) -> Vector:
    cosine, sine, velocity = vector
    return np.array([np.arctan2(sine, cosine), velocity])


def _acrobot(vector: Vector) -> Vector:
    first, second = (np.arctan2(vector[n + 1], vector[n]) for n in (0, 2))
    return np.array([first, second, *vector[4:]])


_STATES: dict[str, Callable[[Vector], Vector]] = {
    "AcrobotEnv": _acrobot,
    "CartPoleEnv": np.array,
    "Continuous_MountainCarEnv": np.array,
    "MountainCarEnv": np.array,
    "PendulumEnv": _pendulum,
}
_NAMES = {
    "AcrobotEnv": ("turn back", "rest", "turn forth"),
    "CartPoleEnv": ("left", "right"),
    "MountainCarEnv": ("left", "rest", "right"),
}
