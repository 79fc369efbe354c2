"""`dreamfleet role NAME`."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dreamfleet.cli.console import say
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.factories import factories
from dreamfleet.parallel import parallel_envs
from dreamfleet.roles.agent import parallel_agent
from dreamfleet.roles.logger import parallel_logger
from dreamfleet.roles.replay import parallel_replay

Name = Literal["agent", "env", "logger", "replay"]


def role(
    name: Name,
    /,
    logdir: Path | None = None,
    config: Path | None = None,
    keys: Path | None = None,
    actor_addr: str | None = None,
    replay_addr: str | None = None,
    logger_addr: str | None = None,
    first: int = 0,
    count: int | None = None,
) -> None:
    """Run one role of a run by hand: on a second computer, under Slurm or under Kubernetes.

    Every role needs the run's config.json, which 'dreamfleet train' writes, and, if the run uses
    tcp, a copy of its file 'keys', with mode 600.

    Args:
        name: agent (acts and learns), env (environments), logger or replay.
        logdir: Where this role keeps what it writes; that of the configuration if not given.
        config: The run's config.json; the one in the logdir if not given.
        keys: The run key; the one of the configuration if not given.
        actor_addr: Where the actor is, if it is reached by another address from here.
        replay_addr: Where the replay is, likewise.
        logger_addr: Where the logger is, likewise.
        first: Of the environments: the id of the first one that is started here.
        count: Of the environments: how many are started here; the rest if not given.
    """
    given = {
        "logdir": logdir,
        "keys": None if keys is None else str(keys),
        "actor_addr": actor_addr,
        "replay_addr": replay_addr,
        "logger_addr": logger_addr,
    }
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    args = replace(_read(config, logdir), **chosen)
    # Fails here and now if the key cannot be read.
    args.run_keys  # noqa: B018
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    parts = factories(args)
    say(f"Running {name} of {args.task}")
    if name == "env":
        ids = range(first, args.all_envs if count is None else first + count)
        parallel_envs(parts["make_env_train"], parts["make_env_eval"], args, say, ids)
        return
    # Ctrl-C ends a role as it is ended in a fleet: it saves first.
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    if name == "replay":
        buffers = parts["make_replay_train"], parts["make_replay_eval"]
        parallel_replay(*buffers, parts["make_stream"], args)
    elif name == "logger":
        parallel_logger(parts["make_logger"], args)
    else:
        parallel_agent(parts["make_agent"], args)


def _read(config: Path | None, logdir: Path | None) -> RunConfig:
    if config is None and logdir is None:
        raise ConfigError("Say which run it is: --logdir DIR, or --config FILE.")
    path = config or Path(str(logdir)) / "config.json"
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    # Whoever runs a role of it wants the code that it names.
    return RunConfig.from_json(text).resolved()
