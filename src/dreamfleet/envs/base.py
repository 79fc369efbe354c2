"""The contract of environments.

    obs = env.step({**action, "reset": False})

One call does everything: `reset` in the action starts an episode and returns its first
observation; the rest of the action is ignored then. Observations are dicts of arrays and always
hold

    reward       float32   received on arriving here; 0 on the first step
    is_first     bool      the first observation of an episode
    is_last      bool      no action follows in this episode: the next one must be a reset
    is_terminal  bool      the episode ended by itself, so no more reward was possible; an
                           episode cut short by a time limit is last but not terminal

Keys that start with `log/` go to the metrics and never to the agent or the replay.

Errors:

    DreamfleetError
    └── EnvError
        ├── UnknownTaskError   no suite, task or factory has this name
        └── EnvCrashedError    the environment failed more often than it may be restarted
    └── SpaceError
        └── NotFiniteError     a reward or an observation holds NaN or infinity
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.images import side_by_side
from dreamfleet.errors import DreamfleetError
from dreamfleet.spaces import RESET, Space, SpaceError, is_frame

Arrays = dict[str, NDArray[Any]]
Spaces = dict[str, Space]

RESERVED: Mapping[str, Space] = {
    "reward": Space(np.float32),
    **dict.fromkeys(("is_first", "is_last", "is_terminal"), Space(bool)),
}
"""The keys that every observation holds."""

_FALSE, _TRUE = np.array(False), np.array(True)
for _constant in (_FALSE, _TRUE):
    _constant.setflags(write=False)


class EnvError(DreamfleetError):
    """An environment that cannot be made or stepped."""


class UnknownTaskError(EnvError, ValueError):
    """A task that names nothing."""


class EnvCrashedError(EnvError, RuntimeError):
    """An environment that keeps failing."""


class NotFiniteError(SpaceError):
    """A reward or an observation with NaN or infinity."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


@runtime_checkable
class Env(Protocol):
    """The contract. A class needs no base to fulfil it.

    Optional: `render`, `close`, `action_names` (of the choices of a single discrete action) and
    `restore(obs)`, which puts a running episode into the state that an observation shows and
    returns whether it could; dreams are drawn with it.
    """

    @property
    def obs_space(self) -> Spaces: ...

    @property
    def act_space(self) -> Spaces: ...

    def step(self, action: Mapping[str, Any]) -> Arrays: ...


def with_reserved(
    obs_space: Mapping[str, Space], act_space: Mapping[str, Space]
) -> tuple[Spaces, Spaces]:
    """The spaces of an environment with the keys that the contract adds."""
    if taken := sorted((obs_space.keys() & RESERVED.keys()) | (act_space.keys() & {RESET})):
        raise SpaceError(
            f"The key {taken[0]!r} of the environment is reserved: rename it, for example with a "
            "wrapper."
        )
    return {**obs_space, **RESERVED}, {**act_space, RESET: Space(bool)}


class Outcome(NamedTuple):
    """The result of one step of an episode."""

    obs: Arrays
    reward: float = 0.0
    last: bool = False
    terminal: bool = False


class EpisodicEnv(ABC):
    """An environment from two methods: start an episode, and advance it by one action.

    Subclasses describe their own keys; reward, flags and `reset` are added here, the same way for
    all suites.
    """

    def __init__(self, obs_space: Mapping[str, Space], act_space: Mapping[str, Space]) -> None:
        self._obs_space, self._act_space = with_reserved(obs_space, act_space)
        self._over = True

    @property
    def obs_space(self) -> Spaces:
        return self._obs_space

    @property
    def act_space(self) -> Spaces:
        return self._act_space

    @abstractmethod
    def _begin(self) -> Arrays:
        """Start an episode and return its first observation."""

    @abstractmethod
    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        """Take one action in a running episode."""

    def step(self, action: Mapping[str, Any]) -> Arrays:
        # Without a reset after a last step a new episode starts, which `is_first` shows.
        first = self._over or action[RESET]
        obs, reward, last, terminal = Outcome(self._begin()) if first else self._advance(action)
        self._over = last
        return {
            **obs,
            "reward": np.array(reward, np.float32),
            "is_first": _TRUE if first else _FALSE,
            "is_last": _TRUE if last else _FALSE,
            "is_terminal": _TRUE if terminal else _FALSE,
        }

    def render(self) -> NDArray[np.uint8] | None:
        """The current frame (height, width, 3), or None if there is nothing to show."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release resources. Calling it twice is fine."""


def noop(act_space: Mapping[str, Space], *, reset: bool = True) -> Arrays:
    """An action of zeros, or of the values nearest to zero."""
    zeros: Arrays = {
        key: np.clip(np.zeros(s.shape), s.low, s.high - s.discrete).astype(s.dtype)
        for key, s in act_space.items()
    }
    return {**zeros, RESET: np.array(reset)}


def sample_action(act_space: Mapping[str, Space], rng: np.random.Generator) -> Arrays:
    """A random action that does not reset."""
    return {**{key: s.sample(rng) for key, s in act_space.items()}, RESET: np.array(False)}


def env_seed(seed: int, index: int) -> int:
    """The seed of environment number `index` of a run: independent streams, 31 bits each."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) & 0x7FFFFFFF


def renderer(env: Env) -> Callable[[Arrays], NDArray[np.uint8] | None]:
    """A function from an observation to a frame: its images, side by side, or else what the
    environment renders."""
    spaces = env.obs_space.items()
    images = [key for key, space in spaces if is_frame(space.dtype, space.shape)]
    render: Callable[[], Any] = getattr(env, "render", None) or (lambda: None)
    return lambda obs: side_by_side([obs[key] for key in images]) if images else render()
