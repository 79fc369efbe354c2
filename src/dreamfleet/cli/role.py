"""`dreamfleet role NAME`."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Annotated, Any, Literal

from dreamfleet.cli.console import say
from dreamfleet.config import RunConfig, read_config, read_config_file
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.factories import factories
from dreamfleet.fleet.play import parallel_evaluator
from dreamfleet.parallel import parallel_envs
from dreamfleet.resuming import differences, with_changes
from dreamfleet.roles.agent import parallel_agent
from dreamfleet.roles.logger import parallel_logger
from dreamfleet.roles.replay import parallel_replay
from dreamfleet.roles.runtime import end_signals
from dreamfleet.roles.scaling.remote_actor import parallel_remote_actor
from dreamfleet.roles.spaces_file import read_spaces
from dreamfleet.settings import Count, Mark

Name = Literal["actor", "agent", "env", "evaluator", "logger", "replay"]


def role(
    name: Name,
    /,
    config: Path | None = None,
    first: int = 0,
    count: int | None = None,
    number: Count = 1,
    shard: int = 0,
    trust: bool = False,
    **settings: Annotated[Any, Mark.PER_ROLE],
) -> None:
    """Run one role of a run by hand: on a second computer, under Slurm or under Kubernetes.

    Every role needs the run's config.json, which 'dreamfleet train' writes, and, if the run uses
    tcp, a copy of its file 'keys', with mode 600. Settings that differ here, such as an address,
    may be changed; each change is printed.

    Args:
        name: agent (acts and learns), actor (acts only; one of several `actors`), env
            (environments), evaluator, logger or replay.
        config: The run's config.json; the one in the logdir if not given.
        first: Of the environments: the id of the first one that is started here.
        count: Of the environments: how many are started here; the rest if not given.
        number: Of the actors: which one is started here; number 0 is a part of the agent.
        shard: Of the replay: which of its replay_shards is started here.
        trust: Import code outside of Dreamfleet that the config.json names, such as your own
            environment.
    """
    before, source = _read(config, settings.get("logdir"))
    args = with_changes(before, settings, trust=trust, source=source, may_state=())
    # Fails here and now if the key cannot be read.
    args.run_keys  # noqa: B018
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    there = source if source.is_dir() else source.parent
    parts = factories(args, spaces=read_spaces(args, there))
    say(f"Running {name} of {args.task}")
    for line in differences(before, args):
        say(line)
    if name == "env":
        ids = range(first, args.all_envs if count is None else first + count)
        parallel_envs(parts.make_env_train, parts.make_env_eval, args, say, ids)
        return
    # Ctrl-C and a closed terminal end a role as it is ended in a fleet: it saves first.
    for each in set(end_signals()) - {signal.SIGTERM}:
        signal.signal(each, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    if name == "replay":
        buffers = parts.make_replay_train, parts.make_replay_eval
        parallel_replay(*buffers, parts.make_stream, args, shard)
    elif name == "logger":
        parallel_logger(parts.make_logger, args)
    elif name == "evaluator":
        parallel_evaluator(parts.make_env_eval, args)
    elif name == "actor":
        if number >= args.actors:
            raise ConfigError(f"The run has actors={args.actors}, numbered from 0: not {number}.")
        parallel_remote_actor(parts.make_agent, number, args)
    else:
        parallel_agent(parts.make_agent, args)


def _read(config: Path | None, logdir: Path | None) -> tuple[RunConfig, Path]:
    if config is not None:
        return read_config_file(config), config
    if logdir is None:
        raise ConfigError("Name the run: --logdir DIR, or --config FILE.")
    return read_config(logdir), logdir
