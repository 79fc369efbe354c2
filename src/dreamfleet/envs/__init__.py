"""Environments: one contract, several suites, and the way from a name to one of them."""

from dreamfleet.envs.base import (
    Env,
    EnvCrashedError,
    EnvError,
    EpisodicEnv,
    Outcome,
    UnknownTaskError,
    env_seed,
    noop,
    renderer,
    sample_action,
)
from dreamfleet.envs.registry import is_bundled, make_env, make_visible_env, suites, tasks
from dreamfleet.envs.wrappers import Wrapper
from dreamfleet.errors import MissingExtraError
from dreamfleet.spaces import SpaceError

__all__ = [
    "Env",
    "EnvCrashedError",
    "EnvError",
    "EpisodicEnv",
    "MissingExtraError",
    "Outcome",
    "SpaceError",
    "UnknownTaskError",
    "Wrapper",
    "env_seed",
    "is_bundled",
    "make_env",
    "make_visible_env",
    "noop",
    "renderer",
    "sample_action",
    "suites",
    "tasks",
]
