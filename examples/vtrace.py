"""A small model-free agent: an actor-critic that learns from a short replay with V-trace.

    dreamfleet train --agent examples.vtrace:AGENT --task gym:CartPole-v1 --logdir runs/vtrace \
        --envs 4 --batch-size 16 --batch-length 32 --train-ratio 32 --replay.capacity 4000 \
        --steps 100000 --target-score 475

It chooses one discrete action and observes vectors. `docs/agents.md` explains its parts.

This file has its settings and its type, and `vtrace_agent.py` the agent itself: every process of a
run reads the settings, and only the agent's process needs JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from dreamfleet import Space
from dreamfleet.agents import AgentType, SpaceError
from dreamfleet.settings import validate
from dreamfleet.spaces import without_logs, without_reset

Spaces = Mapping[str, Space]
STORED = {"logprob": Space(np.float32)}


@dataclass(frozen=True)
class VTraceConfig:
    """Settings of the actor-critic."""

    units: Annotated[int, Meta(ge=1)] = 64
    """Width of the hidden layers."""
    learning_rate: Annotated[float, Meta(gt=0)] = 1e-3
    """Step size of Adam."""
    discount: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    """What a reward one step later is worth."""
    entropy_scale: Annotated[float, Meta(ge=0)] = 0.01
    """Weight of the policy's entropy."""

    def __post_init__(self) -> None:
        validate(self)


class VTraceType(AgentType[VTraceConfig]):
    """What `--agent examples.vtrace:AGENT` names; settings are `--vtrace.units` and so on."""

    name = "vtrace"
    config = VTraceConfig

    def make(self, obs_space: Spaces, act_space: Spaces, config: VTraceConfig, *, seed: int) -> Any:
        # Here, and not at the top of the file, because it imports JAX.
        from .vtrace_agent import VTrace

        return VTrace(obs_space, act_space, config, seed)

    def check(self, obs_space: Spaces, act_space: Spaces, config: VTraceConfig) -> None:
        actions = without_reset(act_space)
        if len(actions) != 1 or not all(s.discrete and not s.shape for s in actions.values()):
            raise SpaceError(f"V-trace needs one discrete action here, not {list(actions)}.")
        for key, space in without_logs(obs_space).items():
            if len(space.shape) > 1:
                raise SpaceError(f"V-trace observes vectors here, and {key!r} is {space}.")

    def stored_space(
        self, obs_space: Spaces, act_space: Spaces, config: VTraceConfig
    ) -> dict[str, Space]:
        return STORED


AGENT = VTraceType()
