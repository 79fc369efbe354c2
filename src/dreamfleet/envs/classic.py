"""Gymnasium's classic control: states from observations, and names of actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def _same(vector: Vector) -> Vector:
    return vector


def _pendulum(vector: Vector) -> Vector:
    cosine, sine, velocity = vector
    return np.array([np.arctan2(sine, cosine), velocity])


def _acrobot(vector: Vector) -> Vector:
    first, second = (np.arctan2(vector[n + 1], vector[n]) for n in (0, 2))
    return np.array([first, second, *vector[4:]])


_STATES: dict[str, Callable[[Vector], Vector]] = {
    "AcrobotEnv": _acrobot,
    "CartPoleEnv": _same,
    "Continuous_MountainCarEnv": _same,
    "MountainCarEnv": _same,
    "PendulumEnv": _pendulum,
}


_NAMES = {
    "AcrobotEnv": ("turn back", "rest", "turn forth"),
    "CartPoleEnv": ("left", "right"),
    "MountainCarEnv": ("left", "rest", "right"),
}


def names_of(env: Any) -> tuple[str, ...]:
    """What the choices of an environment of classic control are called."""
    return _NAMES.get(type(env).__name__, ()) if _is_classic(env) else ()


def set_state(env: Any, vector: Any) -> bool:
    """Put an environment of classic control into the state that an observation shows; False for
    any other environment."""
    state = _STATES.get(type(env).__name__)
    if state is None or not _is_classic(env):
        return False
    env.state = state(np.asarray(vector, np.float64))
    # What else an episode has: CartPole counts steps after its end, Pendulum draws its last action.
    if hasattr(env, "steps_beyond_terminated"):
        env.steps_beyond_terminated = None
    if hasattr(env, "last_u"):
        env.last_u = None
    return True


def _is_classic(env: Any) -> bool:
    return type(env).__module__.startswith("gymnasium.envs.classic_control")
