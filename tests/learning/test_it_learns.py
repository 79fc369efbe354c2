"""Dreamer learns a small task in a minute, and does not where learning is broken.

The net under everything else: whatever breaks learning, anywhere from the replay's sequences to the
sign of a gradient, makes the first test fail. The others prove that it can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dreamfleet.agents import (
    DreamerConfig,
    ExecutionConfig,
    LossConfig,
    OptimizerConfig,
    size_preset,
)
from dreamfleet.agents.api import Agent
from dreamfleet.envs.base import Arrays, EpisodicEnv, Outcome, noop
from dreamfleet.replay import Replay, Stream
from dreamfleet.spaces import Space

ENVS, BATCH, LENGTH = 8, 16, 16
STEPS, BEFORE_TRAINING, EVERY = 1500, 256, 4
LEARNED = 6.0
"""Of 10: random play scores 4, perfect play 8.5."""

CONFIG = DreamerConfig(
    model=replace(size_preset("debug"), deter=64, hidden=32, units=32, stoch=4, classes=8, bins=41),
    loss=LossConfig(imag_last=8, imag_length=8, horizon=20, entropy_scale=3e-3),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup=50),
    execution=ExecutionConfig(cache_dir=""),
)
FROZEN = replace(
    CONFIG.loss,
    reconstruction_scale=0.0,
    reward_scale=0.0,
    continue_scale=0.0,
    dynamics_scale=0.0,
    representation_scale=0.0,
    replay_value_grad=False,
)
# The policy's loss is -(advantage * log probability + scale * entropy). Settings refuse a negative
# scale, so it is set behind their back.
WRONG_SIGN = replace(CONFIG.loss)
object.__setattr__(WRONG_SIGN, "policy_scale", -1.0)
object.__setattr__(WRONG_SIGN, "entropy_scale", -CONFIG.loss.entropy_scale)


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


def train(agent: Agent, steps: int) -> None:
    """The loop that the fleet spreads over processes, in a few lines."""
    envs = [Line(seed) for seed in range(ENVS)]
    replay = Replay(LENGTH + 1, 10_000)
    stream = Stream(lambda: replay.sample(BATCH), LENGTH, context=1)
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
            learning, outputs, _ = agent.train(learning, next(stream))
            replay.update({key: np.asarray(value) for key, value in outputs["replay"].items()})
            updates += 1


def score(loss: LossConfig, steps: int) -> float:
    """What an agent with these losses scores after so many steps."""
    from dreamfleet.agents import Dreamer  # not before the agent's own tests watch its import

    env = Line(0)
    agent = Dreamer(env.obs_space, env.act_space, replace(CONFIG, loss=loss), seed=0)
    train(agent, steps)
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
    assert score(CONFIG.loss, STEPS) > LEARNED


@pytest.mark.parametrize(
    ("loss", "steps"),
    [
        pytest.param(CONFIG.loss, 0, id="untrained"),
        pytest.param(FROZEN, STEPS, id="frozen world model"),
        pytest.param(WRONG_SIGN, STEPS, id="wrong sign of the advantage"),
    ],
)
def test_what_is_broken_does_not(loss: LossConfig, steps: int) -> None:
    assert score(loss, steps) < LEARNED
