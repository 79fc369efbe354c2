"""Environments: one contract, several suites, and the way from a name to one of them."""

from dreamfleet.envs.base import (
    Arrays,
    Env,
    EpisodicEnv,
    Outcome,
    Spaces,
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
from dreamfleet.envs.registry import SUITES, adapt, make_env

__all__ = [
    "SUITES",
    "Arrays",
    "Env",
    "EnvCrashedError",
    "EnvError",
    "EpisodicEnv",
    "MissingExtraError",
    "Outcome",
    "SpaceError",
    "Spaces",
    "UnknownTaskError",
    "adapt",
    "env_seed",
    "is_image",
    "make_env",
    "noop",
    "sample_action",
]
