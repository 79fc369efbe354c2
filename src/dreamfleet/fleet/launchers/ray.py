"""The Ray launcher: every worker is a process on some machine of a Ray cluster.

An actor of Ray (`_Host`) is placed by what the worker asks for, and hosts the worker's process as
the local launcher does: with a session, a pipe and a log of its own. So signals, exit codes and
environment variables are as ever, Ray chooses machine and accelerator, and the process ends with
its actor, whatever ends that. Each start has an actor of its own.

Every machine has to see the run's directory, where servers publish their addresses and output goes
to `logs/`. The key comes with what the process is told to do, and touches no disk. Everything else
flows over our own transport.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import cloudpickle

from dreamfleet import __version__
from dreamfleet.config import RunConfig, use_keys
from dreamfleet.errors import ConfigError, DreamfleetError, import_extra
from dreamfleet.fleet.launchers import KILLED, ReportedWorker, Worker
from dreamfleet.fleet.launchers.local import LocalWorker, tail
from dreamfleet.roles.addresses import use_host
from dreamfleet.roles.runtime import STOPPED, pickled
from dreamfleet.transport import Keys, RoleKey, load_key

ray = import_extra("ray", "Runs with the launcher ray", "ray")

log = logging.getLogger(__name__)

_PLACED_WITHIN = 60.0  # seconds; a node that died may take a while to be known
_RESERVED_WITHIN, _LEAST_CPU = 5.0, 0.001  # seconds; a bundle may not be empty
_SEEN_WITHIN = 10.0  # seconds; a network file system may show a new file late
_KILLED_WITHIN = 5.0
_STORE_BYTES = 80_000_000  # of a cluster of our own: nothing is stored in it
_THREADS = 8  # calls of one host at the same time, one of which waits for long
_AUTH_MODE = "RAY_AUTH_MODE"


class ClusterError(DreamfleetError):
    """What became of a worker's machine, or of its place in the cluster."""


# --- on the machine of the worker ----------------------------------------------------------------


class Place(NamedTuple):
    """Where a worker has come to be."""

    host: str
    address: str
    node: str
    """Ray's id of the node."""
    sees: bool
    """Whether the run's directory is there."""
    writes: bool
    """Whether it can be written to."""
    version: str
    """Of this package's code there."""


class _Host:
    """The actor that hosts one worker's process."""

    def __init__(self) -> None:
        self._worker: LocalWorker | None = None

    def place(self, mark: Path) -> Place:
        """Where this is; `mark` is a file that was made in the run's directory."""
        deadline = time.monotonic() + _SEEN_WITHIN
        while not (sees := mark.exists()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return Place(
            socket.gethostname(),
            ray.util.get_node_ip_address(),
            ray.get_runtime_context().get_node_id(),
            sees,
            os.access(mark.parent, os.W_OK),
            __version__,
        )

    def start(
        self,
        worker: Worker,
        payload: bytes,
        path: Sequence[str],
        log_file: Path,
        keys: Keys | RoleKey | None,
    ) -> tuple[int, int]:
        """Start the process; returns its pid, and where its output begins in the log."""
        function = partial(_run, keys, ray.util.get_node_ip_address(), path, payload)
        self._worker = LocalWorker(worker, cloudpickle.dumps(function), log_file)
        return self._worker.pid, self._worker.log_start

    def call(self, method: Literal["wait", "terminate", "kill"]) -> int | None:
        """Call a method of the process, once it has started."""
        result: int | None = getattr(self._worker, method)()
        return result


def _run(keys: Keys | RoleKey | None, host: str, path: Sequence[str], payload: bytes) -> None:
    """What the process of a worker runs."""
    # Modules of the supervisor's program, where this machine has them at the same place.
    sys.path += [each for each in path if each not in sys.path and Path(each).exists()]
    if keys:
        use_keys(keys)
    use_host(host)
    cloudpickle.loads(payload)()


# --- on the machine of the supervisor -------------------------------------------------------------


class RayLauncher:
    """Places workers on the machines of a cluster, or of one that it starts on this machine."""

    default_address = "tcp://{host}:{auto}"

    def __init__(self, logdir: Path, args: RunConfig | None = None) -> None:
        self._logdir = logdir.absolute()
        self._args = args or RunConfig(logdir=logdir)
        self.mark = self._logdir / "logs" / f".ray-{secrets.token_hex(8)}"
        self.payloads: dict[str, bytes] = {}
        self._placed: dict[str, tuple[Any, Place]] = {}
        self._apart: dict[str, Any] = {}  # where Ray puts workers that have a node of their own
        self._running: list[RayWorker] = []
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        self.mark.parent.mkdir(parents=True, exist_ok=True)
        self.mark.touch()
        self._resources.callback(self.mark.unlink, missing_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        for host, _ in self._placed.values():
            ray.kill(host)
        for worker in self._running:
            worker.kill()
        for worker in self._running:
            worker.wait()
        self._resources.close()

    def prepare(self, workers: Sequence[Worker]) -> None:
        self.payloads = {each.name: pickled(each.name, each.function) for each in workers}
        self._resources.callback(connect(self._args, _sum(workers)))
        for worker in () if self._args.ray_wait else workers:
            if not fitting(worker.resources.amounts(), nodes()):
                raise ConfigError(_no_room(worker))
        if apart := [each for each in workers if each.apart]:
            self._reserve(apart)
        # Environments fit anywhere, and leave the others the machines that those need.
        for envs in (False, True):
            group = [each for each in workers if (each.role == "env") == envs]
            self._place(group, time.monotonic() + self.patience)

    def start(self, worker: Worker) -> RayWorker:
        host, place = self._placed.pop(worker.name, None) or (self._host(worker), None)
        running = RayWorker(self, worker, host, place)
        self._running = [each for each in self._running if each.wait(0) is None] + [running]
        return running

    def log_file(self, worker: Worker) -> Path:
        return self._logdir / "logs" / f"{worker.name}.log"

    @property
    def patience(self) -> float:
        """Seconds that a worker may wait for a place."""
        return max(_PLACED_WITHIN, self._args.ray_wait)

    def keys(self, worker: Worker) -> Keys | RoleKey | None:
        """What a worker connects with: environments, which run code of others, get a key that opens
        no more than they call."""
        path = Path(self._args.keys or self._logdir / "keys")
        keys = load_key(path) if path.exists() else None
        return keys.for_role("env") if isinstance(keys, Keys) and worker.role == "env" else keys

    def _host(self, worker: Worker) -> Any:
        asks, spread = worker.resources, worker.apart or worker.role == "env"
        strategy = self._apart.get(worker.name, "SPREAD" if spread else "DEFAULT")
        options = {"num_cpus": asks.cpu, "num_gpus": asks.gpu, "resources": asks.custom}
        options |= {"memory": asks.memory} if asks.memory else {}
        options |= {"max_concurrency": _THREADS, "scheduling_strategy": strategy}
        return ray.remote(_Host).options(**options).remote()

    def _reserve(self, workers: Sequence[Worker]) -> None:
        """Have a node for each of these workers; if there are too few, Ray decides who shares one
        (what is only spread may share a node as well)."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup

        bundles = [each.resources.amounts() or {"CPU": _LEAST_CPU} for each in workers]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not group.wait(max(_RESERVED_WITHIN, self._args.ray_wait)):
            remove_placement_group(group)
            return
        self._apart = {each.name: InGroup(group, n) for n, each in enumerate(workers)}
        self._resources.callback(remove_placement_group, group)

    def _place(self, workers: Sequence[Worker], deadline: float) -> None:
        hosts = {worker.name: self._host(worker) for worker in workers}
        asked = {name: host.place.remote(self.mark) for name, host in hosts.items()}
        try:
            for worker in workers:
                seconds = max(0.0, deadline - time.monotonic())
                place = _placed(worker, asked[worker.name], seconds)
                self._placed[worker.name] = hosts.pop(worker.name), place
        except ClusterError as error:
            raise ConfigError(str(error)) from None
        finally:
            for host in hosts.values():
                ray.kill(host)


LAUNCHER = RayLauncher


class RayWorker(ReportedWorker):
    """A process on some machine of the cluster; a thread follows it until it has ended."""

    def __init__(
        self, launcher: RayLauncher, worker: Worker, actor: Any, place: Place | None
    ) -> None:
        super().__init__()
        self._launcher, self._worker = launcher, worker
        self._actor, self._place = actor, place
        self._log_file, self._log_start = launcher.log_file(worker), 0
        self._asked_to_stop = False
        threading.Thread(target=self._follow, name=f"ray-{worker.name}", daemon=True).start()

    def terminate(self) -> None:
        self._asked_to_stop = True
        self._tell("terminate")

    def kill(self) -> None:
        """Its host kills it, with all that it has started, or is killed if it does not answer."""
        if self._ended.is_set():
            return
        self._tell("kill")
        timer = threading.Timer(_KILLED_WITHIN, self._tell)
        timer.daemon = True
        timer.start()

    def _tell(self, method: str = "") -> None:
        """Call a method of the process; without one, or if there is no process yet, which has
        nothing to save, its host is killed."""
        # Ray would connect once more, and abort the process over an actor it does not know.
        if not self._ended.is_set() and ray.is_initialized():
            with suppress(Exception):  # the cluster is gone
                if method and self.pid:
                    self._actor.call.remote(method)
                else:
                    ray.kill(self._actor)

    def output(self) -> str:
        written = tail(self._log_file, self._log_start) if self.pid else ""
        return "\n".join(filter(None, [written, str(self.error) if self.error else ""]))

    def _follow(self) -> None:
        code = KILLED
        try:
            code = self._live()
        except ClusterError as error:
            if self._asked_to_stop and not self.pid:
                code = STOPPED
            else:
                self.error = error
        except Exception as error:  # of Ray or of its connection
            log.debug("%s", self._worker.name, exc_info=error)
            self.error = ClusterError(f"Ray failed: {_line(error)}")
        finally:
            with suppress(Exception):
                ray.kill(self._actor)
            self.end(code)

    def _live(self) -> int:
        """From its place to its exit code; a `ClusterError` says why there is none."""
        actor, worker, launcher = self._actor, self._worker, self._launcher
        if self._place is None:
            self._place = _placed(worker, actor.place.remote(launcher.mark), launcher.patience)
        # What it runs travels pickled.
        plain = Worker(worker.name, worker.role, int, dict(worker.environment))
        payload, keys = launcher.payloads[worker.name], launcher.keys(worker)
        started = actor.start.remote(plain, payload, sys.path, self._log_file, keys)
        pid, self._log_start = self._result(started, launcher.patience)
        self.host, self.pid = self._place.host, pid
        while True:
            try:
                return int(self._result(actor.call.remote("wait")))
            except ray.exceptions.ActorUnavailableError:
                # A lost connection, or the first sign of a lost machine: asking again tells.
                log.debug("%s cannot be reached", worker.name)
                time.sleep(0.2)

    def _result(self, asked: Any, timeout: float | None = None) -> Any:
        try:
            return ray.get(asked, timeout=timeout)
        except ray.exceptions.ActorUnavailableError:
            raise
        except ray.exceptions.RayError as error:
            assert self._place is not None
            raise ClusterError(_why_lost(error, self._place)) from None


# --- the cluster ---------------------------------------------------------------------------------


def connect(args: RunConfig, needed: Mapping[str, float]) -> Callable[[], None]:
    """Connect this process to a cluster, or start one that has what is needed; returns what ends
    that. A program that is connected stays so."""
    if ray.is_initialized():
        return lambda: None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = args.ray_address or os.environ.get("RAY_ADDRESS", "")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    logging.getLogger("ray").setLevel(logging.ERROR)  # for ray://, the level is the server's
    if args.ray_runtime_env:
        # Settings hold tuples, and Ray takes lists.
        options["runtime_env"] = json.loads(args.to_json())["ray_runtime_env"]
    own = {
        "num_cpus": max(os.cpu_count() or 1, int(needed.get("CPU", 0.0) + 0.999)),
        "resources": {k: v for k, v in needed.items() if k not in ("CPU", "GPU", "memory")},
        "object_store_memory": _STORE_BYTES,
        "include_dashboard": False,
    }
    with _signals_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the error says it too
        try:
            if address != "local" if address else _is_started_here():
                try:
                    ray.init(address or "auto", **options)
                    return _disconnect
                except ConnectionError:
                    if address:
                        raise
            _choose_token()
            ray.init("local", **options, **own)
            return _disconnect
        except Exception as error:  # a plain one if a busy machine does not start Ray in time
            where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
            # Ray looks for its token only at a cluster that it has found by itself.
            raise ConfigError(
                f"There is no connection to {where}: {_line(error)} Start one with 'ray start "
                f"--head', set {_AUTH_MODE}=token if it asks for a token, name another "
                "--ray-address, or use --ray-address local."
            ) from error


def _is_started_here() -> bool:
    """Whether `ray start` has made this machine part of a cluster. `auto` alone would also find the
    cluster of another run, which asks for that run's token and ends with it."""
    return ray._private.utils.read_ray_address() is not None


def _choose_token() -> None:
    """Protect a cluster of our own with a token that lives as long as this process. Ray would write
    one to the user's home, and then ask for it in every cluster that is started on this machine."""
    names = (_AUTH_MODE, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in names):
        return
    if not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _disconnect() -> None:
    with _signals_kept():
        ray.shutdown()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray installs a handler of SIGTERM, which is ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that are alive, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def fitting(asks: Mapping[str, float], nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """The ids of the nodes that have so much."""
    return [
        str(node["NodeID"])
        for node in nodes
        if all(node["Resources"].get(name, 0.0) >= amount for name, amount in asks.items())
    ]


def _sum(workers: Iterable[Worker]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for worker in workers:
        total.update(worker.resources.amounts())
    return dict(total)


def _text(amounts: Mapping[str, float]) -> str:
    words = [
        f"{amount / 1e9:.3g} GB of memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in amounts.items()
    ]
    return " and ".join(words) or "nothing"


def _placed(worker: Worker, asked: Any, seconds: float) -> Place:
    """Where a worker's host is; a `ClusterError` says why it is nowhere, or cannot run there."""
    try:
        place: Place = ray.get(asked, timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise ClusterError(_no_room(worker, seconds)) from None
    except ray.exceptions.RayError as error:
        raise ClusterError(_why_not_made(error)) from None
    problem = _unfit(place)
    if problem:
        raise ClusterError(problem)
    return place


def _no_room(worker: Worker, seconds: float = 0.0) -> str:
    asks, there = worker.resources.amounts(), nodes()
    most = {k: max((node["Resources"].get(k, 0.0) for node in there), default=0.0) for k in asks}
    return (
        f"No node of the Ray cluster had room for {worker.name} ({_text(asks)})"
        f"{f' within {seconds:.0f} s' if seconds else ''}; the most that one has of each is "
        f"{_text(most)}. End what else runs there, use fewer envs, ask for less with "
        f"resources.{worker.role}, or add a node; if nodes are still to come, set ray_wait."
    )


def _unfit(place: Place) -> str:
    """Why a worker cannot run at a place; empty if it can."""
    where = f"The Ray node {place.host} ({place.address})"
    if not place.sees:
        return (
            f"{where} does not see the run's directory: choose a --logdir that all nodes and this "
            "machine share, at the same path."
        )
    if not place.writes:
        return f"{where} cannot write to the run's directory: fix its permissions."
    if place.version != __version__:
        return (
            f"{where} has Dreamfleet {place.version}, and this machine has {__version__}: install "
            "the same version everywhere."
        )
    return ""


def _why_not_made(error: Exception) -> str:
    text = str(error)
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        return f"Ray could not make the runtime environment (ray_runtime_env): {_line(error)}"
    if found := re.search(r"No module named '([^']+)'", text):
        return (
            f"A node of the Ray cluster cannot import {found[1]}: install Dreamfleet and what the "
            "run needs on every node, or send it along with ray_runtime_env."
        )
    return f"Ray could not start an actor: {_line(error)}"


def _why_lost(error: Exception, place: Place) -> str:
    alive = True
    with suppress(Exception):
        alive = any(node["NodeID"] == place.node for node in nodes())
    if not alive:
        return f"its Ray node {place.host} ({place.address}) is gone"
    return f"its Ray actor on {place.host} ({place.address}) is gone: {_line(error)}"


def _line(error: BaseException) -> str:
    """The last line of what Ray says, as a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[-1].rstrip('.')}." if lines else f"{type(error).__name__}."
