"""The fleet's functions on one page.

    combined          everything, under the supervisor
    parallel_agent    one agent object, shared by an actor thread and a learner thread
    parallel_actor    the batched inference server
    parallel_learner  the training loop
    parallel_replay   the replay server
    parallel_logger   the metrics server
    parallel_env      one environment, or several that are stepped together
    parallel_envs     all environments of one machine
    parallel_evaluator  rounds of evaluation while the run trains

Each role may run anywhere: all it needs are its factories and a `RunConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamfleet.checkpoint import Checkpoint, CheckpointError
from dreamfleet.config import CONFIG_FILE, RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.files import atomic_write
from dreamfleet.fleet.launchers import Launcher, find_launcher
from dreamfleet.fleet.status import StatusLines, Watcher
from dreamfleet.fleet.supervisor import Say, Supervisor, silent
from dreamfleet.fleet.workers import env_workers, fleet_workers
from dreamfleet.roles.actor import parallel_actor
from dreamfleet.roles.addresses import SERVERS, listen_address, remove_addresses
from dreamfleet.roles.agent import parallel_agent
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.evaluator import parallel_evaluator
from dreamfleet.roles.learner import parallel_learner
from dreamfleet.roles.logger import parallel_logger
from dreamfleet.roles.replay import parallel_replay
from dreamfleet.roles.runtime import Factory
from dreamfleet.transport import Keys

__all__ = [
    "combined",
    "parallel_actor",
    "parallel_agent",
    "parallel_env",
    "parallel_envs",
    "parallel_evaluator",
    "parallel_learner",
    "parallel_logger",
    "parallel_replay",
]


def combined(
    make_agent: Factory,
    make_replay_train: Factory,
    make_replay_eval: Factory,
    make_env_train: Factory,
    make_env_eval: Factory,
    make_stream: Factory,
    make_logger: Factory,
    args: RunConfig,
    say: Say = silent,
    progress: Say | None = None,
    tick: Callable[[], None] | None = None,
) -> None:
    """Run the whole fleet under the supervisor; returns when the run is over.

    Args:
        make_agent: Returns the agent.
        make_replay_train, make_replay_eval: Return the buffers.
        make_env_train, make_env_eval: Called with an environment's id.
        make_stream: Called with a buffer and a mode, returns an iterator of batches.
        make_logger: Returns the output of metrics.
        args: The run.
        say: Takes lines for the person.
        progress: Takes the lines that tell now and then how far the run is; None for `say`.
        tick: Called every `log_every` seconds. What it raises ends the run in order, and is raised
            then.

    Raises:
        FleetError: A worker failed, and the run ended because of it.
        KeyboardInterrupt: SIGINT or SIGTERM ended the run; everything is saved.
    """
    launcher = find_launcher(args.launcher)(args.logdir)
    run = _prepared(args, launcher)
    buffers = make_replay_train, make_replay_eval
    envs = make_env_train, make_env_eval
    workers = fleet_workers(make_agent, *buffers, *envs, make_stream, make_logger, run)
    supervisor = Supervisor(
        workers,
        launcher,
        logdir=run.logdir,
        launcher_name=run.launcher,
        duration=run.duration,
        say=say,
    )
    try:
        with launcher, Watcher(run.logdir) as watcher:
            lines = StatusLines(watcher, progress or say)
            raised: list[Exception] = []

            def every_while() -> None:
                lines.show()
                try:
                    if tick and not raised:
                        tick()
                except Exception as error:
                    raised.append(error)
                    supervisor.stop("callback")

            supervisor.run(every_while, run.log_every)
            if raised:
                raise raised[0]
    finally:
        remove_addresses(run.logdir)
        say(_saved(run.logdir))


def _saved(logdir: Path) -> str:
    """What a run that has ended can be resumed from, in a sentence."""
    try:
        newest = Checkpoint(logdir / "ckpt" / "agent").load(parts=())
    except CheckpointError as error:
        return str(error)
    if newest is None:
        return "There is no checkpoint: the run ended before its first one."
    return f"The newest checkpoint is of step {newest.step:,}: {newest.path}"


def parallel_envs(
    make_env_train: Factory,
    make_env_eval: Factory,
    args: RunConfig,
    say: Say = silent,
    ids: range | None = None,
) -> None:
    """Run environments of a run on this machine, for an agent that is elsewhere, until stopped.

    Args:
        make_env_train, make_env_eval: Called with an environment's id.
        args: The run.
        say: Takes lines for the person.
        ids: Which of the run's environments; None for all.
    """
    workers = env_workers(make_env_train, make_env_eval, args, ids)
    if not workers:
        raise ConfigError(
            f"None of the environments asked for is one of the run's {args.all_envs}, which are "
            "numbered from 0."
        )
    with find_launcher(args.launcher)(args.logdir) as launcher:
        Supervisor(workers, launcher, say=say).run()


def _prepared(args: RunConfig, launcher: Launcher) -> RunConfig:
    """The run as its workers see it: with addresses, a key if it uses tcp, and its configuration
    in its directory, where others find it."""
    args.logdir.mkdir(parents=True, exist_ok=True)
    remove_addresses(args.logdir)  # of a run that was killed
    fields = {role: f"{role}_addr" for role in SERVERS}
    default = RunConfig.__dataclass_fields__["actor_addr"].default
    changes: dict[str, Any] = {
        field: launcher.default_address
        for role, field in fields.items()
        if listen_address(args, role) == default
    }
    run = replace(args, **changes)
    if not run.keys and any("tcp://" in listen_address(run, role) for role in SERVERS):
        path = run.logdir / "keys"
        if not path.exists():
            Keys.generate().save(path)
        run = replace(run, keys=str(path.absolute()))
    # Addresses that the launcher chose are left out: the next one may choose others.
    given = {field: getattr(args, field) for field in changes}
    atomic_write(run.logdir / CONFIG_FILE, replace(run, **given).to_json())
    return run
