"""Evaluation: complete episodes with a trained policy, in environments that training never uses.

    result = evaluate("runs/gym-CartPole-v1", episodes=20)
    result.summary(), result.returns

The policy stays in this process. Environments run in processes of their own, as in training, with
their output in the run's logs; one that fails costs its episode.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Agent
from dreamfleet.agents.registry import AgentType
from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.envs import Wrapper, env_seed, make_env, make_visible_env, renderer
from dreamfleet.envs.registry import Task, by_number, make_lanes, name_of
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.files import atomic_write, temporary_folder
from dreamfleet.fleet.play import eval_environments
from dreamfleet.fleet.supervisor import Say
from dreamfleet.metrics.evaluations import Evaluation, append_evaluation, evaluation_of
from dreamfleet.metrics.frames import Mp4Writer, enlarged, find_encoder, labelled
from dreamfleet.policy import Policy, maker_of_task, run_of
from dreamfleet.roles.episodes import EpisodeServer, groups_of
from dreamfleet.settings import Count, CountOrZero, convert
from dreamfleet.spaces import RESET
from dreamfleet.trust import Trust

__all__ = ["Evaluation", "EvaluationError", "EvaluationInterrupted", "evaluate"]

log = logging.getLogger(__name__)


_SEEDS_FROM = 1_000_000
_SAY_SECONDS = 10.0


class EvaluationError(DreamfleetError):
    """Every episode failed; the message shows the first error."""


class EvaluationInterrupted(KeyboardInterrupt):
    """The user ended an evaluation."""

    def __init__(self, result: Evaluation | None) -> None:
        super().__init__()
        self.result = result
        """What was played until then; None if no episode has ended."""


def evaluate(
    policy: Policy | Path | str,
    env_or_episodes: Task | int | None = None,
    *,
    episodes: int = 10,
    env: Task | None = None,
    envs: int = 0,
    max_steps: int = 0,
    agent: Agent | AgentType[Any] | str | None = None,
    greedy: bool = False,
    seed: int = 0,
    video: Path | str | None = None,
    fps: float = 20.0,
    trust: Trust = False,
    logdir: Path | str | None = None,
    kind: str = "asked",
    start: float | None = None,
    say: Say = log.info,
) -> Evaluation:
    """Play complete episodes with a trained agent, in new environments.

    This is also what the command, the page and the end of a run do. The run may be under way: it is
    not claimed, and may be read-only.

    Args:
        policy: A run's directory, a checkpoint, or a policy that was loaded from one.
        env_or_episodes: One of the next two, without its name.
        episodes: How many.
        env: What makes the environments, a task or a class or a function; None for the task that
            the policy was trained on, if that is part of this package.
        envs: Environments at the same time, no more of which are made; 0 for the run's `eval_envs`,
            or as many as it trained with.
        max_steps: Steps after which an episode is cut short; 0 for the run's `eval_max_steps`.
        agent: For an agent of your own, see `Policy.load`.
        greedy: Take the mode of the policy instead of samples.
        seed: Another seed plays other episodes.
        video: Record the first episode to this file.
        fps: Frames a second of the video.
        trust: Import code of others that the checkpoint names: environment, agent and networks.
        logdir: The run's directory, which gets the environments' output, and a line about the
            result in `evaluations.jsonl`; None for the one that the policy is loaded from.
        kind: Why it is played, for that line; empty for no line.
        start: Since when its seconds count, by `time.monotonic`; None for now.
        say: Takes lines that tell how far it is.

    Raises:
        ConfigError: There is no checkpoint, or a setting cannot work.
        EvaluationError: Every episode failed.
        EvaluationInterrupted: Ctrl-C, as a KeyboardInterrupt with what was played until then.
    """
    if isinstance(env_or_episodes, (int, float, np.number)):
        episodes = env_or_episodes
    elif env_or_episodes is not None:
        env = env_or_episodes
    logdir, video = Path(logdir) if logdir else None, Path(video) if video else None
    if not isinstance(policy, Policy):
        logdir = logdir or Path(policy)
        policy = Policy.load(policy, agent=agent, greedy=greedy, trust=trust)
    elif agent is not None or greedy:
        raise ConfigError("The policy is already loaded: pass agent and greedy to Policy.load.")
    episodes = convert("episodes", episodes, Count)
    envs = convert("envs", envs, CountOrZero)
    max_steps = convert("max_steps", max_steps, CountOrZero)
    seed = convert("seed", seed, CountOrZero)
    if video:
        if video.suffix != ".mp4":
            raise ConfigError(f"video={video} is not valid: its name must end in .mp4.")
        find_encoder()  # fails here and now if there is none
    if policy.blueprint is None:
        raise ConfigError("The policy does not name its task: load it from a checkpoint.")
    config, start = policy.blueprint.config, start or time.monotonic()
    maker = maker_of_task(config, env, trust=trust)
    task = config.task if env is None else name_of(env)
    max_steps = max_steps or config.eval_max_steps
    count = min(envs or config.eval_envs or config.envs, episodes)
    with _folder(logdir) as (folder, kept), temporary_folder() as private:
        recording = None
        if video:
            title = f"{task} step {policy.step:,}"
            recording = _Recording(video.absolute(), fps, task, title, private / "recorded")
        make: Callable[..., Any] = partial(_environment, maker, config, seed, recording)
        if recording is None:  # a video shows one environment
            make = by_number(make, maker, config.env_options)
        run = replace(config, logdir=private)
        groups = groups_of(range(count), config.envs_per_process)
        with eval_environments(make, groups, run, max_steps, folder) as server:
            some = "1 environment" if count == 1 else f"{count} environments"
            where = f"; their output: {folder / 'logs'}" if kept else ""
            say(f"Evaluating: {episodes} episodes in {some}{where}")
            due = LocalClock(_SAY_SECONDS)
            interrupted = False
            try:
                played = server.play(
                    policy.agent,
                    policy.mode,
                    episodes,
                    lambda: say(_progress(server, episodes)) if due() else None,
                )
            except KeyboardInterrupt:
                interrupted, played = True, server.played()
        video_error = recording.problem() if recording else ""
    found = evaluation_of(
        played,
        task=task,
        step=policy.step,
        protocol=policy.protocol,
        seed=seed,
        max_steps=max_steps,
        video_error=video_error,
        partial=interrupted,
    )
    if found and kept and kind:
        about = {"kind": kind, "seconds": round(time.monotonic() - start, 1)}
        keep(say, "The result", partial(append_evaluation, folder, found, **about))
    if interrupted:
        raise EvaluationInterrupted(found)
    if found is None:
        raise EvaluationError(
            f"All {episodes} episodes failed. The first error was:\n{played[0].error}"
        )
    return found


def _progress(server: EpisodeServer, episodes: int) -> str:
    """How far an evaluation is."""
    played = server.played()
    scores = [each.episode.score for each in played if each.episode is not None]
    mean = f", mean score so far {sum(scores) / len(scores):.4g}" if scores else ""
    failed = f", {len(played) - len(scores)} failed" if len(played) > len(scores) else ""
    return f"{len(played)} of {episodes} episodes, {server.steps:,} steps{failed}{mean}"


def keep(say: Say, what: str, write: Callable[[], object]) -> None:
    """Write what would not be worth an error, or say that it is not kept."""
    try:
        write()
    except Exception as error:  # of an output it may be any
        reason = error.strerror if isinstance(error, OSError) else None
        say(f"{what} could not be written: {str(reason or error).rstrip('.')}.")
        log.debug("%s could not be written", what, exc_info=error)


# --- environments --------------------------------------------------------------------------------


def _environment(
    maker: Task,
    config: RunConfig,
    seed: int,
    recording: _Recording | None,
    envid: int,
    attempt: int = 0,
    lanes: int = 0,
) -> Any:
    """An environment of an evaluation; the first one is recorded if a video is wanted. One that is
    built again has another seed, and plays other episodes."""
    at = env_seed(config.seed + seed, _SEEDS_FROM + envid)
    if attempt:
        at = env_seed(at, attempt)
    if recording and envid == 0 and not recording.over:
        env = make_visible_env(maker, seed=at, **config.env_options)
        return _Recorded(env, recording)
    if lanes:
        return make_lanes(maker, lanes, seed=at, **config.env_options)
    return make_env(maker, seed=at, **config.env_options)


@contextmanager
def _folder(logdir: Path | None) -> Iterator[tuple[Path, bool]]:
    """Where logs and the result go, and whether they stay there: into the run's directory, or
    nowhere if there is none to write to."""
    run = run_of(logdir) if logdir else None
    if run and (run / "ckpt" / "agent").is_dir() and os.access(run, os.W_OK):
        yield run, True
        return
    with temporary_folder("dreamfleet-eval-") as temporary:
        yield temporary, False


# --- video ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recording:
    """The video of the first episode. The process of its environment makes it, and leaves a note
    when it is done, which says why there is none if that failed."""

    path: Path
    fps: float
    task: str
    title: str
    note: Path

    @property
    def over(self) -> bool:
        return self.note.exists()

    def done(self, problem: str = "") -> None:
        atomic_write(self.note, problem)

    def problem(self) -> str:
        """Why there is no video; empty if there is one."""
        if not self.over:
            return "No episode of the first environment ended."
        return self.note.read_text()


class _Recorded(Wrapper):
    """Records the first episode: frames with a line above them that says the task, the step and
    the return so far. A video that fails costs no score."""

    def __init__(self, env: Wrapper, recording: _Recording) -> None:
        super().__init__(env)
        self._recording, self._frame_of = recording, renderer(env)
        self._writer = Mp4Writer(recording.path, fps=recording.fps, title=recording.title)
        self._score, self._frames = 0.0, 0

    def step(self, action: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        if self._frames and action[RESET]:  # it was cut short
            self._try(self._end)
        obs = self.env.step(action)
        self._try(partial(self._record, obs))
        if obs["is_last"]:
            self._try(self._end)
        return obs

    def _try(self, write: Callable[[], None]) -> None:
        """Write to the video, unless it is over; an error is its end."""
        if self._recording.over:
            return
        try:
            write()
        except Exception as error:
            with suppress(Exception):  # it may be the end of the file that fails
                self._writer.__exit__(error)
            self._recording.done(str(error) if isinstance(error, DreamfleetError) else repr(error))

    def _record(self, obs: dict[str, NDArray[Any]]) -> None:
        frame = self._frame_of(obs)
        if frame is None:
            raise ConfigError(
                f"{self._recording.task} renders no frames: give its constructor a parameter "
                'render_mode, and return a frame from render() if that is "rgb_array".'
            )
        self._frames += 1
        self._score += float(obs["reward"])
        line = f"{self._recording.title}  return {self._score:<8.5g}"
        self._writer.add(labelled(enlarged(frame), line))

    def _end(self) -> None:
        self._writer.__exit__()
        self._recording.done()

    def close(self) -> None:
        if self._frames:
            self._try(self._end)
        super().close()
