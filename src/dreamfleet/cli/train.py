"""`dreamfleet train`."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dreamfleet.cli.console import say
from dreamfleet.cli.evaluation import play
from dreamfleet.cli.live import live
from dreamfleet.cli.options import parse_settings
from dreamfleet.cli.preflight import preflight
from dreamfleet.config import OutputName, RunConfig
from dreamfleet.errors import ConfigError, DreamfleetError, install_command
from dreamfleet.fleet.factories import environment, factories
from dreamfleet.fleet.record import claim_directory
from dreamfleet.offline import find_source
from dreamfleet.parallel import combined
from dreamfleet.policy import Policy
from dreamfleet.presets import preset as find_preset

_EVAL_EPISODES = 20


def train(
    task: str | None = None,
    preset: str = "default",
    logdir: Path | None = None,
    steps: int | None = None,
    duration: float | None = None,
    target_score: float | None = None,
    seed: int | None = None,
    launcher: Literal["local", "serial"] | None = None,
    agent: str | None = None,
    envs: int | None = None,
    eval_envs: int | None = None,
    envs_per_process: int | None = None,
    train_ratio: float | None = None,
    batch_size: int | None = None,
    batch_length: int | None = None,
    log_every: float | None = None,
    report_every: float | None = None,
    save_every: float | None = None,
    outputs: tuple[OutputName, ...] | None = None,
    from_checkpoint: str | None = None,
    from_checkpoint_regex: str | None = None,
    on_failure: Literal["restart", "stop"] | None = None,
    eval_episodes: int | None = None,
    actor_addr: str | None = None,
    replay_addr: str | None = None,
    logger_addr: str | None = None,
    keys: Path | None = None,
    remote_envs: bool = False,
    remote_replay: bool = False,
    env_options: tuple[str, ...] = (),
    offline: tuple[Path, ...] = (),
    prefill: tuple[Path, ...] = (),
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = (),
) -> None:
    """Train an agent with a fleet of processes. The same command again goes on where it ended.

    Without arguments it trains Dreamer on gym:CartPole-v1. What is not given is taken from the
    preset.

    Args:
        task: Such as gym:CartPole-v1, dmc:walker_walk or my_package.my_module:my_factory.
        preset: default (two cores), pixels, dmc_proprio, debug or published (an accelerator).
        logdir: Where the run keeps everything; runs/TASK if not given.
        steps: Environment steps after which the run ends; 0 for no end.
        duration: Seconds after which the run ends; 0 for no end.
        target_score: Mean score of the last 20 episodes at which the run ends.
        seed: Of the agent, the environments and the replay's draws.
        launcher: local (every role a process) or serial (one process, for a debugger).
        agent: Who acts and learns.
        envs: Environments that collect training data.
        eval_envs: Environments whose data is kept apart.
        envs_per_process: Environments that share a process.
        train_ratio: Replayed steps trained on per environment step; 0 for no limit.
        batch_size: Sequences in a training batch.
        batch_length: Steps in a training sequence.
        log_every: Seconds between two lines and two writes of metrics.
        report_every: Seconds between two reports and two videos; 0 for none.
        save_every: Seconds between two checkpoints.
        outputs: Where metrics go: jsonl, media, tensorboard, wandb.
        from_checkpoint: A run's directory, or a checkpoint, that a new run starts from.
        from_checkpoint_regex: Which entries of it are taken, matched from their start.
        on_failure: Whether a process that fails is started again, or ends the run.
        eval_episodes: Episodes of the evaluation at the end; 20 if not given, with --offline 0.
        actor_addr: Where the actor listens, such as tcp://10.0.0.5:5551; others connect to it.
        replay_addr: Where the replay listens.
        logger_addr: Where the logger listens.
        keys: File of the run key, which tcp needs; made in the logdir if not given.
        remote_envs: Leave the environments out; start them with 'dreamfleet role env'.
        remote_replay: Leave the replay out; start it with 'dreamfleet role replay'.
        env_options: Options of the environment, such as repeat=2 size=[64,64].
        offline: Learn from the steps of these runs alone; --steps then counts updates.
        prefill: Runs whose steps a new run begins with.
        settings: Any other settings, such as replay.capacity=100000.
    """
    given: dict[str, object] = {
        "task": task,
        "logdir": logdir,
        "steps": steps,
        "duration": duration,
        "target_score": target_score,
        "seed": seed,
        "launcher": launcher,
        "agent": agent,
        "envs": envs,
        "eval_envs": eval_envs,
        "envs_per_process": envs_per_process,
        "train_ratio": train_ratio,
        "batch_size": batch_size,
        "batch_length": batch_length,
        "log_every": log_every,
        "report_every": report_every,
        "save_every": save_every,
        "outputs": outputs,
        "from_checkpoint": from_checkpoint,
        "from_checkpoint_regex": from_checkpoint_regex,
        "on_failure": on_failure,
        "actor_addr": actor_addr,
        "replay_addr": replay_addr,
        "logger_addr": logger_addr,
        "keys": None if keys is None else str(keys),
        "remote_envs": remote_envs or None,
        "remote_replay": remote_replay or None,
    }
    if eval_episodes is None:
        eval_episodes = 0 if offline else _EVAL_EPISODES
    if offline:
        theirs = find_source(offline[0]).blueprint.config if not prefill else RunConfig()
        given |= {"task": task or theirs.task, "env_options": theirs.env_options}
        given["offline"] = tuple(map(str, offline))
        given["logdir"] = logdir or Path(f"{offline[0]}-offline")
    if prefill:
        given["prefill"] = tuple(map(str, prefill))
    config = _configure(preset, given)
    options = {**config.env_options, **parse_settings(env_options)}
    config = config.changed({**parse_settings(settings), "env_options": options})
    if eval_episodes < 0:
        raise ConfigError(f"--eval-episodes={eval_episodes} is negative: use 0 for none.")
    _check_outputs(config)
    preflight(config, partial(environment, config))
    say(f"Training {config.agent} on {config.task}; everything goes to {config.logdir}")
    start = time.monotonic()
    with claim_directory(config.logdir), live(config.logdir) as progress:
        combined(**factories(config), args=config, say=say, progress=progress)
    if eval_episodes:
        _evaluate(config, eval_episodes, start)
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    say(f"Took {minutes}:{seconds:02}. Results: {config.logdir}")


def _configure(preset: str, given: Mapping[str, object]) -> RunConfig:
    base = find_preset(preset)
    chosen = {key: value for key, value in given.items() if value is not None}
    if "envs" in chosen or "eval_envs" in chosen:
        # The preset's batch was meant for its own number of environments.
        chosen.setdefault("actor_batch", 0)
    if "batch_length" in chosen:
        length = int(str(chosen["batch_length"]))
        chosen["report_length"] = min(base.report_length, length)
    if "logdir" not in chosen:
        name = str(chosen.get("task", base.task)).replace(":", "-").replace("/", "-")
        chosen["logdir"] = Path("runs") / name
    return base.changed(chosen)


def _check_outputs(config: RunConfig) -> None:
    for name, module in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if name in config.outputs and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"The output {name!r} needs a package that is not installed: "
                f"{install_command(name)}"
            )


def _evaluate(config: RunConfig, episodes: int, start: float) -> None:
    """Play the saved policy, and keep the result and a video of the first episode."""
    policy = Policy.load(config.logdir, agent=config.agent)
    video = config.logdir / "media" / "evaluation" / f"{policy.step:012d}.mp4"
    note = ""
    try:
        wanted = "media" in config.outputs
        result = play(policy, episodes, video=video if wanted else None)
        if wanted:
            note = f"Video of its first episode: {video}"
    except Exception as reason:
        # Whatever is wrong with the video, the scores that the training was for are not lost. If it
        # was not the video, the error comes again.
        result = play(policy, episodes)
        told = reason if isinstance(reason, DreamfleetError) else repr(reason)
        note = f"There is no video: {told}"
    with (config.logdir / "evaluations.jsonl").open("a") as file:
        seconds = round(time.monotonic() - start, 1)
        file.write(json.dumps({**result.record(), "seconds": seconds}) + "\n")
    low, high = min(result.returns), max(result.returns)
    say(f"Evaluation: mean score {result.summary()}, lowest {low:.4g}, highest {high:.4g}")
    if note:
        say(note)
