"""CPU time of every role, and how many environments an actor carries.

CPU time is that of a role's own process, so it holds on a busy machine too. The roles are those of
a run, started as a run starts them. Many environments are light clients: sockets of this process
that speak the protocol, each a connection with an environment id of its own, which repeat prepared
observations and compute nothing.

`python -m docs.scaling` makes the tables and the picture of `docs/scaling.md` from the rows.
"""

from __future__ import annotations

import itertools
import resource
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from json import dumps, loads
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import zmq
from numpy.typing import NDArray

from benchmarks.agent import learner_step
from benchmarks.replay import opening
from benchmarks.report import Row, compare, in_process, scratch, timed
from dreamfleet.agents import find_agent
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env, noop, sample_action
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.fleet import factories
from dreamfleet.fleet.launchers import RunningWorker
from dreamfleet.fleet.launchers.local import LocalLauncher
from dreamfleet.fleet.workers import fleet_workers
from dreamfleet.replay import ReplayConfig
from dreamfleet.roles.actor import serve_actor
from dreamfleet.roles.addresses import find_server
from dreamfleet.roles.env import ObservationBlock
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.scaling.shards import ReplayClient, Reply
from dreamfleet.spaces import RESET, Space, without_logs, without_reset
from dreamfleet.transport import Client, Keys, RoleKey, wire
from dreamfleet.transport.address import parse
from dreamfleet.transport.codec import encode
from dreamfleet.transport.connection import Link, open_link

TASKS = {"vector": "gym:CartPole-v1", "image": "bundled:dummy"}
"""Few numbers, and a 64x64x3 image with a few numbers."""
CONNECTIONS = tuple(2**power for power in range(11))
LARGEST_BATCH = 256
"""`actor_batch` of the curve, at most; with fewer environments it is half of them."""
_ROWS = 64  # environments in a message to the replay and to the logger
_EPISODE = 100
_TIMEOUT_SECONDS = 300.0  # seconds that a role may take to come up; compiling is a part of it
_FILES_A_CONNECTION, _FILES_BESIDE = 2, 200

Arrays = dict[str, NDArray[Any]]


def run(quick: bool = False) -> Iterator[Row]:
    """Every role, then 1 to 1,024 connections; a quick run has the random agent and two."""
    if quick:
        return _measure(("vector",), ("random",), (2,), 2, seconds=0.2, calls=20)
    return _measure(tuple(TASKS), ("random", "dreamer"), CONNECTIONS, 8, seconds=3.0, calls=400)


def _measure(
    kinds: Sequence[str],
    agents: Sequence[str],
    connections: Sequence[int],
    envs: int,
    seconds: float,
    calls: int,
) -> Iterator[Row]:
    allow_connections(max(connections))
    for kind in kinds:
        yield from _environments(kind, envs, seconds)
        yield from _services(kind, agents[-1], calls)
        yield from _learner(kind, agents[-1], calls // 20)
    for agent, kind in itertools.product(agents, kinds):
        yield from _curve(agent, kind, connections, seconds)
    middle = connections[len(connections) // 2]
    yield from _two_actors(agents[-1], kinds[-1], middle, seconds)
    yield from _two_shards(agents[-1], kinds[-1], calls)
    yield from opening(2400 * calls)


# --- the run -------------------------------------------------------------------------------------


def _config(folder: Path, kind: str, agent: str, envs: int, **settings: Any) -> RunConfig:
    """A run without a learner, so that the rate limiter never holds acting back."""
    return RunConfig(
        task=TASKS[kind],
        logdir=folder,
        agent=agent,
        envs=envs,
        train_ratio=0.0,
        # Small files: each environment reserves one, and a thousand with images would take 13 GB.
        replay=ReplayConfig(capacity=50_000, chunk=128),
        log_every=1.0,
        report_every=0.0,
        save_every=0.0,
        on_failure="stop",
        **settings,
    )


class Roles:
    """Workers of a run whose names start with one of `names`, without a supervisor and without a
    learner, which would share its CPU time."""

    def __init__(self, config: RunConfig, *names: str) -> None:
        self._launcher = LocalLauncher(config.logdir)
        parts = factories.factories(config)
        workers = fleet_workers(parts, config)
        self._workers = [
            replace(worker, function=partial(_act, config, worker.name))
            if worker.role in ("agent", "actor")
            else worker
            for worker in workers
            if worker.name.startswith(names)
        ]
        self._running: dict[str, RunningWorker] = {}

    def __enter__(self) -> Self:
        with self._launcher:
            self._launcher.prepare(self._workers)
            for worker in self._workers:
                self._running[worker.name] = self._launcher.start(worker)
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._running.values():
            worker.kill()  # what they have stored is thrown away
        for worker in self._running.values():
            worker.wait()

    def check(self) -> None:
        """Raise if one of them has ended."""
        for name, worker in self._running.items():
            if worker.wait(0) is not None:
                raise DreamfleetError(f"The {name} of the benchmark ended:\n{worker.output()}")

    def cpu(self) -> dict[str, float]:
        """Seconds of CPU time that each role has used, all its processes together."""
        spent: dict[str, float] = {}
        for worker in self._workers:
            times = psutil.Process(self._running[worker.name].pid).cpu_times()
            spent[worker.role] = spent.get(worker.role, 0.0) + times.user + times.system
        return spent


def _act(config: RunConfig, worker: str) -> None:
    index = int(worker.rpartition("-")[2]) if worker.startswith("actor-") else 0
    serve_actor(factories.agent(config, actor=index), config, Progress(), index)


def _cost(name: str, seconds: float, per: str, note: str = "CPU time") -> Row:
    return Row(f"{name}/cpu", 1e6 * seconds, f"us/{per}", note=note)


def _spaces(kind: str, agent: str) -> tuple[dict[str, Space], dict[str, Space]]:
    """What an environment shows, and what is stored with its steps."""
    env = make_env(TASKS[kind])
    kind_of_agent = find_agent(agent)
    stored = kind_of_agent.stored_space(env.obs_space, env.act_space, kind_of_agent.default())
    acts = without_reset(env.act_space)
    return dict(env.obs_space), {**without_logs(env.obs_space), **acts, **stored}


def _zeros(spaces: Mapping[str, Space], *lead: int) -> Arrays:
    return {key: np.zeros((*lead, *space.shape), space.dtype) for key, space in spaces.items()}


# --- a fleet with real environments --------------------------------------------------------------


def _environments(kind: str, envs: int, seconds: float) -> Iterator[Row]:
    """An environment alone, then every role of a fleet, with one process and with one for each."""
    yield _cost(f"{kind}/environment alone", _alone(kind, seconds), "step")
    for together in (envs, 1):
        with scratch() as folder:
            config = _config(folder, kind, "random", envs, envs_per_process=together)
            with Roles(config, "") as roles, _client(config, "replay") as replay:

                def steps(replay: Client = replay) -> int:
                    return int(replay.position().result(_TIMEOUT_SECONDS)["steps"])

                _await(lambda: steps() >= 200, roles)
                begin, before, first = time.perf_counter(), roles.cpu(), steps()
                time.sleep(seconds)
                count, after = steps() - first, roles.cpu()
                wall = time.perf_counter() - begin
        layout = "a process each" if together == 1 else f"{together} in one process"
        yield Row(f"{kind}/fleet, {layout}", count / wall, "steps/s", note="random agent")
        for role, spent in after.items():
            used = 1e6 * (spent - before[role]) / count
            yield Row(f"{kind}/fleet, {layout}/{role}", used, "us/step", note="CPU time")


def _alone(kind: str, seconds: float) -> float:
    env = make_env(TASKS[kind])
    rng = np.random.default_rng(0)
    actions = [sample_action(env.act_space, rng) for _ in range(64)]
    obs = env.step(noop(env.act_space))
    count, begin, used = 0, time.perf_counter(), time.process_time()
    while not count or time.perf_counter() - begin < seconds / 3:
        for action in actions:
            obs = env.step({**action, RESET: obs["is_last"]})
        count += len(actions)
    return (time.process_time() - used) / count


def _await(ready: Callable[[], bool], roles: Roles) -> None:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not ready():
        roles.check()
        if time.monotonic() > deadline:
            raise DreamfleetError(
                f"No steps came in {_TIMEOUT_SECONDS:g} s: is the machine too busy?"
            )
        time.sleep(0.05)


def _client(config: RunConfig, role: Any, index: int = 0) -> Client:
    return Client(
        find_server(config, role, index), "bench", keys=config.run_keys, patience=_TIMEOUT_SECONDS
    )


# --- replay and logger, called as an agent calls them --------------------------------------------


def _services(kind: str, agent: str, calls: int) -> Iterator[Row]:
    obs, stored = _spaces(kind, agent)
    steps, ids = _zeros(stored, _ROWS), np.arange(_ROWS)
    logs = {key: value for key, value in _zeros(obs, _ROWS).items() if key not in stored}
    logs |= {key: steps[key] for key in ("reward", "is_first", "is_last", "is_terminal")}
    number = itertools.count(1)
    with scratch() as folder, ExitStack() as stack:
        config = _config(folder, kind, agent, _ROWS)
        roles = stack.enter_context(Roles(config, "replay", "logger"))
        replay = stack.enter_context(ReplayClient(config, "bench", 2))
        logger = stack.enter_context(_client(config, "logger"))

        def cost(role: str, call: Callable[[], Any], per: int = 1) -> float:
            """CPU time that a call, or a row of it, costs its server."""
            for _ in range(3):
                call()
            before = roles.cpu()[role]
            for _ in range(calls):
                call()
            return (roles.cpu()[role] - before) / (per * calls)

        def insert() -> None:
            replay.add_batch(steps, ids, False, "bench", next(number)).result()

        def follow() -> None:
            logger.tran(next(number), ids, False, logs, {}).result()

        for _ in range(config.window):  # before that there is no sequence to sample
            insert()
        size = sum(array[0].nbytes for array in steps.values())
        yield Row(f"{kind}/stored step", float(size), "bytes", note=f"{agent}, default size")
        rows = f"{_ROWS} rows in a call"
        yield _cost(f"{kind}/replay insert", cost("replay", insert, _ROWS), "step", rows)
        yield _cost(f"{kind}/logger", cost("logger", follow, _ROWS), "step", rows)
        batch = replay.sample("train")
        megabytes = sum(array.nbytes for array in batch.values()) / 1e6
        note = f"{config.batch_size} x {config.window} steps, {megabytes:.1f} MB"
        spent = cost("replay", lambda: replay.sample("train"))
        yield _cost(f"{kind}/replay sample", spent, "batch", note)
        states = {key: value for key, value in batch.items() if key.startswith(("dyn/", "stepid"))}
        if len(states) > 1:
            spent = cost("replay", lambda: replay.update(states).result())
            yield _cost(f"{kind}/replay update", spent, "batch", "latent states written back")


# --- the learner ---------------------------------------------------------------------------------


def _learner(kind: str, agent: str, updates: int) -> Iterator[Row]:
    """Updates of an agent of the default size, in a process as that of an agent."""
    spent = in_process(__name__, [kind, agent, updates], agent=agent)
    yield _cost(f"{kind}/learner update", spent, "batch", f"{agent}, default size")


def measure_learner(kind: str, name: str, updates: int) -> float:
    """Seconds of CPU time of an update."""
    config = RunConfig(task=TASKS[kind], agent=name)
    agent: Any = factories.agent(config)
    sizes = {"batch_size": config.batch_size, "batch_length": config.batch_length}
    agent.compile(**sizes, report_length=None, policy_batches=())
    steps = (config.batch_size, config.window)
    batch = _zeros({**agent.obs_space, **agent.act_space, **agent.stored_space}, *steps)
    step = learner_step(agent, batch | {"stepid": np.zeros((*steps, 20), np.uint8)})
    timed(step, 2)
    used = time.process_time()
    timed(step, updates)
    return (time.process_time() - used) / updates


# --- many connections ----------------------------------------------------------------------------


def allow_connections(count: int, limits: tuple[int, int] | None = None) -> None:
    """Let this process and its children open enough files for so many connections.

    Args:
        count: Connections.
        limits: Soft and hard limit; those of the machine unless a test says others.

    Raises:
        ConfigError: The machine does not allow it.
    """
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_A_CONNECTION * count + _FILES_BESIDE
    if 0 <= hard < needed:
        raise ConfigError(
            f"{count:,} connections need {needed:,} open files, and this machine allows {hard:,}: "
            f"raise the hard limit, as root with 'ulimit -Hn {needed}', or measure with --quick."
        )
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class LightClients:
    """Connections to actors, each with one environment that repeats the same episode.
    Environment n calls actor n modulo the number of addresses."""

    def __init__(
        self, addresses: Sequence[str], kind: str, count: int, keys: Keys | RoleKey | None = None
    ) -> None:
        zmq.Context.instance().max_sockets = 2 * count + 64
        self._epoll = select.epoll()
        self._sockets: dict[int, Link] = {}
        self._observations = _episode(kind)
        self._messages: dict[int, list[list[Any]]] = {}  # of each connection: one of each kind
        self.steps = 0
        self.bytes_out = self.bytes_in = 0
        self._envids: dict[int, int] = {}
        for envid in range(count):
            address = parse(addresses[envid % len(addresses)])
            socket = open_link(address, address.text, keys)
            socket.send(wire.pack(wire.HELLO, 0, encode(None)))
            self._sockets[socket.fileno()] = socket
            self._envids[socket.fileno()] = envid
            self._epoll.register(socket.fileno(), select.EPOLLIN)
        self._made = dict.fromkeys(self._sockets, 0)  # steps of each connection

    @property
    def least(self) -> int:
        """Steps of the slowest connection."""
        return min(self._made.values())

    def play(self, until: Callable[[], bool]) -> None:
        """Send an observation for every action that comes."""
        # A descriptor of libzmq only becomes ready after a receive has found nothing.
        ready = list(self._sockets)
        while not until():
            for descriptor in ready:
                socket = self._sockets[descriptor]
                socket.notice(descriptor, select.EPOLLIN)
                while (message := socket.take()) is not None:
                    if isinstance(message, list):
                        self._on_message(descriptor, message)
                        made = self._made[descriptor]
                        socket.send(self._messages[descriptor][_stage(made)])
            ready = [descriptor for descriptor, _ in self._epoll.poll(0.1)]

    def _on_message(self, descriptor: int, message: list[Any]) -> None:
        header = wire.unpack(message[0])
        if header.kind == wire.REPLY:
            self.steps += 1
            self._made[descriptor] += 1
            self.bytes_in = sum(map(len, message))
        elif header.kind == wire.WELCOME:
            incarnation = wire.value_of(header, message[1:])["incarnation"]
            self._messages[descriptor] = self._packed(self._envids[descriptor], incarnation)
        else:
            raise DreamfleetError(f"The actor refused: {wire.value_of(header, message[1:])}")

    def _packed(self, envid: int, incarnation: int) -> list[list[Any]]:
        messages = []
        for obs in self._observations:
            block = ObservationBlock([envid], is_eval=False)
            block.put(0, obs)
            value = encode((block.rows([0]),))
            messages.append(wire.pack(wire.CALL, 1, value, incarnation, "act", 1))
        self.bytes_out = sum(map(len, messages[1]))
        return messages

    def close(self) -> None:
        self._epoll.close()
        for socket in self._sockets.values():
            socket.close(linger=0)


def _stage(made: int) -> int:
    """Whether an episode's next observation is its first (0), its last (2) or another one (1)."""
    place = made % _EPISODE
    return 0 if place == 0 else 2 if place == _EPISODE - 1 else 1


def _episode(kind: str) -> list[dict[str, Any]]:
    """A first observation, one in the middle of an episode, and a last one."""
    env = make_env(TASKS[kind])
    first = env.step(noop(env.act_space))
    middle = {**first, "is_first": np.bool_(False)}
    return [first, middle, {**middle, "is_last": np.bool_(True)}]


@dataclass(frozen=True)
class Point:
    """What so many connections reached."""

    rate: float
    cpu: dict[str, float]
    """Seconds a step, by role; `clients` is this process."""
    bytes_out: int
    bytes_in: int


def _point(kind: str, agent: str, count: int, seconds: float, **settings: Any) -> Point:
    with ExitStack() as stack:
        config = _config(stack.enter_context(scratch()), kind, agent, count, **settings)
        roles = stack.enter_context(Roles(config, "agent", "actor", "replay", "logger"))
        addresses = []
        for index in range(config.actors):
            with _client(config, "actor", index) as probe:
                probe.connect(_TIMEOUT_SECONDS)
                addresses.append(probe.address)
        begin = time.monotonic()
        clients = LightClients(addresses, kind, count, config.run_keys)
        stack.enter_context(closing(clients))

        def all_have_stepped() -> bool:
            roles.check()
            return clients.least >= 2 or time.monotonic() > begin + _TIMEOUT_SECONDS

        clients.play(all_have_stepped)
        if clients.least < 2:
            raise DreamfleetError(f"Not all of {count} connections made a step.")
        before, mine, steps = roles.cpu(), time.process_time(), clients.steps
        start = time.perf_counter()
        clients.play(lambda: time.perf_counter() > start + seconds)
        wall, made = time.perf_counter() - start, clients.steps - steps
        used = {role: spent - before[role] for role, spent in roles.cpu().items()}
        used["clients"] = time.process_time() - mine
        cpu = {role: spent / max(made, 1) for role, spent in used.items()}
        return Point(made / wall, cpu, clients.bytes_out, clients.bytes_in)


def _curve(agent: str, kind: str, connections: Sequence[int], seconds: float) -> Iterator[Row]:
    point = None
    for count in connections:
        point = _point(kind, agent, count, seconds, actor_batch=actor_batch(count))
        name = f"curve/{agent}/{kind}/{count}"
        costs = {role: f"{1e6 * spent:.0f} us" for role, spent in point.cpu.items()}
        note = ", ".join(f"{role} {cost}" for role, cost in costs.items())
        yield Row(name, point.rate, "steps/s", note=f"CPU time a step: {note}")
        yield Row(f"{name}/actor", 1e6 * point.cpu["agent"], "us/step", note="CPU time")
    assert point is not None
    yield Row(f"bytes/{agent}/{kind}/to the actor", point.bytes_out, "bytes/step")
    yield Row(f"bytes/{agent}/{kind}/from the actor", point.bytes_in, "bytes/step")


def actor_batch(envs: int) -> int:
    """Half of the environments, so that one half steps while the policy answers the other."""
    return max(1, min(LARGEST_BATCH, envs // 2))


def _two_actors(agent: str, kind: str, count: int, seconds: float) -> Iterator[Row]:
    batches = {actors: max(1, actor_batch(count) // actors) for actors in (1, 2)}
    one, two = (
        _point(kind, agent, count, seconds, actor_batch=batch, actors=actors)
        for actors, batch in batches.items()
    )
    note = f"{count} connections, {agent}, {kind}"
    yield compare("actors=2", two.rate, "steps/s", "actors=1", one.rate, note=note)


def _two_shards(agent: str, kind: str, calls: int) -> Iterator[Row]:
    ones, twos = (_replay_rates(agent, kind, calls, shards) for shards in (1, 2))
    for name, unit, one, two in zip(
        ("inserts", "samples"), ("steps/s", "batches/s"), ones, twos, strict=True
    ):
        peer = f"replay_shards=1, {name}"
        yield compare(f"replay_shards=2, {name}", two, unit, peer, one, note=f"{agent}, {kind}")


def _replay_rates(agent: str, kind: str, calls: int, shards: int) -> tuple[float, float]:
    """Steps that are stored and batches that are drawn in a second, two calls at a time."""
    _, stored = _spaces(kind, agent)
    steps, ids, number = _zeros(stored, _ROWS), np.arange(_ROWS), itertools.count(1)
    with scratch() as folder, ExitStack() as stack:
        config = _config(folder, kind, agent, _ROWS, replay_shards=shards)
        stack.enter_context(Roles(config, "replay", "logger"))
        replay = stack.enter_context(ReplayClient(config, "bench", 2))
        ahead = stack.enter_context(ThreadPoolExecutor(1))

        def insert() -> Reply:
            return replay.add_batch(steps, ids, False, "bench", next(number))

        def rate(call: Callable[[], Reply], each: int) -> float:
            waiting, begin = call(), time.perf_counter()
            for _ in range(calls):
                following = call()
                waiting.result(_TIMEOUT_SECONDS)
                waiting = following
            waiting.result(_TIMEOUT_SECONDS)
            return each * calls / (time.perf_counter() - begin)

        for _ in range(2 * config.window):  # before that there may be no sequence to sample
            insert().result(_TIMEOUT_SECONDS)
        return rate(insert, _ROWS), rate(lambda: ahead.submit(replay.sample, "train"), 1)


if __name__ == "__main__":
    sys.stdout.write(dumps(measure_learner(*loads(sys.argv[1]))) + "\n")
