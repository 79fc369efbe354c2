"""A run as data: the list of its workers.

Launchers (`dreamfleet.fleet.launchers`) need nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.fleet.launchers import ONE_THREAD, RestartPolicy, Role, Worker
from dreamfleet.fleet.play import parallel_evaluator
from dreamfleet.roles.addresses import server_name
from dreamfleet.roles.agent import parallel_agent
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.episodes import groups_of
from dreamfleet.roles.health import health_path
from dreamfleet.roles.logger import parallel_logger
from dreamfleet.roles.replay import parallel_replay
from dreamfleet.roles.runtime import Factories, Factory
from dreamfleet.roles.scaling.remote_actor import parallel_remote_actor
from dreamfleet.roles.serial import serial_fleet, takes_turns

# An accelerator is the agent's; JAX would take most of its memory for a second process.
_NO_GPU = {"JAX_PLATFORMS": "cpu"}


def fleet_workers(make: Factories, args: RunConfig) -> list[Worker]:
    """The workers of a run on the machine that starts it, in the order in which they are stopped:
    a worker may need those after it until its own end."""
    agent = args.agent_type
    buffers = make.make_replay_train, make.make_replay_eval
    envs = make.make_env_train, make.make_env_eval
    act_and_learn = partial(parallel_agent, make.make_agent, args)
    if in_turns := takes_turns(args):
        act_and_learn = partial(serial_fleet, make, args)
    variables = agent.process_environment(args.settings_of(agent), os.environ)
    acting = _worker("agent", act_and_learn, args, variables, ends_run=True)
    if args.hosts > 1:  # others cannot go on without it, and would have to be started with it
        acting = replace(acting, restart=RestartPolicy("stop"))
    workers = [acting]
    for index in range(1, args.actors):
        act = partial(parallel_remote_actor, make.make_agent, index, args)
        workers.append(_worker(server_name("actor", index), act, args, {**ONE_THREAD, **_NO_GPU}))
    if args.eval_every:
        play = partial(parallel_evaluator, make.make_env_eval, args)
        workers.append(_worker("evaluator", play, args, _NO_GPU))
    if in_turns:  # the agent's worker is all of the others
        return workers
    if not args.remote_envs and not args.offline:
        workers += env_workers(*envs, args)
    if not args.remote_replay:
        for shard in range(args.replay_shards):
            replay = partial(parallel_replay, *buffers, make.make_stream, args, shard)
            workers.append(_worker(server_name("replay", shard), replay, args))
    logger = partial(parallel_logger, make.make_logger, args)
    workers.append(_worker("logger", logger, args))
    return workers


def _worker(
    name: str,
    function: Callable[[], Any],
    args: RunConfig,
    variables: Mapping[str, str] = ONE_THREAD,
    **more: Any,
) -> Worker:
    """A worker of a run; the first part of its name is its role."""
    role: Role = name.partition("-")[0]  # type: ignore[assignment]
    return Worker(
        name,
        role,
        function,
        variables,
        getattr(args.resources, role),
        RestartPolicy(args.on_failure, args.max_restarts),
        health=health_path(args, name),
        **more,
    )


def env_workers(
    make_train: Factory, make_eval: Factory, args: RunConfig, only: range | None = None
) -> list[Worker]:
    """Workers for the run's environments, or for `only` some of them. Training environments are
    numbered from 0, evaluation environments after them. Those of a process call the same actor."""
    wanted = range(args.all_envs) if only is None else only
    workers = []
    for is_eval, make in ((False, make_train), (True, make_eval)):
        ids = [n for n in range(args.all_envs) if n in wanted and (n >= args.envs) == is_eval]
        groups = groups_of(ids, args.envs_per_process, args.actors)
        workers += [env_worker(make, mine, args, is_eval) for mine in groups]
    return workers


def env_worker(
    make: Factory, ids: Sequence[int], args: RunConfig, is_eval: bool, **more: Any
) -> Worker:
    """A worker for environments that share a process; `more` goes to `parallel_env`."""
    function = partial(parallel_env, make, ids, args, is_eval, **more)
    return _worker(f"env-{ids[0]}", function, args)
