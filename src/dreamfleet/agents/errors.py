"""What can go wrong in an agent.

DreamfleetError
└── AgentError
    ├── StateMismatchError    a saved state that does not fit; every difference is listed
    └── NonFiniteError   NaN or infinity in data, losses or gradients; training has stopped
"""

from dreamfleet.errors import DreamfleetError


class AgentError(DreamfleetError):
    """The root of this layer's errors."""


class StateMismatchError(AgentError, ValueError):
    """A saved state whose names, shapes or dtypes differ from the agent's."""


class NonFiniteError(AgentError, FloatingPointError):
    """NaN or infinity appeared; the message names the first bad tensor and the dump."""
