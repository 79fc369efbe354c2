"""Evaluation: complete episodes with a trained policy, in environments that training never uses.

result = evaluate("runs/gym-CartPole-v1", episodes=20)
result.summary(), result.returns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Agent, Mode
from dreamfleet.agents.registry import AgentType
from dreamfleet.envs import Wrapper, env_seed, make_env, make_visible_env, noop, renderer
from dreamfleet.envs.naming import Task, maker_of, name_of
from dreamfleet.errors import ConfigError
from dreamfleet.metrics import Episode, EpisodeStats
from dreamfleet.metrics.frames import Mp4Writer, enlarged, labelled
from dreamfleet.policy import Policy
from dreamfleet.spaces import RESET, without_logs, without_reset

_SEEDS_FROM = 1_000_000
_AT_ONCE = 8
_PROTOCOLS = {
    False: "actions sampled from the policy, as in training",
    True: "greedy actions, the mode of the policy",
}


@dataclass(frozen=True)
class Evaluation:
    """The result, with an entry for each episode."""

    task: str
    step: int
    protocol: str
    seed: int
    returns: list[float]
    lengths: list[int]

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def standard_error(self) -> float | None:
        """Of the mean; None for a single return, which has no spread."""
        if len(self.returns) < 2:
            return None
        return float(np.std(self.returns, ddof=1) / np.sqrt(len(self.returns)))

    def record(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "task": self.task,
            "step": self.step,
            "protocol": self.protocol,
            "seed": self.seed,
            "episodes": len(self.returns),
            "mean": self.mean,
            "standard_error": self.standard_error,
            "returns": self.returns,
            "lengths": self.lengths,
        }

    def summary(self) -> str:
        """The mean, in words."""
        error, count = self.standard_error, len(self.returns)
        spread = f" ± {error:.2g} (standard error, {count} episodes)" if error is not None else ""
        return f"{self.mean:.4g}{spread}"


def evaluate(
    policy: Policy | Path | str,
    episodes: int = 10,
    *,
    agent: Agent | AgentType[Any] | str | None = None,
    greedy: bool = False,
    seed: int = 0,
    video: Path | None = None,
    fps: float = 20.0,
    env: Task | None = None,
) -> Evaluation:
    """Play complete episodes with a trained agent, each in an environment with a seed of its own.

    Args:
        policy: A run's directory, a checkpoint, or a policy that was loaded from one.
        episodes: How many.
        agent: For an agent of your own, see `Policy.load`.
        greedy: Take the mode of the policy instead of samples.
        seed: Another seed plays other episodes.
        video: Record the first episode to this file.
        fps: Frames a second of the video.
        env: What makes the environments, a task or a class or a function; None for the task that
            the policy was trained on.

    Raises:
        ConfigError: There is no checkpoint, or a setting cannot work.
    """
    if episodes < 1:
        raise ConfigError(f"episodes={episodes} is not valid: use a whole number, at least 1.")
    if video and video.suffix != ".mp4":
        raise ConfigError(f"video={video} is not valid: its name has to end in .mp4.")
    if isinstance(policy, Policy):
        if agent is not None or greedy:
            raise ConfigError("This policy is loaded: say agent and greedy when you load it.")
    else:
        policy = Policy.load(policy, agent=agent, greedy=greedy)
    if policy.blueprint is None:
        raise ConfigError("The policy does not say what its task is: load it from a checkpoint.")
    config = policy.blueprint.config
    task = config.task if env is None else name_of(env)
    maker = maker_of(task) if env is None or isinstance(env, str) else env
    with ExitStack() as stack:
        recorder = None
        if video:
            title = f"{task} step {policy.step:,}"
            writer = stack.enter_context(Mp4Writer(video, fps=fps, title=title))
            recorder = partial(_Recorded, writer=writer, title=title, task=task)

        def environment(start: int, number: int) -> Any:
            at = env_seed(config.seed + seed, _SEEDS_FROM + start + number)
            if recorder and start + number == 0:
                return recorder(make_visible_env(maker, seed=at, **config.env_options))
            return make_env(maker, seed=at, **config.env_options)

        played = []
        for start in range(0, episodes, _AT_ONCE):
            count = min(_AT_ONCE, episodes - start)
            played += play(policy.agent, partial(environment, start), count, policy.mode)
    return Evaluation(
        task,
        policy.step,
        protocol(policy),
        seed,
        [episode.score for episode in played],
        [episode.length for episode in played],
    )


def protocol(policy: Policy) -> str:
    """How actions are chosen, in words."""
    return _PROTOCOLS[policy.greedy]


def play(
    agent: Agent, make_env: Callable[[int], Any], episodes: int, mode: Mode = "eval"
) -> list[Episode]:
    """One episode in each of so many environments, stepped together in this process."""
    with ExitStack() as stack:
        envs = [make_env(number) for number in range(episodes)]
        for env in envs:
            stack.callback(env.close)
        actions: list[Any] = [noop(without_reset(env.act_space)) for env in envs]
        carry, stats = agent.init_policy(episodes), EpisodeStats()
        finished: dict[int, Episode] = {}
        while len(finished) < episodes:
            rows = [env.step(action) for env, action in zip(envs, actions, strict=True)]
            obs = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
            for episode in stats.add(np.arange(episodes), obs):
                finished.setdefault(episode.envid, episode)
            # An environment that is done plays another episode until all are; it does not count.
            carry, chosen, _ = agent.policy(carry, without_logs(obs), mode)
            reply = {**chosen, RESET: obs["is_last"]}
            actions = [{k: np.asarray(v)[row] for k, v in reply.items()} for row in range(episodes)]
    return [finished[number] for number in range(episodes)]


class _Recorded(Wrapper):
    """Records the first episode: frames with a line above them that says the task, the step and
    the return so far."""

    def __init__(self, env: Wrapper, *, writer: Mp4Writer, title: str, task: str) -> None:
        super().__init__(env)
        self._writer, self._title, self._task = writer, title, task
        self._frame_of = renderer(env)
        self._score = 0.0
        self._done = False

    def step(self, action: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        obs = self.env.step(action)
        if not self._done:
            frame = self._frame_of(obs)
            if frame is None:
                raise ConfigError(
                    f"{self._task} renders no frames, so there is no video of it: let its factory "
                    'make it with render_mode="rgb_array", or leave the video out.'
                )
            self._score += float(obs["reward"])
            line = f"{self._title}  return {self._score:<8.5g}"
            self._writer.add(labelled(enlarged(frame), line))
        self._done = self._done or bool(obs["is_last"])
        return obs
