"""Dreamer learns a small task in a minute, and does not where learning is broken.

The net under everything else: whatever breaks learning, anywhere from the replay's sequences to the
sign of a gradient, makes the first test fail. The others prove that it can.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dreamfleet.agents import (
    DreamerConfig,
    ExecutionConfig,
    LossConfig,
    OptimizerConfig,
    size_preset,
)
from dreamfleet.agents.api import Agent
from dreamfleet.envs.base import Arrays, EpisodicEnv, Outcome, noop
from dreamfleet.replay import Replay
from dreamfleet.spaces import Space

ENVS, BATCH, LENGTH = 8, 16, 16
STEPS, BEFORE_TRAINING, EVERY = 1500, 256, 4
LEARNED = 6.0
"""Of 10: random play scores 4, perfect play 8.5."""

CONFIG = DreamerConfig(
    model=replace(size_preset("debug"), deter=64, hidden=32, units=32, stoch=4, classes=8, bins=41),
    loss=LossConfig(imag_last=8, imag_length=8, horizon=20, entropy_scale=3e-3),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup=50),
    # All cases have the same program.
    execution=ExecutionConfig(cache_dir=os.environ["DREAMFLEET_TESTS_CACHE"]),
)
Batch = dict[str, Any]


def sound(batch: Batch) -> Batch:
    return batch


def actions_of_other_steps(batch: Batch) -> Batch:
    return {**batch, "action": np.random.default_rng(0).permuted(batch["action"])}


class Line(EpisodicEnv):
    """Ten steps left or right (or none) on a line towards a mark; the reward is the nearness."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            {"place": Space(np.float32, (), -1, 1), "mark": Space(np.float32, (), -1, 1)},
            {"action": Space(np.int32, (), 0, 3)},
        )
        self._rng = np.random.default_rng(seed)
        self._place = self._mark = 0.0
        self._left = 0

    def _begin(self) -> Arrays:
        self._place, self._mark = self._rng.uniform(-1, 1, 2)
        self._left = 10
        return self._see()

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self._left -= 1
        self._place = float(np.clip(self._place + 0.3 * (int(action["action"]) - 1), -1, 1))
        reward = 1 - min(1.0, abs(self._place - self._mark))
        return Outcome(self._see(), reward, last=self._left == 0)

    def _see(self) -> Arrays:
        return {key: np.float32(getattr(self, f"_{key}")) for key in ("place", "mark")}


def train(agent: Agent, steps: int, change: Callable[[Batch], Batch]) -> None:
    """The loop that the fleet spreads over processes, in a few lines."""
    envs = [Line(seed) for seed in range(ENVS)]
    replay = Replay(LENGTH + 1, 10_000)
    carry, learning = agent.init_policy(ENVS), agent.init_train(BATCH)
    actions: list[Any] = [noop(env.act_space) for env in envs]
    updates = 0
    for step in range(0, steps, ENVS):
        seen = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        obs = {key: np.stack([each[key] for each in seen]) for key in seen[0]}
        carry, chosen, outs = agent.policy(carry, obs)
        replay.add_batch({**obs, **chosen, **outs}, range(ENVS))
        reply = {**chosen, "reset": obs["is_last"]}
        actions = [{key: value[row] for key, value in reply.items()} for row in range(ENVS)]
        while step >= BEFORE_TRAINING and updates * EVERY < step - BEFORE_TRAINING:
            learning, outputs, _ = agent.train(learning, change(replay.sample(BATCH)))
            replay.update({key: np.asarray(value) for key, value in outputs["replay"].items()})
            updates += 1


def score(steps: int, change: Callable[[Batch], Batch] = sound) -> float:
    """What an agent scores after so many steps, from batches that were changed."""
    from dreamfleet.agents import Dreamer  # not before the agent's own tests watch its import

    env = Line(0)
    agent = Dreamer(env.obs_space, env.act_space, CONFIG, seed=0)
    train(agent, steps, change)
    return mean_return(agent, [Line(1000 + number) for number in range(64)])


def mean_return(agent: Agent, envs: Sequence[Line]) -> float:
    """Of one episode in each of these environments, all of which are as long."""
    carry = agent.init_policy(len(envs))
    actions: list[Any] = [noop(env.act_space) for env in envs]
    total, over = 0.0, False
    while not over:
        seen = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        obs = {key: np.stack([each[key] for each in seen]) for key in seen[0]}
        total, over = total + float(obs["reward"].sum()), bool(obs["is_last"].all())
        carry, chosen, _ = agent.policy(carry, obs, "eval")
        reply = {**chosen, "reset": obs["is_last"]}
        actions = [{key: value[row] for key, value in reply.items()} for row in range(len(envs))]
    return total / len(envs)


def test_dreamer_learns() -> None:
    assert score(STEPS) > LEARNED


def test_without_training_it_does_not() -> None:
    assert score(0) < LEARNED


def test_from_the_actions_of_other_steps_it_does_not() -> None:
    assert score(STEPS, actions_of_other_steps) < LEARNED
