"""The local launcher: every role is a process of this machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import cloudpickle

from dreamfleet.config import RunConfig
from dreamfleet.fleet.process import Process
from dreamfleet.fleet.status import StatusLine
from dreamfleet.fleet.supervisor import Say, Supervisor, silent
from dreamfleet.roles.agent import parallel_agent
from dreamfleet.roles.common import Factory
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.logger import parallel_logger
from dreamfleet.roles.replay import parallel_replay
from dreamfleet.transport import resolve

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

    Raises:
        FleetError: A process failed, and the run ended because of it.
        KeyboardInterrupt: The person ended the run; everything is saved.
    """
    args = replace(
        args,
        actor_addr=resolve(args.actor_addr),
        replay_addr=resolve(args.replay_addr),
        logger_addr=resolve(args.logger_addr),
    )
    args.logdir.mkdir(parents=True, exist_ok=True)
    _write(args.logdir / "config.json", args.to_json())
    logs = args.logdir / "logs"
    processes = [Process("agent", partial(parallel_agent, _packed(make_agent), args), logs)]
    if not args.remote_envs:
        processes += _env_processes(make_env_train, make_env_eval, args)
    if not args.remote_replay:
        function = partial(
            parallel_replay,
            _packed(make_replay_train),
            _packed(make_replay_eval),
            _packed(make_stream),
            args,
        )
        processes.append(Process("replay", function, logs, _ONE_THREAD))
    serve_metrics = partial(parallel_logger, _packed(make_logger), args)
    processes.append(Process("logger", serve_metrics, logs, _ONE_THREAD))
    supervisor = _supervisor(processes, args, say)
    with StatusLine(args, say, lambda: supervisor.away) as status:
        supervisor.run(status.show, args.log_every)


def parallel_envs(
    make_env_train: Factory, make_env_eval: Factory, args: RunConfig, say: Say = silent
) -> None:
    """Run all environments of a run on this machine, for an agent that is elsewhere."""
    processes = _env_processes(make_env_train, make_env_eval, args)
    _supervisor(processes, args, say).run()


def _supervisor(processes: list[Process], args: RunConfig, say: Say) -> Supervisor:
    return Supervisor(
        processes,
        on_failure=args.on_failure,
        max_restarts=args.max_restarts,
        restart_window=args.restart_window,
        duration=args.duration,
        say=say,
    )


def _env_processes(make_train: Factory, make_eval: Factory, args: RunConfig) -> list[Process]:
    """Training environments are numbered from 0, evaluation environments go on from there."""
    groups = [
        (_packed(make_train), range(args.envs), False),
        (_packed(make_eval), range(args.envs, args.all_envs), True),
    ]
    processes = []
    for make, ids, is_eval in groups:
        for start in range(0, len(ids), args.envs_per_process):
            mine = list(ids[start : start + args.envs_per_process])
            function = partial(parallel_env, make, mine, args, is_eval)
            name = f"env-{mine[0]}"
            processes.append(Process(name, function, args.logdir / "logs", _ONE_THREAD))
    return processes


def _packed(factory: Factory) -> bytes:
    """Packed once, here: what cannot be sent fails before anything is started."""
    if isinstance(factory, bytes):
        return factory
    packed: bytes = cloudpickle.dumps(factory)
    return packed


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)
