"""A machine that joins a run with its environments: what `dreamfleet join` does.

It asks the run's supervisor every second what to run (`dreamfleet.fleet.nodes`), and starts and
ends processes accordingly. It calls the supervisor and the actors only. What the
supervisor says about addresses goes into an address book of this machine's own, so that
environments here find the actor as they do everywhere.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from dreamfleet import __version__
from dreamfleet.config import CONFIG_FILE, JOINED, RunConfig
from dreamfleet.envs import env_seed, is_bundled
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.files import temporary_folder
from dreamfleet.fleet.claim import claim_directory
from dreamfleet.fleet.env_probe import probe_in_subprocess
from dreamfleet.fleet.factories import environment, environments
from dreamfleet.fleet.launchers import ONE_THREAD, Worker
from dreamfleet.fleet.launchers.local import LocalLauncher, LocalWorker
from dreamfleet.fleet.nodes import (
    OUTPUT_LENGTH,
    POLL_SECONDS,
    Answer,
    Asked,
    MachineReport,
    Order,
    WorkerReport,
)
from dreamfleet.fleet.stall import hanging
from dreamfleet.fleet.supervisor import Say
from dreamfleet.formatting import readable
from dreamfleet.metrics.timing import Rate
from dreamfleet.roles.addresses import DirectoryBook
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.health import Health, health_path, read_health
from dreamfleet.roles.invitations import read_url
from dreamfleet.roles.runtime import sigterm_interrupts
from dreamfleet.roles.spaces_file import Spaces
from dreamfleet.spaces import space_differences, spaces_from_json
from dreamfleet.transport import Client, Disconnected, RemoteError, Timeout, TransportError
from dreamfleet.transport.address import Address, parse
from dreamfleet.trust import admit, code_in

log = logging.getLogger(__name__)

_PROBE_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_CALL_SECONDS = 10.0
_POLL_TIMEOUT = 3.0
_TRY_SECONDS = 0.5
_SAY_SECONDS = 60.0
_STILL_SECONDS = 10.0  # without a step, after which this machine says why
_PORT_SECONDS = 1.0  # for a look at ports between two signs of life
_PORTS_AT_ONCE = 16
_REFUSED = "nothing listens there: the agent is starting, or a firewall refuses the connection"
_NO_ACTIONS = "the run sends no actions; 'dreamfleet status' says there what it waits for"
_PLACE_PREFIX = "dreamfleet-join-"
_KEY = "join.key"  # not the name under which a run keeps its own
_LOOKED_UP = "tcp://127.0.0.1:{auto}"
_ROLE = re.compile(r"actor(-[0-9]{1,4})?")
_REFUSED_KEY = "refused the key"
_OTHER_KEY = "handshake failed"
_LEAVING = "Leaving the run; once more ends at once."
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
    """Serve a run with environments of this machine until it is over, or until Ctrl-C.

    Raises:
        ConfigError: What was typed cannot work.
        JoinError: The run cannot be reached, or does not want this machine.
    """
    address, keys = read_url(url)
    with sigterm_interrupts(), _place(logdir) as place:
        keys.save(place / _KEY)
        _probe(address)
        machine = _Machine(address, offer, place, patience, say)
        try:
            with Client(address.text, "join", keys=keys, patience=_CONNECT_SECONDS) as client:
                machine.serve(client)
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

    def serve(self, client: Client) -> None:
        """Run environments until the run is over, anew if it was resumed with other settings."""
        described = self._describe(client, wait=False)
        while not (over := described.over or self._run(client, described)):
            self._say("The run was resumed with other settings: joining again.")
            described = self._describe(client, wait=True)
        self._say(f"{over} This machine's part is done.")

    # --- joining ---------------------------------------------------------------------------------

    def _describe(self, client: Client, *, wait: bool) -> Answer:
        """Ask what the run is, and make sure that it works here."""
        deadline = time.monotonic() + (self._patience if wait else 0.0)
        while True:
            try:
                self._connect(client, first=not wait)
                described = self._poll(client, self._asked(), MachineReport(), _CALL_SECONDS)
                if not described.over:
                    self._probe_env(self._config(described), described.spaces)
                    self._try_ports(described.addresses)
                return described
            except (Disconnected, Timeout) as error:
                if _REFUSED_KEY in str(error) or time.monotonic() >= deadline:
                    raise JoinError(_unreachable(self._address, error)) from None

    def _try_ports(self, told: Mapping[str, str]) -> None:
        """Refuse to join a run whose servers cannot be reached from here. One at whose port nothing
        listens may start later."""
        problems = closed_ports(self.servers(told), _PROBE_SECONDS)
        if any(problem != _REFUSED for problem in problems.values()):
            raise JoinError(f"{self.ports_text(told, problems)}.")

    def servers(self, told: Mapping[str, str]) -> dict[str, Address]:
        """Those that the environments of this machine call."""
        return called_servers(self._address, told)

    def ports_text(self, told: Mapping[str, str], problems: Mapping[str, str]) -> str:
        """Which ports cannot be reached, and all that have to be open; without a period."""
        servers = self.servers(told)
        closed = "; ".join(
            f"TCP port {servers[name].port} of {servers[name].host} ({name}) cannot be reached: "
            f"{problem}"
            for name, problem in problems.items()
        )
        ports: dict[str, list[str]] = {}
        for address in (self._address, *servers.values()):
            ports.setdefault(address.host, []).append(str(address.port))
        needed = " and ".join(f"{', '.join(each)} of {host}" for host, each in ports.items())
        return f"{closed}. Ports that have to be open for this machine: {needed}"

    def _connect(self, client: Client, *, first: bool) -> None:
        """Wait until the run answers, or it is clear that this key is none of its."""
        # Later the handshake may fail because the run was killed in the middle of it.
        final = (_REFUSED_KEY, _OTHER_KEY) if first else (_REFUSED_KEY,)
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                return client.connect(_TRY_SECONDS)
            except Disconnected as error:
                known = any(words in str(error) for words in final)
                if known or time.monotonic() >= deadline:
                    raise

    def _asked(self, digest: str = "", envs_per_process: int = 1) -> Asked:
        return Asked(
            version=__version__,
            digest=digest,
            host=socket.gethostname()[:90] or "machine",
            envs=self._offer.envs,
            eval_envs=self._offer.eval_envs,
            envs_per_process=envs_per_process,
        )

    def _poll(self, client: Client, asked: Asked, report: MachineReport, timeout: float) -> Answer:
        """Ask what to run."""
        plain = (msgspec.to_builtins(each) for each in (asked, report))
        try:
            answer = client.call("poll", self._token, *plain).result(timeout)
        except RemoteError as error:
            raise JoinError(_sentence(error)) from None
        try:
            return msgspec.convert(answer, Answer)
        except msgspec.ValidationError as error:
            raise JoinError(
                f"The run's answer is not what this version understands ({error}): use the same "
                "version of Dreamfleet on both machines."
            ) from None

    def _config(self, described: Answer) -> RunConfig:
        """The run as this machine's environments see it. It imports nothing that the run names."""
        config = RunConfig.from_json(described.config)
        self._check_task(config.task)
        return replace(
            config,
            logdir=self._place,
            keys=str(self._place / _KEY),
            envs_per_process=self._offer.envs_per_process or config.envs_per_process,
            # They are found in this machine's address book.
            actor_addr=_LOOKED_UP,
        )

    def _check_task(self, task: str) -> None:
        named = self._offer.task
        if named is not None and named != task:
            raise ConfigError(f"The run's task is {task}, not {named}: use --task {task}.")
        stated = ["task"] if named else []
        code = code_in([("task", task)])
        admit("The run", code, trust=self._offer.trust, stated=stated)

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

    # --- serving ---------------------------------------------------------------------------------

    def _run(self, client: Client, described: Answer) -> str:
        """Run what the run's supervisor says; returns how the run ended, or nothing if it has other
        settings now."""
        config = self._config(described)
        asked = self._asked(described.digest, config.envs_per_process)
        with LocalLauncher(self._place) as launcher, _Workers(launcher, config) as workers:
            try:
                answer = self._follow(client, config.task, asked, workers)
            except KeyboardInterrupt:
                self._say(_LEAVING)
                workers.end()
                with suppress(TransportError):  # it is noticed after a while
                    client.call("leave", self._token).result(_CALL_SECONDS)
                raise
        if answer.dismissed:
            raise JoinError(f"The run has dismissed this machine: {answer.dismissed}")
        return answer.over

    def _follow(self, client: Client, task: str, asked: Asked, workers: _Workers) -> Answer:
        """Do what each answer says, until one says that this machine's part is over."""
        heard = shown = moved = time.monotonic()
        made, why, silent, told, name = 0, "", False, False, ""
        rate = Rate(_SAY_SECONDS)
        while True:
            report = MachineReport(workers.report(), why)
            sent = time.monotonic()
            rate.add(sent, workers.steps)
            if workers.steps != made:
                made, moved, why, told = workers.steps, sent, "", False
            try:
                answer = self._poll(client, asked, report, _POLL_TIMEOUT)
            except (TransportError, JoinError) as error:
                if not name and isinstance(error, JoinError):
                    raise
                self._check_silence(error, time.monotonic() - heard)
                if not silent:
                    self._say(
                        "The run does not answer; the environments wait for it "
                        f"({str(error).rstrip('.')})."
                    )
                silent = True
                time.sleep(POLL_SECONDS)
                continue
            if silent:
                self._say("The run answers again.")
            heard, silent = sent, False
            if answer.over or answer.dismissed or answer.digest != asked.digest:
                return answer
            if not name:
                name = answer.name
                self._say(
                    f"Joined {task} as {name} with {_counted(self._offer)}; logs are in "
                    f"{self._place / 'logs'}. Ctrl-C leaves."
                )
            with suppress(OSError):  # a full disk; those of before may still be right
                publish_addresses(self._place, self._address, answer.addresses)
            workers.follow(answer.workers)
            if sent - shown > _SAY_SECONDS:
                shown, told = sent, False
                self._say(f"{readable(made)} steps, {readable(round(rate.value, 1))} steps/s")
            if sent - moved > _STILL_SECONDS:
                moved, why = sent, self._why_still(answer.addresses, workers)
                # Between two rounds of evaluation there is nothing to do.
                if not told and (why or self._offer.envs):
                    self._say(f"This machine makes no steps: {why or _NO_ACTIONS}.")
                    told = True
            time.sleep(POLL_SECONDS)

    def _check_silence(self, error: DreamfleetError, seconds: float) -> None:
        """Give up on a run that refuses this machine, or that does not answer for too long."""
        if isinstance(error, JoinError):
            raise JoinError(f"The run does not want this machine any more: {error}") from None
        if _REFUSED_KEY in str(error):
            raise JoinError(
                "The run refuses this machine's key by now: it was revoked. The environments have "
                "ended. Ask for a new line, which 'dreamfleet invite DIR' prints there."
            ) from None
        if seconds > self._patience:
            raise JoinError(_unreachable(self._address, error)) from None

    def _why_still(self, told: Mapping[str, str], workers: _Workers) -> str:
        """What keeps the environments here from making steps; empty if nothing does."""
        if problems := closed_ports(self.servers(told), _PORT_SECONDS):
            return self.ports_text(told, problems)[:1000]
        return workers.hanging()


class _Started(NamedTuple):
    order: Order
    process: LocalWorker
    health: Path


class _Workers:
    """The processes of this machine. Which ones there are is decided by the run's supervisor."""

    def __init__(self, launcher: LocalLauncher, config: RunConfig) -> None:
        self._launcher, self._config = launcher, config
        self._started: dict[str, _Started] = {}
        self.steps = 0
        shutil.rmtree(health_path(config, ""), ignore_errors=True)  # counts are of this run

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def follow(self, orders: Mapping[str, Order]) -> None:
        """Start what is new, and end what is no longer wanted."""
        for name, started in list(self._started.items()):
            if orders.get(name) != started.order:
                started.process.kill()
                started.process.wait()
                del self._started[name]
        for name, order in orders.items():
            if name not in self._started:
                self._started[name] = self._start(name, order)

    def _start(self, name: str, order: Order) -> _Started:
        # Ids are used again, by other machines too: their environments play other episodes.
        seed = env_seed(self._config.seed, JOINED + order.incarnation)
        config = replace(self._config, seed=seed)
        make, ids = environments(config, None), list(order.ids)
        health = health_path(config, f"env-{ids[0]}")
        Health(health)  # clears what its predecessor was doing
        function = partial(
            parallel_env, make, ids, config, order.is_eval, incarnation=order.incarnation
        )
        worker = Worker(name, "env", function, ONE_THREAD)
        self._launcher.prepare([worker])
        return _Started(order, self._launcher.start(worker), health)

    def report(self) -> dict[str, WorkerReport]:
        """How the workers are doing."""
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
        return hanging(records, self._config.env_timeout, time.time())

    def end(self) -> None:
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


def _counted(offer: Offer) -> str:
    words = []
    for number, kind in ((offer.envs, "training"), (offer.eval_envs, "evaluation")):
        if number:
            words.append(f"{number} {kind} environment{'s' if number > 1 else ''}")
    return " and ".join(words)


def publish_addresses(place: Path, joined_at: Address, addresses: Mapping[str, str]) -> None:
    """Keep where the servers of the run listen that a machine may call."""
    book = DirectoryBook()
    for name, address in called_servers(joined_at, addresses).items():
        if book.find(place, name) != address.text:
            book.publish(place, name, address.text)


def called_servers(joined_at: Address, told: Mapping[str, str]) -> dict[str, Address]:
    """The servers that a machine may call, of those that the run has told of. The host `*` is
    the one at which this machine has joined."""
    servers = {}
    for name, text in told.items():
        with suppress(TransportError):
            address = parse(text)
            if _ROLE.fullmatch(name) and address.kind == "tcp":
                host = joined_at.host if address.host == "*" else address.host
                servers[name] = replace(address, host=host)
    return servers


def closed_ports(servers: Mapping[str, Address], seconds: float) -> dict[str, str]:
    """The servers that cannot be reached from here, and why."""
    try_port = partial(_port_problem, seconds=seconds)
    with ThreadPoolExecutor(_PORTS_AT_ONCE) as threads:
        found = dict(zip(servers, threads.map(try_port, servers.values()), strict=True))
    return {name: text for name, text in found.items() if text}


def _port_problem(address: Address, seconds: float) -> str:
    """Why nothing is reached at an address, which the transport only knows as silence."""
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
        return f"there is no answer within {seconds:g} s, mostly because of a firewall"
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
            f"{task} is another environment here than in the run: the {what} {key!r} is {ours} "
            f"here and {theirs} there. Install the same version of it on both machines."
        )


# --- getting there -------------------------------------------------------------------------------


def _probe(address: Address) -> None:
    """Say why the run cannot be reached."""
    problem = _port_problem(address, _PROBE_SECONDS)
    if not problem:
        return
    if problem == _REFUSED:
        problem = (
            "nothing listens there: the run has ended or was started without --bind, or the port "
            "is another one. 'dreamfleet resume' starts it again"
        )
    raise JoinError(
        f"{address.host}:{address.port} cannot be reached: {problem}. Check the address, and that "
        f"TCP port {address.port} and the others that stand below the run's line are open for this "
        "machine."
    )


def _unreachable(address: Address, error: DreamfleetError) -> str:
    there, text = f"{address.host}:{address.port}", str(error)
    if _REFUSED_KEY in text:
        return (
            f"The run at {there} refused the key: it was revoked, or is another run's. Ask for a "
            "new line, which 'dreamfleet invite DIR' prints there."
        )
    if _OTHER_KEY in text:
        return (
            f"What listens at {there} does not know this key: it is another run, or the line was "
            "not copied whole. 'dreamfleet invite DIR' prints it again there."
        )
    return f"The run at {there} does not answer: {text} It may have ended."


def _sentence(error: RemoteError) -> str:
    """What the run said, without where it stood in its program."""
    text = error.args[0]
    return str(text).partition(f"{error.kind}: ")[2] or str(text)


# --- this machine --------------------------------------------------------------------------------


@contextmanager
def _place(logdir: Path | None) -> Iterator[Path]:
    """A directory for what environments need, and for their logs.

    Raises:
        ConfigError: It is the directory of a run.
    """
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
