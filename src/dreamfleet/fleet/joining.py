"""A machine that joins a run with its environments: what `dreamfleet join` does.

It asks the run's supervisor every second what to run (`dreamfleet.fleet.nodes`), and starts and
ends processes accordingly. The addresses of the actors go into a registry of this machine's own,
where environments find them as they do everywhere.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace as replace_fields

from dreamfleet import __version__
from dreamfleet.config import CONFIG_FILE, RunConfig
from dreamfleet.envs import env_seed, is_bundled
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.files import temporary_folder
from dreamfleet.fleet.claim import claim_directory
from dreamfleet.fleet.factories import environment, environments
from dreamfleet.fleet.isolated import probe_in_subprocess
from dreamfleet.fleet.launchers.local import LocalLauncher, LocalWorker
from dreamfleet.fleet.nodes import (
    OUTPUT_LENGTH,
    POLL_SECONDS,
    Answer,
    Asked,
    MachineReport,
    WorkerReport,
)
from dreamfleet.fleet.stall import hanging
from dreamfleet.fleet.supervisor import Say
from dreamfleet.fleet.workers import env_worker
from dreamfleet.formatting import readable
from dreamfleet.metrics.timing import Rate
from dreamfleet.roles.addresses import Registry
from dreamfleet.roles.fences import Fence, fenced
from dreamfleet.roles.health import Health, health_path, read_health
from dreamfleet.roles.invitations import read_url
from dreamfleet.roles.runtime import sigterm_interrupts
from dreamfleet.roles.spaces_file import Spaces
from dreamfleet.spaces import space_differences, spaces_from_json
from dreamfleet.transport import Client, RemoteError, TransportError
from dreamfleet.transport.address import Address, parse
from dreamfleet.trust import admit, code_in

log = logging.getLogger(__name__)

_PROBE_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_CALL_SECONDS = 10.0
_POLL_TIMEOUT = 3.0
_TRY_SECONDS, _PAUSE_SECONDS = 0.5, 0.1
_SAY_SECONDS = 60.0
_STILL_SECONDS = 10.0  # without a step, after which this machine says why
_PORT_SECONDS = 1.0  # for a look at ports between two signs of life
_REFUSED = "nothing listens there: the run has ended or is starting, or a firewall refuses it"
_NO_ACTIONS = "the run sends no actions; 'dreamfleet status' says there what it waits for"
_PLACE_PREFIX = "dreamfleet-join-"
_KEY = "join.key"  # not the name under which a run keeps its own
_LOOKED_UP = "tcp://127.0.0.1:{auto}"
_ROLE = re.compile(r"actor(-[0-9]{1,4})?")
_REFUSED_KEY = "refused the key"
_OTHER_KEY = "handshake failed"
_LEAVING = "Leaving the run; a second signal ends at once."
_END_SECONDS = 20.0


class JoinError(DreamfleetError):
    """This machine cannot join, or cannot stay; the message says why and what to do."""


@dataclass(frozen=True)
class Offer:
    """What this machine offers."""

    envs: int = 1
    eval_envs: int = 0
    envs_per_process: int | None = None
    """None for the run's."""
    task: str | None = None
    """Code of the user's own that the run names, named again."""
    trust: bool = False
    """Import whatever code the run names."""


def join(url: str, offer: Offer, *, logdir: Path | None, patience: float, say: Say) -> None:
    """Serve a run with environments of this machine until it is over, or until Ctrl-C."""
    address, keys = read_url(url)
    with sigterm_interrupts(), _place(logdir) as place:
        keys.save(place / _KEY)
        try:
            if problem := closed_port({"join": address}, _PROBE_SECONDS):
                raise JoinError(f"{problem}, and those that stand below the run's line.")
            with Client(address.text, "join", keys=keys, patience=_CONNECT_SECONDS) as client:
                _Machine(address, offer, place, patience, say).serve(client)
        except KeyboardInterrupt:
            say("This machine has left the run.")
        finally:
            (place / _KEY).unlink(missing_ok=True)


class _Machine:
    """This machine's part of a run."""

    def __init__(
        self, address: Address, offer: Offer, place: Path, patience: float, say: Say
    ) -> None:
        self._address, self._offer, self._place = address, offer, place
        self._patience, self._say = patience, say
        self._token = secrets.token_urlsafe(24)
        self._name = ""  # by which the run knows this machine, once it has joined
        self._moved = self._shown = time.monotonic()
        self._steps, self._why, self._told = 0, "", False
        self._rate = Rate(_SAY_SECONDS)

    def serve(self, client: Client) -> None:
        """Run what the run's supervisor says, until the run is over."""
        host, offer = socket.gethostname()[:90] or "machine", self._offer
        asked = Asked(__version__, "", host, offer.envs, offer.eval_envs, 1)
        with LocalLauncher(self._place) as launcher, closing(_Workers(launcher)) as workers:
            try:
                while not (answer := self._ask(client, asked, workers)).over:
                    if answer.dismissed:
                        raise JoinError(f"The run has dismissed this machine: {answer.dismissed}")
                    if answer.digest == asked.digest:
                        self._follow(answer, workers)
                        time.sleep(POLL_SECONDS)
                        continue
                    if asked.digest:
                        self._say("The run was resumed with other settings: joining again.")
                    workers.close()
                    workers.begin(config := self._tried(answer))
                    size = config.envs_per_process
                    asked = replace_fields(asked, digest=answer.digest, envs_per_process=size)
            except KeyboardInterrupt:
                self._say(_LEAVING)
                workers.close()
                with suppress(TransportError):  # it is noticed after a while
                    client.call("leave", self._token).result(_CALL_SECONDS)
                raise
        self._say(f"{answer.over} This machine's part is done.")

    def _ask(self, client: Client, asked: Asked, workers: _Workers) -> Answer:
        """What to run now. Environments wait for a run that does not answer, but not too long."""
        begin, silent = time.monotonic(), False
        while True:
            report = MachineReport(workers.report(), self._why)
            try:
                client.connect(_TRY_SECONDS)
                answer = self._poll(client, asked, report)
            except TransportError as error:
                seconds, text = time.monotonic() - begin, str(error)
                # Later the handshake may fail because the run was killed in the middle of it.
                unknown = _REFUSED_KEY in text or (not self._name and _OTHER_KEY in text)
                patience = self._patience if self._name else _CONNECT_SECONDS
                if unknown or seconds > patience:
                    raise JoinError(_unreachable(self._address, text)) from None
                if self._name and not silent and seconds > _POLL_TIMEOUT:
                    silent = True
                    self._say(
                        "The run does not answer; the environments wait for it "
                        f"({text.rstrip('.')})."
                    )
                time.sleep(_PAUSE_SECONDS)
            else:
                if silent:
                    self._say("The run answers again.")
                return answer

    def _poll(self, client: Client, asked: Asked, report: MachineReport) -> Answer:
        plain = (msgspec.to_builtins(each) for each in (asked, report))
        timeout = _POLL_TIMEOUT if self._name else _CALL_SECONDS
        try:
            answer = client.call("poll", self._token, *plain).result(timeout)
            return msgspec.convert(answer, Answer)
        except RemoteError as error:  # without where it stood in the run's program
            text = str(error.args[0])
            text = text.partition(f"{error.kind}: ")[2] or text
            refused = "The run has dismissed this machine: " if self._name else ""
            raise JoinError(f"{refused}{text}") from None
        except msgspec.ValidationError as error:
            raise JoinError(
                f"This version cannot read the run's answer ({error}): use the same version of "
                "Dreamfleet on both machines."
            ) from None

    def _tried(self, described: Answer) -> RunConfig:
        """The run as this machine's environments see it, once they were made here and the run's
        servers were reached. Imports nothing that the run names, unless that is allowed."""
        config = RunConfig.from_json(described.config)
        named = self._offer.task
        if named is not None and named != config.task:
            raise ConfigError(
                f"The run's task is {config.task}, not {named}: use --task {config.task}."
            )
        code, stated = code_in([("task", config.task)]), ["task"] if named else []
        admit("The run", code, trust=self._offer.trust, stated=stated)
        config = replace(
            config,
            logdir=self._place,
            keys=str(self._place / _KEY),
            envs_per_process=self._offer.envs_per_process or config.envs_per_process,
            # They are found in this machine's registry.
            actor_addr=_LOOKED_UP,
        )
        self._probe_env(config, described.spaces)
        # One at whose port nothing listens may start later.
        servers = self._servers(described.addresses)
        if problem := closed_port(servers, _PROBE_SECONDS, ignore=_REFUSED):
            raise JoinError(f"{problem}.")
        return config

    def _servers(self, told: Mapping[str, str]) -> dict[str, Address]:
        return {"join": self._address, **called_servers(self._address, told)}

    def _probe_env(self, config: RunConfig, spaces: str) -> None:
        """Make an environment once, so that one that does not work here is told before it joins."""
        together = min(config.envs_per_process, max(self._offer.envs, self._offer.eval_envs))
        try:
            probe = probe_in_subprocess(
                partial(environment, config, None),
                both=together > 1,
                timeout=config.env_timeout,
                say=self._say,
            )
        except DreamfleetError as error:
            hint = "Install what it needs on this machine"
            if not is_bundled(config.task):
                hint += ", or start 'dreamfleet join' in the directory that holds its module"
            raise JoinError(
                f"The environment of the run, {config.task}, cannot be made here. {error} {hint}."
            ) from None
        _check_spaces(config.task, spaces, (probe.obs_space, probe.act_space))
        for note in probe.notes:
            self._say(note)

    def _follow(self, answer: Answer, workers: _Workers) -> None:
        """Run what the answer says, and say how it goes."""
        now = time.monotonic()
        if not self._name:
            self._name = answer.name
            self._say(
                f"Joined {workers.config.task} as {self._name}; logs are in "
                f"{self._place / 'logs'}. Ctrl-C leaves."
            )
        with suppress(OSError):  # a full disk; those of before may still be right
            publish_addresses(self._place, self._address, answer.addresses)
        workers.follow(answer.workers)
        self._rate.add(now, workers.steps)
        if workers.steps != self._steps:
            self._steps, self._moved, self._why, self._told = workers.steps, now, "", False
        if now - self._shown > _SAY_SECONDS:
            self._shown, self._told = now, False
            rate = readable(round(self._rate.value, 1))
            self._say(f"{readable(self._steps)} steps, {rate} steps/s")
        if now - self._moved > _STILL_SECONDS:
            self._moved = now
            closed = closed_port(self._servers(answer.addresses), _PORT_SECONDS)
            self._why = closed[:1000] or workers.hanging()
            # Between two rounds of evaluation there is nothing to do.
            if not self._told and (self._why or self._offer.envs):
                self._told = True
                self._say(f"This machine makes no steps: {self._why or _NO_ACTIONS}.")


class _Started(NamedTuple):
    order: Fence
    process: LocalWorker
    health: Path


class _Workers:
    """The processes of this machine, as the run's supervisor wants them."""

    config: RunConfig
    """The run, once it is known."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher
        self._started: dict[str, _Started] = {}
        self.steps = 0

    def begin(self, config: RunConfig) -> None:
        self.config = config
        shutil.rmtree(health_path(config, ""), ignore_errors=True)  # counts are of this run

    def follow(self, orders: Mapping[str, Fence]) -> None:
        """Start what is new, and end what is no longer wanted."""
        for name, started in list(self._started.items()):
            if orders.get(name) != started.order:
                started.process.kill()
                started.process.wait()
                del self._started[name]
        for name, order in orders.items():
            if name not in self._started:
                self._started[name] = self._start(name, order)

    def _start(self, name: str, order: Fence) -> _Started:
        # Ids are used again, by other machines too: their environments play other episodes.
        seed = env_seed(self.config.seed, fenced([0], order.incarnation)[0])
        config = replace(self.config, seed=seed)
        make, incarnation = environments(config, None), order.incarnation
        worker = env_worker(make, order.ids, config, order.is_eval, incarnation=incarnation)
        worker = replace(worker, name=name)
        assert isinstance(worker.health, Path)
        Health(worker.health)  # clears what its predecessor was doing
        self._launcher.prepare([worker])
        return _Started(order, self._launcher.start(worker), worker.health)

    def report(self) -> dict[str, WorkerReport]:
        found, self.steps = {}, 0
        for name, (order, process, path) in self._started.items():
            health, code = replace(read_health(path), traceback=""), process.wait(0)
            output = "" if code is None else process.output()[-OUTPUT_LENGTH:]
            found[name] = WorkerReport(order.incarnation, process.pid, code, output, health)
            self.steps += health.steps
        return found

    def hanging(self) -> str:
        """Environments that take long right now."""
        records = [read_health(each.health) for each in self._started.values()]
        return hanging(records, self.config.env_timeout, time.time())

    def close(self) -> None:
        """End all of them. Ctrl-C once more does so at once."""
        running = [each.process for each in self._started.values()]
        try:
            for process in running:
                process.terminate()
            deadline = time.monotonic() + _END_SECONDS
            for process in running:
                process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in running:
                process.kill()
                process.wait()
        self._started.clear()


def publish_addresses(place: Path, joined_at: Address, addresses: Mapping[str, str]) -> None:
    """Keep where the servers of the run listen that a machine may call."""
    registry = Registry(place)
    for name, address in called_servers(joined_at, addresses).items():
        if registry.find(name) != address.text:
            registry.publish(name, address.text)


def called_servers(joined_at: Address, told: Mapping[str, str]) -> dict[str, Address]:
    """The servers that a machine may call, of those that it was told of. The host `*` is the one at
    which it has joined."""
    servers = {}
    for name, text in told.items():
        with suppress(TransportError):
            address = parse(text)
            if _ROLE.fullmatch(name) and address.kind == "tcp":
                host = joined_at.host if address.host == "*" else address.host
                servers[name] = replace(address, host=host)
    return servers


def closed_port(servers: Mapping[str, Address], seconds: float, ignore: str = "") -> str:
    """The first server that cannot be reached from here, which the transport only knows as silence,
    and all ports that have to be open, without a period; empty if all are reached."""
    for name, address in servers.items():
        if (problem := _port_problem(address, seconds)) in ("", ignore):
            continue
        ports: dict[str, list[str]] = {}
        for each in servers.values():
            ports.setdefault(each.host, []).append(str(each.port))
        every = " and ".join(f"{', '.join(each)} of {host}" for host, each in ports.items())
        return (
            f"TCP port {address.port} of {address.host} ({name}) cannot be reached: {problem}. "
            f"Ports to open for this machine: {every}"
        )
    return ""


def _port_problem(address: Address, seconds: float) -> str:
    try:
        socket.create_connection((address.host, address.port), timeout=seconds).close()
    except socket.gaierror:
        return (
            f"this machine does not know the name {address.host}: use the IP address, or fix DNS "
            "or /etc/hosts"
        )
    except ConnectionRefusedError:
        return _REFUSED
    except TimeoutError:
        return f"there is no answer within {seconds:g} s, probably because of a firewall"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _check_spaces(task: str, run: str, here: tuple[Spaces, Spaces]) -> None:
    """The agent takes what the environments of the run give, and nothing else."""
    try:
        plain = json.loads(run)
        there = [spaces_from_json(plain[key]) for key in ("obs_space", "act_space")]
    except (ValueError, TypeError, LookupError, AttributeError):
        return
    for what, key, theirs, ours in space_differences(there, here):
        raise JoinError(
            f"{task} differs between this machine and the run: the {what} {key!r} is {ours} here "
            f"and {theirs} there. Install the same version of it on both machines."
        )


def _unreachable(address: Address, text: str) -> str:
    there, again = f"{address.host}:{address.port}", "'dreamfleet invite DIR' prints a line there."
    if _REFUSED_KEY in text:
        return (
            f"The run at {there} refused the key: it was revoked, or belongs to another run. "
            f"{again}"
        )
    if _OTHER_KEY in text:
        return (
            f"The server at {there} does not know this key: it belongs to another run, or the line "
            f"was not copied completely. {again}"
        )
    return f"The run at {there} does not answer: {text} It may have ended."


@contextmanager
def _place(logdir: Path | None) -> Iterator[Path]:
    """A directory for what environments need, and for their logs; not that of a run."""
    if logdir is None:
        with temporary_folder(_PLACE_PREFIX) as place:
            yield place
        return
    if (logdir / CONFIG_FILE).exists():
        raise ConfigError(
            f"{logdir} is the directory of a run: choose another --logdir for this machine."
        )
    with claim_directory(logdir):
        yield logdir.absolute()
