"""The launchers of this machine: every role is a process, or a thread of this one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import cloudpickle

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.addresses import settled
from dreamfleet.fleet.process import Process
from dreamfleet.fleet.serial import RoleThread, serial_log
from dreamfleet.fleet.status import StatusLines, Watcher
from dreamfleet.fleet.supervisor import Say, Supervisor, silent
from dreamfleet.roles.agent import parallel_agent
from dreamfleet.roles.common import Factory
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.logger import parallel_logger
from dreamfleet.roles.replay import parallel_replay

_MEMBERS: dict[str, type[Process]] = {"local": Process, "serial": RoleThread}
# Their numpy work is small; a pool of threads each would fight over the cores.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


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

    Raises:
        FleetError: A process failed, and the run ended because of it.
        KeyboardInterrupt: The person ended the run; everything is saved.
    """
    args.logdir.mkdir(parents=True, exist_ok=True)
    with settled(args) as run:
        _write(run.logdir / "config.json", run.to_json())
        logs, member = run.logdir / "logs", _MEMBERS[run.launcher]
        train = partial(parallel_agent, _packed(make_agent, run), run)
        variables = run.agent_type.process_environment(run.agent_config, os.environ)
        processes = [member("agent", train, logs, variables)]
        if not run.remote_envs and not run.offline:
            processes += _env_processes(make_env_train, make_env_eval, run)
        if not run.remote_replay:
            function = partial(
                parallel_replay,
                _packed(make_replay_train, run),
                _packed(make_replay_eval, run),
                _packed(make_stream, run),
                run,
            )
            processes.append(member("replay", function, logs, _ONE_THREAD))
        serve_metrics = partial(parallel_logger, _packed(make_logger, run), run)
        processes.append(member("logger", serve_metrics, logs, _ONE_THREAD))
        supervisor = _supervisor(processes, run, say, run.logdir)
        with serial_log(run), Watcher(run.logdir) as watcher:
            supervisor.run(StatusLines(watcher, progress or say).show, run.log_every)


def parallel_envs(
    make_env_train: Factory,
    make_env_eval: Factory,
    args: RunConfig,
    say: Say = silent,
    ids: range | None = None,
) -> None:
    """Run environments of a run on this machine, for an agent that is elsewhere.

    Args:
        make_env_train, make_env_eval: Called with an environment's id.
        args: The run.
        say: Takes lines for the person.
        ids: Which of the run's environments; None for all.
    """
    processes = _env_processes(make_env_train, make_env_eval, args, ids)
    if not processes:
        raise ConfigError(
            f"None of the environments asked for is one of the run's {args.all_envs}, which are "
            "numbered from 0."
        )
    _supervisor(processes, args, say).run()


def role_names(config: RunConfig) -> list[str]:
    """The processes that a run has on the machine that starts it."""
    if config.launcher == "serial":
        return ["all roles"]
    names = ["agent"]
    names += [] if config.remote_replay else ["replay"]
    names += ["logger"]
    if not config.remote_envs and not config.offline:
        every = config.envs_per_process
        names += [f"env-{first}" for first in range(0, config.envs, every)]
        names += [f"env-{first}" for first in range(config.envs, config.all_envs, every)]
    return names


def _supervisor(
    processes: list[Process], args: RunConfig, say: Say, logdir: Path | None = None
) -> Supervisor:
    return Supervisor(
        processes,
        on_failure=args.on_failure,
        max_restarts=args.max_restarts,
        restart_window=args.restart_window,
        duration=args.duration,
        say=say,
        logdir=logdir,
        launcher=args.launcher,
    )


def _env_processes(
    make_train: Factory, make_eval: Factory, args: RunConfig, only: range | None = None
) -> list[Process]:
    """Training environments are numbered from 0, evaluation environments go on from there."""
    wanted = range(args.all_envs) if only is None else only
    groups = [
        (_packed(make_train, args), [n for n in range(args.envs) if n in wanted], False),
        (
            _packed(make_eval, args),
            [n for n in range(args.envs, args.all_envs) if n in wanted],
            True,
        ),
    ]
    member = _MEMBERS[args.launcher]
    processes = []
    for make, ids, is_eval in groups:
        for start in range(0, len(ids), args.envs_per_process):
            mine = ids[start : start + args.envs_per_process]
            function = partial(parallel_env, make, mine, args, is_eval)
            name = f"env-{mine[0]}"
            processes.append(member(name, function, args.logdir / "logs", _ONE_THREAD))
    return processes


def _packed(factory: Factory, args: RunConfig) -> Factory:
    """Packed once, here: what cannot be sent fails before anything is started."""
    if isinstance(factory, bytes) or args.launcher == "serial":
        return factory
    packed: bytes = cloudpickle.dumps(factory)
    return packed


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)
