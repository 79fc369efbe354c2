"""Refuse runs that cannot work before anything is started, with the numbers that conflict."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dreamfleet.agents.dreamer.features import observed
from dreamfleet.agents.registry import BUILT_IN
from dreamfleet.checkpoint import Checkpoint, MissingPartError
from dreamfleet.config import OUTPUTS, RunConfig, read_config
from dreamfleet.envs.registry import same_task
from dreamfleet.errors import ConfigError, install_command
from dreamfleet.fleet.factories import environment
from dreamfleet.fleet.isolated import EnvProbe, probe_env, probe_in_subprocess
from dreamfleet.fleet.launchers import find_launcher
from dreamfleet.fleet.workers import env_workers
from dreamfleet.formatting import readable
from dreamfleet.memory import memory_free
from dreamfleet.metrics.outputs.prometheus import check_port
from dreamfleet.offline import check_sources, find_source
from dreamfleet.policy import Spaces, find_checkpoint, read_blueprint
from dreamfleet.presets import PRESETS
from dreamfleet.resuming import differences, holds_run, shortened
from dreamfleet.roles.addresses import SERVERS, listen_address
from dreamfleet.roles.progress import limiter_for
from dreamfleet.roles.serial import takes_turns
from dreamfleet.roles.spaces_file import read_spaces
from dreamfleet.settings import Mark, load_object
from dreamfleet.spaces import space_differences, summary, without_logs, without_reset
from dreamfleet.transport.address import parse
from dreamfleet.transport.wire import MAX_MESSAGE

log = logging.getLogger(__name__)

_PROCESS_BYTES = 40_000_000  # of environments, before these are made
_OTHER_DISK_BYTES = 100_000_000  # checkpoints of a small model, metrics, logs, some videos
_FOR_VECTORS = (
    "Warning: these are the settings for vectors, and the task has images: --preset pixels is for "
    "images."
)


def preflight(
    config: RunConfig,
    make_env: Callable[[int], Any] | None = None,
    say: Callable[[str], None] = log.info,
) -> EnvProbe:
    """Probe the environment, and refuse a run that cannot work or does not fit on this machine.

    Args:
        config: The run.
        make_env: Called with an environment's number; None for the environment of the task.
        say: Takes lines to print; the first one before the environment is made.

    Raises:
        ConfigError: Something does not fit; the message holds the numbers and the fix.
        AddressError: A server cannot listen at its address.
        DreamfleetError: The environment cannot be made, or the agent cannot be made for it.
    """
    launcher = find_launcher(config.launcher)
    check_outputs(config)
    check_place(config.logdir)
    check_directory(config)
    check_replay(config)
    on_this_machine = not launcher.default_address.startswith("tcp:")
    if on_this_machine:
        for role in SERVERS:
            parse(listen_address(config, role))  # an invalid one would fail its role at every start
    check_sources(config)
    check_checkpoint(config)
    say(f"Training {config.agent} on {config.task}; everything goes to {config.logdir}")
    if config.offline:
        blueprint = find_source(config.offline[0]).blueprint
        probe = EnvProbe(blueprint.obs_space, blueprint.act_space)
    else:
        probe = _probe(config, make_env or partial(environment, config, None), say)
    spaces = probe.spaces
    check_agent(config, *spaces)
    check_messages(config, *spaces)
    if config.offline:
        return probe
    check_spaces(config, *spaces)
    if on_this_machine:
        check_memory(config, probe.bytes, probe.further_bytes)
    check_disk(config, *spaces)
    images = any(space.image for space in observed(probe.obs_space).values())
    if images and config.agent_config == PRESETS["default"].agent_config:
        probe = probe._replace(notes=[*probe.notes, _FOR_VECTORS])
    return probe


def _probe(
    config: RunConfig, make_env: Callable[[int], Any], say: Callable[[str], None]
) -> EnvProbe:
    known = read_spaces(config, config.logdir) if config.remote_envs else None
    if known:  # the environments are elsewhere; the only one may be in use
        return EnvProbe(*known)
    both = config.all_envs > 1 and not config.remote_envs
    if config.launcher == "serial":
        return probe_env(make_env, both=both)
    apart = min(config.envs_per_process, max(config.envs, config.eval_envs)) == 1
    return probe_in_subprocess(
        make_env, both=both, apart=apart, timeout=config.env_timeout, say=say
    )


def column_bytes(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> dict[str, int]:
    """Bytes of each key of a step in the replay."""
    agent = config.agent_type
    stored = agent.stored_space(obs_space, act_space, config.settings_of(agent))
    columns = {**without_logs(obs_space), **without_reset(act_space), **stored}
    return {key: space.dtype.itemsize * math.prod(space.shape) for key, space in columns.items()}


def step_bytes(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> int:
    """Bytes of a step in the replay, with its tick."""
    return 8 + sum(column_bytes(config, obs_space, act_space).values())


def replay_bytes(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> float:
    """Bytes of the files of both replays when they are full, or when the run ends."""
    replay, needed = config.replay, 0.0
    step = step_bytes(config, obs_space, act_space)
    for envs, capacity in (
        (config.envs, replay.capacity),
        (config.all_envs - config.envs, replay.evaluation_capacity),
    ):
        # Each environment has a file that is not full yet.
        collected = config.steps * envs / config.envs + envs * replay.chunk
        kept = min(collected, capacity) if config.steps else capacity * bool(envs)
        needed += min(kept * step, replay.max_bytes or math.inf)
    return needed


def check_outputs(config: RunConfig) -> None:
    """An output whose package is missing, or whose port is in use, would end the logger."""
    if config.metrics_port and config.launcher != "ray":
        check_port(config.metrics_port)
    for name, module in (("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        if name in config.outputs and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"The output {name!r} needs a package that is not installed: "
                f"{install_command(name)}"
            )
    for name in set(config.outputs) - set(OUTPUTS):
        if not callable(load_object(name)):
            raise ConfigError(f"The output {name} is not callable: name a class or a function.")


def check_place(logdir: Path) -> None:
    """Every process writes to the run's directory."""
    there = _nearest(logdir)
    if not there.is_dir():
        raise ConfigError(
            f"{there} is a file, or a link to nothing, and the run keeps everything in the "
            f"directory {logdir}: choose another --logdir."
        )
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{there} cannot be written to ({error.strerror}): fix its permissions, or choose "
            "another --logdir."
        ) from None


def _nearest(logdir: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    there = logdir.absolute()
    while not os.path.lexists(there):
        there = there.parent
    return there


def check_directory(config: RunConfig) -> None:
    """A directory belongs to one run: another task or agent could not resume it."""
    if not holds_run(config.logdir):
        return
    there = read_config(config.logdir)
    before = {each.path: each.value for each in there.settings(mark=Mark.FIXED)}
    for name, ours in ((each.path, each.value) for each in config.settings(mark=Mark.FIXED)):
        theirs = before.get(name)
        if theirs != ours and not (name == "task" and same_task(there.task, config.task)):
            raise ConfigError(
                f"{config.logdir} holds a run with {name} {theirs}, not {ours}: choose another "
                "--logdir, or the settings of that run."
            )
    agent = config.agent_type
    if not agent.can_load(config.settings_of(agent), there.settings_of(agent)):
        lines = [each for each in differences(there, config) if each.startswith(f"{agent.name}.")]
        raise ConfigError(
            f"{config.logdir} holds parameters of an agent of another size, so these settings "
            f"cannot be changed: {shortened(lines)}. Leave them out, or choose another --logdir."
        )


def check_replay(config: RunConfig) -> None:
    """Training starts when the replay holds a batch: a replay that never does would block it."""
    needed = int(limiter_for(config).minsize)
    if needed > config.replay.capacity:
        raise ConfigError(
            f"A batch of batch_size={config.batch_size} sequences of {config.window} steps needs "
            f"at least {needed:,} stored steps with envs={config.envs}, and "
            f"replay.capacity={config.replay.capacity:,} holds fewer: raise the capacity, or lower "
            "batch_size or batch_length."
        )


def check_checkpoint(config: RunConfig) -> None:
    """The checkpoint that a new run starts from exists. A resumed run no longer needs it."""
    if not config.from_checkpoint or Checkpoint(config.logdir / "ckpt" / "agent").latest():
        return
    find_checkpoint(Path(config.from_checkpoint), parts=())
    try:
        re.compile(config.from_checkpoint_regex)
    except re.error as error:
        raise ConfigError(
            f"from_checkpoint_regex={config.from_checkpoint_regex} is not a regular expression: "
            f"{error}."
        ) from None


def check_agent(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> None:
    """An agent that cannot be made would fail until the fleet gives up."""
    agent = config.agent_type
    settings = config.settings_of(agent)
    if config.hosts > 1 and not agent.many_hosts:
        raise ConfigError(f"The agent {config.agent} learns on one host: set hosts=1.")
    agent.check(obs_space, act_space, settings)
    if config.replay.fractions.priority > 0 and not agent.sends_priority(settings):
        name = agent.priority_setting
        fix = f"set {agent.name}.{name}, or set it to 0." if name else "set it to 0."
        raise ConfigError(
            f"replay.fractions.priority={config.replay.fractions.priority} needs priorities, and "
            f"the agent {config.agent} sends none: {fix}"
        )


def check_messages(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> None:
    """A batch that no message can hold would fail the agent until the fleet gives up."""
    if config.launcher == "serial":
        return
    rows = max(config.host_batch * config.window, config.envs, config.message_steps)
    for key, size in column_bytes(config, obs_space, act_space).items():
        if rows * size > MAX_MESSAGE:
            raise ConfigError(
                f"A message of this run holds up to {rows:,} steps, {readable(rows * size)}B of "
                f"{key!r}, and the limit is {readable(MAX_MESSAGE)}B: make it smaller, images with "
                "--env-options size=[64,64], or lower batch_size, batch_length or envs."
            )


def check_spaces(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> None:
    """Parameters and stored steps have the shapes of the environment that the run started with."""
    try:
        saved = read_blueprint(config.logdir)
    except MissingPartError:  # of an older version
        return
    if saved is None:
        return
    for what, key, before, now in space_differences(
        (saved.obs_space, saved.act_space), (obs_space, act_space)
    ):
        # A user's agent may leave some of the keys out.
        if before != summary(None) or config.agent in BUILT_IN:
            raise ConfigError(
                f"{config.task} has other {what}s than the run in {config.logdir} was trained "
                f"with: {key!r} was {before} and is {now}. Make the environment as it was, or "
                "choose another --logdir."
            )


def check_memory(
    config: RunConfig, env_bytes: float, further_bytes: float, available: int | None = None
) -> None:
    """Environments that do not fit would be killed by the machine one after the other. The first
    one of a process takes more memory: the code that it loads."""
    if config.remote_envs or takes_turns(config):
        return
    processes = len(env_workers(print, print, config))
    needed = processes * (_PROCESS_BYTES + env_bytes)
    needed += (config.all_envs - processes) * further_bytes
    free = memory_free() if available is None else available
    if needed > free:
        raise ConfigError(
            f"{config.all_envs} environments in {processes} processes of about "
            f"{needed / processes / 1e6:.0f} MB need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} "
            "GB of memory are free: use fewer envs, or more envs_per_process."
        )


def check_disk(
    config: RunConfig, obs_space: Spaces, act_space: Spaces, free: int | None = None
) -> None:
    """A replay that fills the disk would end the run in the middle."""
    there = _nearest(config.logdir)
    room = shutil.disk_usage(there).free if free is None else free
    step = step_bytes(config, obs_space, act_space)
    needed = 0.0
    if not config.remote_replay:
        needed = replay_bytes(config, obs_space, act_space)
        folders = ("replay", "eval_replay", "replay-*", "eval_replay-*")
        taken = [path for name in folders for path in config.logdir.glob(f"{name}/*")]
        room += sum(path.stat().st_size for path in taken)
    if needed + _OTHER_DISK_BYTES > room:
        raise ConfigError(
            f"The replay takes {readable(needed)}B of disk when it is full, at {step:,} bytes a "
            f"step, everything else about {readable(_OTHER_DISK_BYTES)}B, and {there} has room for "
            f"{readable(room)}B: make room, lower replay.capacity ({config.replay.capacity:,} "
            "steps), bound the files with replay.max_bytes, or choose another --logdir."
        )
