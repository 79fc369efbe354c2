"""The fleet's functions on one page.

    combined          everything, under the supervisor
    parallel_agent    one agent object, shared by an actor thread and a learner thread
    parallel_actor    the batched inference server
    parallel_remote_actor  one of further actors, in a process of its own
    parallel_learner  the training loop
    parallel_replay   the replay server
    parallel_logger   the metrics server
    parallel_env      one environment, or several that are stepped together
    parallel_envs     all environments of one machine
    parallel_evaluator  rounds of evaluation while the run trains

Each role may run anywhere: all it needs are its factories and a `RunConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamfleet.checkpoint import Checkpoint, CheckpointError
from dreamfleet.config import CONFIG_FILE, RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.files import atomic_write
from dreamfleet.fleet.binding import JOIN_PORT, choose_port, parse_bind
from dreamfleet.fleet.hosts import host_membership
from dreamfleet.fleet.launchers import Launcher, find_launcher
from dreamfleet.fleet.nodes import JoinedNodes
from dreamfleet.fleet.play import parallel_evaluator
from dreamfleet.fleet.status import StatusLines, Watcher
from dreamfleet.fleet.supervisor import Say, Supervisor, silent, unless_full
from dreamfleet.fleet.workers import env_workers, fleet_workers
from dreamfleet.roles.actor import parallel_actor
from dreamfleet.roles.addresses import (
    SERVERS,
    RoleName,
    listen_address,
    remove_addresses,
    server_name,
)
from dreamfleet.roles.agent import parallel_agent
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.health import STARTED, health_path
from dreamfleet.roles.invitations import (
    Place,
    first_invitation,
    join_line,
    ports_line,
    read_place,
    write_place,
)
from dreamfleet.roles.learner import parallel_learner
from dreamfleet.roles.logger import parallel_logger
from dreamfleet.roles.replay import parallel_replay
from dreamfleet.roles.runtime import Factories, Factory
from dreamfleet.roles.scaling.remote_actor import parallel_remote_actor
from dreamfleet.transport import Keys
from dreamfleet.transport.address import Address

__all__ = [
    "combined",
    "parallel_actor",
    "parallel_agent",
    "parallel_env",
    "parallel_envs",
    "parallel_evaluator",
    "parallel_learner",
    "parallel_logger",
    "parallel_remote_actor",
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
        make_agent, and so on: Make the parts of the run, see `Factories`.
        args: The run.
        say: Takes lines to show.
        progress: Takes the lines that tell now and then how far the run is; None for `say`.
        tick: Called every `log_every` seconds. What it raises ends the run in order, and is raised
            then.

    Raises:
        FleetError: A worker failed, and the run ended because of it.
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP ended the run; everything is saved.
    """
    buffers, envs = (make_replay_train, make_replay_eval), (make_env_train, make_env_eval)
    make = Factories(make_agent, *buffers, *envs, make_stream, make_logger)
    say, progress = unless_full(say), unless_full(progress or say)
    launcher = find_launcher(args.launcher)(args.logdir, args)
    run, place = _prepared(args, launcher)
    supervisor = Supervisor(
        fleet_workers(make, run),
        launcher,
        logdir=run.logdir,
        duration=run.duration,
        say=say,
    )
    raised: list[Exception] = []

    try:
        with (
            launcher,
            host_membership(run, supervisor, say),
            _joinable(run, place, supervisor, say) as log_machines,
        ):
            lines = StatusLines(Watcher(run.logdir).look, progress, say)

            def on_tick() -> None:
                lines.show()
                log_machines()
                try:
                    if tick and not raised:
                        tick()
                except Exception as error:
                    raised.append(error)
                    supervisor.stop("callback")

            supervisor.run(on_tick, run.log_every)
            lines.show(ended=True)
            if raised:
                raise raised[0]
    finally:
        remove_addresses(run.logdir, elsewhere=_elsewhere(run))
        if run.logdir.is_dir():  # it may have been moved away
            say(_saved(run.checkpoints))


def _elsewhere(run: RunConfig) -> tuple[RoleName, ...]:
    return ("replay",) if run.remote_replay else ()


def _saved(folder: Path) -> str:
    """What a run that has ended can be resumed from, in a sentence."""
    try:
        newest = Checkpoint(folder).load(parts=())
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
    """Run environments of a run on this machine, all or some of them, for an agent that is
    elsewhere, until stopped."""
    workers = env_workers(make_env_train, make_env_eval, args, ids)
    if not workers:
        raise ConfigError(
            f"The run has no such environments: its {args.all_envs} environments are numbered "
            "from 0."
        )
    name = "serial" if args.launcher == "serial" else "local"  # on this machine
    with find_launcher(name)(args.logdir) as launcher:
        Supervisor(workers, launcher, say=say).run()


@contextmanager
def _joinable(
    run: RunConfig, place: Place | None, supervisor: Supervisor, say: Say
) -> Iterator[Callable[[], None]]:
    """Let machines join while the block runs, and say how; yields what logs them."""
    keys = run.server_keys
    if place is None or keys is None:
        yield lambda: None
        return
    address = Address("tcp", parse_bind(run.bind).listen, place.port)
    with JoinedNodes(run, address.text, supervisor) as nodes:
        supervisor.machines = nodes.machines
        write_place(run.logdir, place)
        line = join_line(place, first_invitation(run.logdir, keys))
        say(f"To join with environments of another machine, type there:\n  {line} --envs 4")
        say(ports_line(place))
        how = "The run has failed."
        try:
            yield nodes.log
            how = "The run is over."
        except KeyboardInterrupt:
            how = "The run was stopped."
            raise
        finally:
            nodes.end(how)


def _bound(run: RunConfig, launcher: Launcher) -> tuple[RunConfig, Place]:
    """The run with addresses that other machines reach, and where they join. Ports are those that
    it had before, so that lines that were copied stay true."""
    listen, shown, port = parse_bind(run.bind)
    before = read_place(run.logdir) or Place(shown, JOIN_PORT, {})
    port = choose_port(listen, port or before.port, only=bool(port))
    ports: dict[str, int] = {}
    # Servers that the launcher puts on any machine publish where they are.
    by_launcher = launcher.default_address.startswith("tcp:")
    if listen_address(run, "actor") == launcher.default_address and not by_launcher:
        # Several actors have ports that follow each other.
        wanted = before.ports.get("actor", 0) or port + 1
        first = choose_port(listen, wanted, {port}, count=run.actors)
        ports = {server_name("actor", index): first + index for index in range(run.actors)}
        run = replace(run, actor_addr=Address("tcp", listen, first).text)
    return run, Place(shown, port, ports)


def _prepared(args: RunConfig, launcher: Launcher) -> tuple[RunConfig, Place | None]:
    """The run as its workers see it, with addresses and a key if it uses tcp, and where machines
    join, if they may. Others find its configuration in its directory."""
    args.logdir.mkdir(parents=True, exist_ok=True)
    remove_addresses(args.logdir, elsewhere=_elsewhere(args))  # of a run that was killed
    health_path(args, STARTED).unlink(missing_ok=True)
    default = RunConfig.__dataclass_fields__["actor_addr"].default
    open_ones = [f"{role}_addr" for role in SERVERS if listen_address(args, role) == default]
    chosen: dict[str, Any] = dict.fromkeys(open_ones, launcher.default_address)
    run = replace(args, **chosen)
    place = None
    if run.bind:
        run, place = _bound(run, launcher)
    if not run.keys and any("tcp://" in listen_address(run, role) for role in SERVERS):
        path = run.logdir / "keys"
        if not path.exists():
            Keys.generate().save(path)
        run = replace(run, keys=str(path.absolute()))
    # Addresses that the launcher chose are left out: the next one may choose others.
    kept = replace(run, **{field: getattr(args, field) for field in open_ones})
    atomic_write(run.logdir / CONFIG_FILE, kept.to_json())
    return run, place
