"""A machine that joins a run with its environments: what `dreamfleet join` does.

It asks the run's supervisor every second what to run (`dreamfleet.fleet.nodes`), and starts and
ends processes accordingly. It calls the supervisor, the actor and the evaluator only. What the
supervisor says about addresses goes into an address book of this machine's own, so that
environments here find the actor as they do everywhere.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

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
from dreamfleet.fleet.nodes import POLL_SECONDS
from dreamfleet.fleet.stall import hanging
from dreamfleet.fleet.supervisor import Say
from dreamfleet.formatting import readable
from dreamfleet.roles.addresses import DirectoryBook
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.health import Health, HealthRecord, health_path, read_health
from dreamfleet.roles.invitations import read_url
from dreamfleet.roles.runtime import sigterm_interrupts
from dreamfleet.spaces import Space, spaces_from_json, without_logs, without_reset
from dreamfleet.transport import Client, Disconnected, RemoteError, Timeout, TransportError
from dreamfleet.transport.address import Address, parse
from dreamfleet.trust import A_MACHINE, admit, code_in

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
_ROLE = re.compile(r"(actor|evaluator)(-[0-9]{1,4})?")
_REFUSED_KEY = "refused the key"
_OTHER_KEY = "handshake failed"
_LEAVING = "Leaving the run; once more ends at once."
_END_SECONDS = 20.0
_OUTPUT_LENGTH = 8000


class JoinError(DreamfleetError):
    """This machine cannot join, or cannot stay; the message says why and what to do."""


class _PortsClosed(JoinError):
    """The supervisor answers, and another server of the run cannot be reached."""


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


class _Order(msgspec.Struct, frozen=True):
    """A worker that is to run here."""

    ids: list[int]
    is_eval: bool
    incarnation: int


class _Answer(msgspec.Struct, frozen=True):
    """What the run says each time."""

    addresses: dict[str, str]
    over: str
    digest: str
    known: bool = True
    dismissed: str = ""
    workers: dict[str, _Order] = {}


class _Described(_Answer, frozen=True, kw_only=True):
    version: str
    config: str
    spaces: str


class _Joined(_Answer, frozen=True, kw_only=True):
    token: str
    name: str


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
        self._looked = ""  # the description whose environment was made here once

    def serve(self, client: Client) -> None:
        """Join, run the environments, and do so again if the run does not know this machine."""
        first = True
        while True:
            described, joined = self._enter(client, wait=not first)
            if described.over or joined is None:
                self._say(f"{described.over} This machine's part is done.")
                return
            first = False
            if self._run(client, described, joined):
                return

    # --- joining ---------------------------------------------------------------------------------

    def _enter(self, client: Client, *, wait: bool) -> tuple[_Described, _Joined | None]:
        """Ask what the run is, make sure that it works here, and join."""
        deadline = time.monotonic() + (self._patience if wait else 0.0)
        while True:
            try:
                self._connect(client, first=not wait)
                described = self._ask(client, _Described, "describe", __version__)
                if described.over:
                    return described, None
                config = self._config(described)
                self._look(config, described)
                self._try_ports(described.addresses)
                asked = {
                    "version": __version__,
                    "host": socket.gethostname()[:90] or "machine",
                    "envs": self._offer.envs,
                    "eval_envs": self._offer.eval_envs,
                    "envs_per_process": config.envs_per_process,
                }
                return described, self._ask(client, _Joined, "join", asked)
            except _PortsClosed:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_TRY_SECONDS)
            except (Disconnected, Timeout) as error:
                if _REFUSED_KEY in str(error) or time.monotonic() >= deadline:
                    raise JoinError(_unreachable(self._address, error)) from None

    def _try_ports(self, told: Mapping[str, str]) -> None:
        """Refuse to join a run whose servers cannot be reached from here. One at whose port nothing
        listens may start later."""
        problems = closed_ports(self.servers(told), _PROBE_SECONDS)
        if any(problem != _REFUSED for problem in problems.values()):
            raise _PortsClosed(f"{self.ports_text(told, problems)}.")

    def servers(self, told: Mapping[str, str]) -> dict[str, Address]:
        """Those that the environments of this machine call."""
        every = called_servers(self._address, told)
        acts = bool(self._offer.envs) or "evaluator" not in every
        plays = bool(self._offer.eval_envs)
        return {n: each for n, each in every.items() if (plays if n == "evaluator" else acts)}

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

    def _ask(
        self,
        client: Client,
        kind: type[Any],
        method: str,
        *arguments: Any,
        timeout: float = _CALL_SECONDS,
    ) -> Any:
        try:
            answer = client.call(method, *arguments).result(timeout)
        except RemoteError as error:
            raise JoinError(_sentence(error)) from None
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise JoinError(
                f"The run's answer is not what this version understands ({error}): use the same "
                "version of Dreamfleet on both machines."
            ) from None

    def _config(self, described: _Described) -> RunConfig:
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
            evaluator_addr=_LOOKED_UP,
        )

    def _check_task(self, task: str) -> None:
        named = self._offer.task
        if named is not None and named != task:
            raise ConfigError(f"The run's task is {task}, not {named}: say --task {task}.")
        stated = ["task"] if named else []
        code = code_in([("task", task)])
        admit("The run", code, trust=self._offer.trust, stated=stated, rule=A_MACHINE)

    def _look(self, config: RunConfig, described: _Described) -> None:
        """Make an environment once, so that one that does not work here is told before it joins."""
        if self._looked == described.digest:
            return
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
        _check_spaces(config.task, described.spaces, probe.obs_space, probe.act_space)
        for note in probe.notes:
            self._say(note)
        self._looked = described.digest

    # --- serving ---------------------------------------------------------------------------------

    def _run(self, client: Client, described: _Described, joined: _Joined) -> bool:
        """Run what the run's supervisor says; returns whether this machine's part is done."""
        config = self._config(described)
        publish_addresses(self._place, self._address, joined.addresses)
        self._say(
            f"Joined {config.task} as {joined.name} with {_counted(self._offer)}; logs are in "
            f"{self._place / 'logs'}. Ctrl-C leaves."
        )
        with LocalLauncher(self._place) as launcher, _Workers(launcher, config) as workers:
            try:
                answer = self._follow(client, joined, workers)
            except KeyboardInterrupt:
                self._say(_LEAVING)
                workers.end()
                with suppress(TransportError):  # it is noticed after a while
                    client.call("leave", joined.token).result(_CALL_SECONDS)
                raise
        if answer.dismissed:
            raise JoinError(f"The run has dismissed this machine: {answer.dismissed}")
        if answer.over:
            self._say(f"{answer.over} This machine's part is done.")
            return True
        lost = "The run was resumed with other settings."
        if not answer.known:
            lost = "The run does not know this machine any more."
        self._say(f"{lost} The environments have ended, and join again.")
        return False

    def _follow(self, client: Client, joined: _Joined, workers: _Workers) -> _Answer:
        """Do what each answer says, until one says that this machine's part is over."""
        heard = shown = moved = time.monotonic()
        steps, made, why, silent, told = 0, 0, "", False, False
        while True:
            report = {"workers": workers.report(), "why": why}
            sent = time.monotonic()
            if workers.steps != made:
                made, moved, why, told = workers.steps, sent, "", False
            try:
                call = ("poll", joined.token, report)
                answer: _Answer = self._ask(client, _Answer, *call, timeout=_POLL_TIMEOUT)
            except (TransportError, JoinError) as error:
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
            if answer.over or answer.dismissed or not answer.known:
                return answer
            if answer.digest != joined.digest:
                return answer
            with suppress(OSError):  # a full disk; those of before may still be right
                publish_addresses(self._place, self._address, answer.addresses)
            workers.follow(answer.workers)
            if sent - shown > _SAY_SECONDS:
                rate = (made - steps) / (sent - shown)
                shown, steps = sent, made
                self._say(f"{readable(steps)} steps, {readable(round(rate, 1))} steps/s")
                told = False
            if sent - moved > _STILL_SECONDS:
                moved, why = sent, self._why_still(answer.addresses, workers)
                # Between two rounds of evaluation there is nothing to do.
                if not told and (why or self._offer.envs):
                    self._say(f"This machine makes no steps: {why or _NO_ACTIONS}.")
                    told = True
            time.sleep(POLL_SECONDS)

    def _check_silence(self, error: DreamfleetError, seconds: float) -> None:
        """Give up on a run that refuses this machine, or that does not answer for too long."""
        if isinstance(error, JoinError) or _REFUSED_KEY in str(error):
            raise JoinError(_turned_away(error)) from None
        if seconds > self._patience:
            raise JoinError(_unreachable(self._address, cast(TransportError, error))) from None

    def _why_still(self, told: Mapping[str, str], workers: _Workers) -> str:
        """What keeps the environments here from making steps; empty if nothing does."""
        if problems := closed_ports(self.servers(told), _PORT_SECONDS):
            return self.ports_text(told, problems)[:1000]
        return workers.hanging()


class _Started(NamedTuple):
    order: _Order
    process: LocalWorker
    health: Path


class _Workers:
    """The processes of this machine. Which ones there are is decided by the run's supervisor."""

    def __init__(self, launcher: LocalLauncher, config: RunConfig) -> None:
        self._launcher, self._config = launcher, config
        self._started: dict[str, _Started] = {}
        self._before: dict[Path, HealthRecord] = {}  # when this machine joined
        self.steps = 0

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def follow(self, orders: Mapping[str, _Order]) -> None:
        """Start what is new, and end what is no longer wanted."""
        for name, started in list(self._started.items()):
            if orders.get(name) != started.order:
                started.process.kill()
                started.process.wait()
                del self._started[name]
        for name, order in orders.items():
            if name not in self._started:
                self._started[name] = self._start(name, order)

    def _start(self, name: str, order: _Order) -> _Started:
        # Ids are used again, by other machines too: their environments play other episodes.
        seed = env_seed(self._config.seed, JOINED + order.incarnation)
        config = replace(self._config, seed=seed)
        make, ids = environments(config, None), order.ids
        health = health_path(config, f"env-{ids[0]}")
        self._before.setdefault(health, read_health(health))
        Health(health)  # clears what its predecessor was doing
        function = partial(
            parallel_env, make, ids, config, order.is_eval, incarnation=order.incarnation
        )
        worker = Worker(name, "env", function, ONE_THREAD)
        self._launcher.prepare([worker])
        return _Started(order, self._launcher.start(worker), health)

    def report(self) -> dict[str, dict[str, Any]]:
        """How the workers are doing, as plain data."""
        found, self.steps = {}, 0
        for name, (order, process, path) in self._started.items():
            health, before, code = read_health(path), self._before[path], process.wait(0)
            steps, failures = health.steps - before.steps, health.failures - before.failures
            told = replace(health, steps=steps, failures=failures, traceback="")
            self.steps += steps
            found[name] = {
                "incarnation": order.incarnation,
                "pid": process.pid,
                "code": code,
                "output": "" if code is None else process.output()[-_OUTPUT_LENGTH:],
                "health": asdict(told if failures else replace(told, error="")),
            }
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
            f"this machine does not know the name {address.host}: write its number, or fix its "
            "entry in DNS or /etc/hosts"
        )
    except ConnectionRefusedError:
        return _REFUSED
    except TimeoutError:
        return f"there is no answer within {seconds:g} s, mostly because of a firewall"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _check_spaces(
    task: str, run: str, obs_space: Mapping[str, Space], act_space: Mapping[str, Space]
) -> None:
    """The agent takes what the environments of the run give, and nothing else."""
    if not run:
        return
    try:
        plain = json.loads(run)
        there = [spaces_from_json(plain[key]) for key in ("obs_space", "act_space")]
    except (ValueError, TypeError, LookupError, AttributeError):
        return
    for what, theirs, ours in (
        ("observation", without_logs(there[0]), without_logs(obs_space)),
        ("action", without_reset(there[1]), without_reset(act_space)),
    ):
        for key in dict.fromkeys([*theirs, *ours]):
            before, now = repr(theirs.get(key, "missing")), repr(ours.get(key, "missing"))
            if before != now:
                raise JoinError(
                    f"{task} is another environment here than in the run: the {what} {key!r} is "
                    f"{now} here and {before} there. Install the same version of it on both "
                    "machines."
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


def _unreachable(address: Address, error: TransportError) -> str:
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


def _turned_away(error: DreamfleetError) -> str:
    if isinstance(error, JoinError):
        return f"The run does not want this machine any more: {error}"
    return (
        "The run refuses this machine's key by now: it was revoked. The environments have ended. "
        "Ask for a new line, which 'dreamfleet invite DIR' prints there."
    )


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
