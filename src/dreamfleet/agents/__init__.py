"""Agents: DreamerV3 and a random one, behind one protocol.

Names are looked up on first use, so that configuration and the random agent come without JAX.
"""

from __future__ import annotations

import typing

from dreamfleet.agents.api import Agent, AgentBase, pad_rows, put_rows, take_rows
from dreamfleet.agents.dreamer.config import (
    DreamerConfig,
    ExecutionConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    size_preset,
)
from dreamfleet.agents.errors import AgentError, NonFiniteError, StateMismatchError
from dreamfleet.agents.random import RandomAgent, RandomConfig
from dreamfleet.agents.registry import AgentType, find_agent
from dreamfleet.spaces import SpaceError

if typing.TYPE_CHECKING:
    from dreamfleet.agents.dreamer.runtime.agent import Dreamer

__all__ = [
    "Agent",
    "AgentBase",
    "AgentError",
    "AgentType",
    "Dreamer",
    "DreamerConfig",
    "ExecutionConfig",
    "LossConfig",
    "ModelConfig",
    "NonFiniteError",
    "OptimizerConfig",
    "RandomAgent",
    "RandomConfig",
    "SpaceError",
    "StateMismatchError",
    "find_agent",
    "pad_rows",
    "put_rows",
    "size_preset",
    "take_rows",
]


def __getattr__(name: str) -> object:
    if name == "Dreamer":
        from dreamfleet.agents.dreamer.runtime.agent import Dreamer

        globals()[name] = Dreamer
        return Dreamer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
