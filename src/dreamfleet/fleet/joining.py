"""A machine that joins a run with its environments: what `dreamfleet join` does.

It talks to the run's coordinator, actor and evaluator only. What the coordinator says about their
addresses goes into an address book of this machine's own, so that environments here find the actor
as they do everywhere.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dreamfleet import __version__
from dreamfleet.config import CONFIG_FILE, JOINED, RunConfig
from dreamfleet.envs import env_seed, is_bundled
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.fleet.claim import claim_directory
from dreamfleet.fleet.coordinator import BEAT_SECONDS, HOLD_SECONDS
from dreamfleet.fleet.env_probe import probe_in_subprocess
from dreamfleet.fleet.factories import environment, environments
from dreamfleet.fleet.launchers.local import LocalLauncher
from dreamfleet.fleet.stall import hanging
from dreamfleet.fleet.supervisor import FleetError, Say, Supervisor
from dreamfleet.fleet.workers import joined_workers
from dreamfleet.formatting import readable
from dreamfleet.roles.addresses import DirectoryBook
from dreamfleet.roles.invitations import read_url
from dreamfleet.roles.notes import read_notes
from dreamfleet.roles.runtime import sigterm_interrupts
from dreamfleet.spaces import Space, spaces_from_json, without_logs, without_reset
from dreamfleet.transport import Client, Disconnected, RemoteError, Timeout, TransportError
from dreamfleet.transport.address import Address, parse
from dreamfleet.trust import A_MACHINE, admit, code_in

log = logging.getLogger(__name__)

_PROBE_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_CALL_SECONDS = 10.0
_BEAT_SECONDS = 3.0
_TRY_SECONDS = 0.5
_SAY_SECONDS = 60.0
_STILL_SECONDS = 10.0  # without a step, after which this machine says why
_PORT_SECONDS = 1.0  # for a look at ports between two signs of life
_PORTS_AT_ONCE = 16
_REFUSED = "nothing listens there: the agent is starting, or a firewall refuses the connection"
_NO_ACTIONS = "the run sends no actions; 'dreamfleet status' says there what it waits for"
_PLACE_PREFIX = "dreamfleet-join-"
_LOCK = "lock"
_KEY = "join.key"  # not the name under which a run keeps its own
_LOOKED_UP = "tcp://127.0.0.1:{auto}"
_ROLE = re.compile(r"(actor|evaluator)(-[0-9]{1,4})?")
_REFUSED_KEY = "refused the key"
_OTHER_KEY = "handshake failed"
_LEAVING = "Leaving the run; once more ends at once."


class JoinError(DreamfleetError):
    """This machine cannot join, or cannot stay; the message says why and what to do."""


class _PortsClosed(JoinError):
    """The coordinator answers, and another server of the run cannot be reached."""


@dataclass(frozen=True)
class Offer:
    """What this machine offers."""

    envs: int = 1
    eval_envs: int = 0
    envs_per_process: int | None = None
    """None for the run's."""
    task: str | None = None
    """Code of the person's own that the run names, named again."""
    trust: bool = False
    """Import whatever code the run names."""


class _Answer(msgspec.Struct, frozen=True):
    """What the coordinator says each time."""

    addresses: dict[str, str]
    over: str
    digest: str
    known: bool = True


class _Described(_Answer, frozen=True, kw_only=True):
    version: str
    config: str
    spaces: str


class _Lease(_Answer, frozen=True, kw_only=True):
    token: str
    name: str
    envs: list[int]
    eval_envs: list[int]
    generation: int


def join(url: str, offer: Offer, *, logdir: Path | None, patience: float, say: Say) -> None:
    """Serve a run with environments of this machine until it is over, or until Ctrl-C.

    Raises:
        ConfigError: What was typed cannot work.
        JoinError: The run cannot be reached, or does not want this machine.
        FleetError: The environments fail here.
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
        self._book = DirectoryBook()
        self._looked = ""  # the description whose environment was made here once

    def serve(self, client: Client) -> None:
        """Join, run the environments, and do so again if the ids were lost."""
        first = True
        while True:
            described, lease = self._enter(client, wait=not first)
            if described.over or lease is None:
                self._say(f"{described.over} This machine's part is done.")
                return
            first = False
            if self._run(client, described, lease):
                return

    # --- joining ---------------------------------------------------------------------------------

    def _enter(self, client: Client, *, wait: bool) -> tuple[_Described, _Lease | None]:
        """Ask what the run is, make sure that it works here, and take ids."""
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
                return described, self._ask(client, _Lease, "join", asked)
            except _PortsClosed:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_TRY_SECONDS)
            except (Disconnected, Timeout) as error:
                if _REFUSED_KEY in str(error) or time.monotonic() >= deadline:
                    raise JoinError(_unreachable(self._address, error)) from None

    def _try_ports(self, told: Mapping[str, str]) -> None:
        """Refuse to join a run whose servers cannot be reached from here. One at whose port nobody
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

    def _run(self, client: Client, described: _Described, lease: _Lease) -> bool:
        """Run the environments; returns whether this machine's part is done."""
        config = self._config(described)
        # Ids are used again, by other machines too: their environments play other episodes.
        config = replace(config, seed=env_seed(config.seed, JOINED + lease.generation))
        make = environments(config, None)
        workers = joined_workers(make, make, lease.envs, lease.eval_envs, config)
        publish_addresses(self._book, self._place, self._address, lease.addresses)
        self._say(
            f"Joined {config.task} as {lease.name} with {_counted(lease)}; logs are in "
            f"{self._place / 'logs'}. Ctrl-C leaves."
        )
        error, nan, done = "", False, False
        with LocalLauncher(self._place) as launcher:
            supervisor = Supervisor(
                workers,
                launcher,
                say=self._say,
                on_signal=_LEAVING,
            )
            notes = [worker.notes for worker in workers if worker.notes]
            link = _Link(self, client, lease, notes, config.env_timeout, supervisor.stop)
            try:
                with link:
                    supervisor.run()
            except FleetError as failure:
                # The log that it names next is on this machine.
                sentence = str(failure).splitlines()[0].partition(". The end of ")[0]
                error = " ".join(sentence.split())[:1000]
                nan = any(read_notes(path).not_finite for path in notes)
                raise
            except KeyboardInterrupt:
                done = True
                raise
            finally:
                if error or done or not link.lost:
                    with suppress(TransportError):  # its lease ends by itself
                        client.call("leave", lease.token, error, nan).result(_CALL_SECONDS)
        if link.over:
            self._say(f"{link.over} This machine's part is done.")
            return True
        if link.refused:
            raise JoinError(link.refused)
        self._say(f"{link.lost} The environments have ended, and join again.")
        return False


class _Link:
    """Tells the coordinator every second that this machine is there, on a thread of its own."""

    def __init__(
        self,
        machine: _Machine,
        client: Client,
        lease: _Lease,
        notes: Sequence[Path],
        env_timeout: float,
        stop: Callable[[str], None],
    ) -> None:
        self._machine, self._client, self._lease = machine, client, lease
        self._notes, self._stop, self._say = notes, stop, machine._say
        self._env_timeout = env_timeout
        self._before = _report(notes)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beat", daemon=True)
        self.over = ""
        """Why the run is over; empty if it is not."""
        self.lost = ""
        """Why the ids are lost; empty if they are not."""
        self.refused = ""
        """Why the run does not let this machine in any more."""

    def __enter__(self) -> _Link:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        heard = shown = looked = time.monotonic()
        steps, silent, made, why, told = 0, False, 0, "", False
        while not self._ended.wait(BEAT_SECONDS):
            report, sent = self._report(), time.monotonic()
            if report["steps"] != made:
                made, looked, why, told = report["steps"], sent, "", False
            report["error"] = why or report["error"]
            call = ("beat", self._lease.token, report)
            try:
                answer = self._machine._ask(self._client, _Answer, *call, timeout=_BEAT_SECONDS)
            except (TransportError, JoinError) as error:
                if self._is_over_after(error, time.monotonic() - heard):
                    self._stop("lost")
                    return
                if not silent:
                    self._say(
                        "The run does not answer; the environments wait for it "
                        f"({str(error).rstrip('.')})."
                    )
                silent = True
                continue
            if silent:
                self._say("The run answers again.")
            heard, silent = sent, False
            if self._is_over_with(answer):
                self._stop("lost")
                return
            self._publish(answer.addresses)
            if sent - shown > _SAY_SECONDS:
                rate = (report["steps"] - steps) / (sent - shown)
                shown, steps = sent, report["steps"]
                self._say(f"{readable(steps)} steps, {readable(round(rate, 1))} steps/s")
                told = False
            if sent - looked > _STILL_SECONDS:
                looked, why = sent, self._why_still(answer.addresses)
                # Between two rounds of evaluation there is nothing to do.
                if not told and (why or self._lease.envs):
                    self._say(f"This machine makes no steps: {why or _NO_ACTIONS}.")
                    told = True

    def _why_still(self, told: Mapping[str, str]) -> str:
        """What keeps the environments here from making steps; empty if nothing does."""
        if problems := closed_ports(self._machine.servers(told), _PORT_SECONDS):
            return self._machine.ports_text(told, problems)[:1000]
        return hanging(map(read_notes, self._notes), self._env_timeout, time.time())

    def _is_over_after(self, error: DreamfleetError, seconds: float) -> bool:
        """Whether the ids are lost without an answer for so many seconds."""
        if isinstance(error, JoinError) or _REFUSED_KEY in str(error):
            self.refused = self.lost = _turned_away(error)
        elif seconds > HOLD_SECONDS:
            self.lost = f"The run did not answer for {HOLD_SECONDS:g} s."
        return bool(self.lost)

    def _is_over_with(self, answer: _Answer) -> bool:
        """Whether an answer says that the run is over, or that the ids are lost."""
        self.over = answer.over
        if not answer.known:
            self.lost = "The run has given this machine's environment numbers away."
        elif answer.digest != self._lease.digest:
            self.lost = "The run was resumed with other settings."
        return bool(self.over or self.lost)

    def _publish(self, addresses: Mapping[str, str]) -> None:
        machine = self._machine
        try:
            publish_addresses(machine._book, machine._place, machine._address, addresses)
        except OSError as error:
            log.warning("The addresses of the run cannot be kept: %s", error)

    def _report(self) -> dict[str, Any]:
        now = _report(self._notes)
        return {
            "steps": now["steps"] - self._before["steps"],
            "failures": now["failures"] - self._before["failures"],
            "error": now["error"] if now["failures"] > self._before["failures"] else "",
        }


def _report(notes: Sequence[Path]) -> dict[str, Any]:
    """What the environment workers have noted, together."""
    noted = [read_notes(path) for path in notes]
    failed = max(noted, key=lambda each: each.failures, default=None)
    return {
        "steps": sum(each.steps for each in noted),
        "failures": sum(each.failures for each in noted),
        "error": failed.error[:1000] if failed else "",
    }


def _counted(lease: _Lease) -> str:
    words = []
    for ids, kind in ((lease.envs, "training"), (lease.eval_envs, "evaluation")):
        if ids:
            words.append(f"{len(ids)} {kind} environment{'s' if len(ids) > 1 else ''}")
    return " and ".join(words)


def publish_addresses(
    book: DirectoryBook, place: Path, coordinator: Address, addresses: Mapping[str, str]
) -> None:
    """Keep where the servers of the run listen that a machine may call."""
    for name, address in called_servers(coordinator, addresses).items():
        if book.find(place, name) != address.text:
            book.publish(place, name, address.text)


def called_servers(coordinator: Address, told: Mapping[str, str]) -> dict[str, Address]:
    """The servers that a machine may call, of those that the coordinator has told of, whose host
    stands in for the host `*`."""
    servers = {}
    for name, text in told.items():
        with suppress(TransportError):
            address = parse(text)
            if _ROLE.fullmatch(name) and address.kind == "tcp":
                host = coordinator.host if address.host == "*" else address.host
                servers[name] = replace(address, host=host)
    return servers


def closed_ports(servers: Mapping[str, Address], seconds: float) -> dict[str, str]:
    """The servers that cannot be reached from here, and why."""

    def problem(address: Address) -> str:
        try:
            socket.create_connection((address.host, address.port), timeout=seconds).close()
        except ConnectionRefusedError:
            return _REFUSED
        except TimeoutError:
            return f"there is no answer within {seconds:g} s, mostly because of a firewall"
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(_PORTS_AT_ONCE) as threads:
        found = dict(zip(servers, threads.map(problem, servers.values()), strict=True))
    return {name: text for name, text in found.items() if text}


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
    """Say why nothing is reached at an address, which the transport only knows as silence."""
    there = f"{address.host}:{address.port}"
    try:
        socket.create_connection((address.host, address.port), timeout=_PROBE_SECONDS).close()
    except socket.gaierror:
        raise JoinError(
            f"This machine does not know the name {address.host}: write the number of that machine "
            "in its place, or fix its entry in DNS or /etc/hosts."
        ) from None
    except TimeoutError:
        raise JoinError(
            f"No answer from {there} within {_PROBE_SECONDS:g} s: the packets get lost on the way, "
            "mostly in a firewall. Open TCP port "
            f"{address.port} and the others that stand below the run's line on {address.host} "
            "for this machine, and check that it is the right address."
        ) from None
    except ConnectionRefusedError:
        raise JoinError(
            f"{address.host} is there, but nobody listens at its port {address.port}: the run has "
            "ended or was started without --bind, or the port is another one. 'dreamfleet resume' "
            "starts it again."
        ) from None
    except OSError as error:
        raise JoinError(
            f"{there} cannot be reached: {error.strerror or error}. Check the address, and that "
            "both machines are in one network."
        ) from None


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
    """What the coordinator said, without where it stood in its program."""
    text = error.args[0]
    return str(text).partition(f"{error.kind}: ")[2] or str(text)


# --- this machine --------------------------------------------------------------------------------


@contextmanager
def _place(logdir: Path | None) -> Iterator[Path]:
    """A directory for what environments need, and for their logs.

    Raises:
        ConfigError: It is the directory of a run.
    """
    if logdir is not None:
        if (logdir / CONFIG_FILE).exists():
            raise ConfigError(
                f"{logdir} is the directory of a run: choose another --logdir for this machine."
            )
        with claim_directory(logdir):
            yield logdir.absolute()
        return
    _remove_stale()
    place = Path(tempfile.mkdtemp(prefix=f"{_PLACE_PREFIX}{os.getpid()}-"))
    with (place / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _remove_stale() -> None:
    """Remove what machines have left behind that were killed; it holds their keys. Whoever is alive
    holds a lock: a process id says nothing about another container, or about another machine with
    the same temporary directory."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PLACE_PREFIX}*"):
        with suppress(OSError), (path / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
