"""Environments: one contract, several suites, and the way from a name to one of them."""

from dreamfleet.envs.base import (
    Env,
    EpisodicEnv,
    Outcome,
    env_seed,
    is_image,
    noop,
    sample_action,
)
from dreamfleet.envs.errors import (
    EnvCrashedError,
    EnvError,
    MissingExtraError,
    SpaceError,
    UnknownTaskError,
)
from dreamfleet.envs.registry import adapt, make_env, make_visible_env, suites, tasks
from dreamfleet.envs.wrappers import Wrapper

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
    "adapt",
    "env_seed",
    "is_image",
    "make_env",
    "make_visible_env",
    "noop",
    "sample_action",
    "suites",
    "tasks",
]
