"""Dreamfleet trains DreamerV3 with a fleet of processes.

`Policy` and `make_env` are looked up on first use, so that processes which need neither stay small.
"""

import typing
from importlib import import_module
from importlib.metadata import version

from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.spaces import Space

if typing.TYPE_CHECKING:
    from dreamfleet.envs import make_env
    from dreamfleet.policy import Policy

__version__ = version("dreamfleet")

__all__ = ["ConfigError", "DreamfleetError", "Policy", "Space", "__version__", "make_env"]

_LATER = {"Policy": "dreamfleet.policy", "make_env": "dreamfleet.envs"}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value
