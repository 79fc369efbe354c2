"""What can go wrong with an environment.

DreamfleetError
└── EnvError
    ├── UnknownTaskError   no suite, task or factory has this name; the message offers close ones
    ├── SpaceError         a space, an observation or an action that breaks the contract
    └── EnvCrashedError    the environment failed more often than it may be restarted
"""

from __future__ import annotations

from dreamfleet.errors import DreamfleetError, MissingExtraError

__all__ = [
    "EnvCrashedError",
    "EnvError",
    "MissingExtraError",
    "SpaceError",
    "UnknownTaskError",
]


class EnvError(DreamfleetError):
    """An environment that cannot be made or stepped."""


class UnknownTaskError(EnvError, ValueError):
    """A task that names nothing."""


class SpaceError(EnvError, ValueError):
    """A space or a value that an agent cannot be given."""


class EnvCrashedError(EnvError, RuntimeError):
    """An environment that keeps failing."""
