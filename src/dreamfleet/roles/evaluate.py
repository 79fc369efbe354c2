"""Playing whole episodes with an agent, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dreamfleet.agents.api import Agent, Mode
from dreamfleet.envs.base import noop
from dreamfleet.metrics import Episode, EpisodeStats
from dreamfleet.roles.actor import Carries
from dreamfleet.roles.env import ObservationBlock


def evaluate(
    agent: Agent, make_env: Callable[[int], Any], episodes: int, mode: Mode = "eval"
) -> list[Episode]:
    """One episode in each of so many environments, stepped together."""
    envs = [make_env(envid) for envid in range(episodes)]
    actions: list[Any] = [
        noop({k: s for k, s in e.act_space.items() if k != "reset"}) for e in envs
    ]
    carries, stats = Carries(agent, episodes), EpisodeStats()
    rows = ObservationBlock(range(episodes), is_eval=True)
    finished: dict[int, Episode] = {}
    while len(finished) < episodes:
        obs = rows.fill([env.step(action) for env, action in zip(envs, actions, strict=True)])
        for episode in stats.add(obs["envid"], obs):
            finished.setdefault(episode.envid, episode)
        seen = {k: v for k, v in obs.items() if k in agent_keys(obs)}
        carry, slots = carries.take(obs["envid"], obs["is_first"])
        carry, chosen, _ = agent.policy(carry, seen, mode)
        carries.put(slots, carry)
        reply = {**chosen, "reset": obs["is_last"]}
        actions = [{k: np.asarray(v)[row] for k, v in reply.items()} for row in range(episodes)]
    for env in envs:
        env.close()
    return [finished[envid] for envid in range(episodes)]


def agent_keys(obs: dict[str, Any]) -> set[str]:
    """What an agent is shown of an observation."""
    return {k for k in obs if not k.startswith("log/") and k not in ("envid", "is_eval")}
