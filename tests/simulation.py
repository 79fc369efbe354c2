"""Histories of a run in one process, with a seed: storage and network fail where the seed says.

Agent, replay and logger are the real ones (`Actor`, `ReplayService` with its files, limiter and
positions, `Logger` with its `ScoreReader`). Their processes, the network and the environments are
simulated: a scheduler with a seed says who does what next, which requests and answers are lost,
and who is killed. Every write is an event with a number: each store to a mapped file, and each call
of the operating system that changes a file. At one of them the process that writes is killed (its
later writes have no effect, whatever its code does on the way out), or the call fails because the
disk is full.

After each history the checker (`Checker`) looks at the files alone: no step that was acknowledged
is lost, none is there twice, out of order or joined to one that it does not follow; messages are
stored as a whole or not at all; counts never go back and agree with what is stored; every episode
that is stored completely has its score once.

    python tests/simulation.py --minutes 5      random histories, one after the other
    python tests/simulation.py --seed 17 --every      with a fault at each write and message
    python tests/simulation.py --seed 17 --fault kill@230      history 17, with this fault
    python tests/simulation.py --seed 17 --truncate      its files, cut off at each byte
"""

from __future__ import annotations

import argparse
import errno
import gc
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest import mock

import numpy as np
from fleet_parts import small_run

import dreamfleet.replay.positions
import dreamfleet.replay.replay
import dreamfleet.replay.storage.journal
import dreamfleet.roles.logger
from dreamfleet.agents.api import AgentBase
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.factories import replay as make_replay
from dreamfleet.fleet.factories import stream as make_stream
from dreamfleet.metrics import JsonlOutput, Outputs, read_jsonl
from dreamfleet.replay import BatchOrderError, Replay, ReplayConfig, SamplesPerInsert, SchemaError
from dreamfleet.replay.positions import Positions
from dreamfleet.replay.storage.journal import Journal
from dreamfleet.replay.storage.memory import Arena
from dreamfleet.roles.actor import Actor, Transitions
from dreamfleet.roles.logger import Logger, ScoreReader
from dreamfleet.roles.progress import Progress, limiter_for
from dreamfleet.roles.replay import ReplayService
from dreamfleet.transport import RemoteError, Unanswered

ENVS, EPISODE = 3, 7
CAPACITY = 2000  # steps; more than any history makes
_MESSAGE = 24  # steps, at most
ROLES = ("agent", "replay", "logger")
FILES = {
    "agent": (),
    "replay": ("replay", "ckpt/replay"),
    "logger": ("scores", "eval_scores", "metrics", "ckpt/l"),
}
MAPPED = ("journal", "positions", "step")
_ANSWERED = (SchemaError, BatchOrderError, ConfigError)


# --- faults --------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process that runs is killed here."""


class Broken(BaseException):
    """A process has failed, and no fault of storage was the reason."""


@dataclass
class Faults:
    """Counts writes and messages, and lets some of them fail."""

    at: set[str] = field(default_factory=set)
    """What happens at which write or message: kill@N, full@N (at a call of the operating system),
    drop@N."""
    count: int = 0
    messages: int = 0
    armed: bool = False
    dead: bool = False
    done: list[str] = field(default_factory=list)

    def write(self, call: str = "") -> None:
        """A process is about to write."""
        if not self.armed:
            return
        if self.dead:
            raise Killed
        number, self.count = self.count, self.count + 1
        if (fault := f"kill@{number}") in self.at:
            self.dead = True
            self.done.append(f"{fault} {call}")
            raise Killed
        if call and (fault := f"full@{number}") in self.at:
            self.done.append(f"{fault} {call}")
            raise OSError(errno.ENOSPC, "No space left on device")

    def message(self) -> bool:
        """Whether a request or an answer is lost, and the connection with it."""
        number, self.messages = self.messages, self.messages + 1
        if (fault := f"drop@{number}") in self.at:
            self.done.append(fault)
            return True
        return False


faults = Faults()
_names = random.Random()
"""What is drawn for the names of files and senders, so that a history is the same each time."""


def _name() -> uuid.UUID:
    return uuid.UUID(int=_names.getrandbits(128))


class Watched(np.ndarray):
    """An array of a mapped file: every store is a write."""

    def __setitem__(self, key: Any, value: Any) -> None:
        faults.write()
        super().__setitem__(key, value)


class _Numpy:
    """Numpy, whose views of buffers are watched."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def frombuffer(*args: Any, **options: Any) -> Any:
        return np.frombuffer(*args, **options).view(Watched)


def _counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def wrapper(*args: Any, **options: Any) -> Any:
        faults.write(name)
        return function(*args, **options)

    return wrapper


class _AtOnce(SamplesPerInsert):
    """A limiter that never waits: a caller that would have to wait is told so, and asks again."""

    def insert(self, count: int = 1, timeout: float | None = None, who: str = "writer") -> None:
        super().insert(count, None if timeout is None else 0.0, who)

    def sample(self, count: int = 1, timeout: float | None = None, who: str = "sampler") -> None:
        super().sample(count, None if timeout is None else 0.0, who)


class _Direct(Outputs):
    """The logger's output, written by the thread that calls."""

    def __init__(self, output: Any) -> None:
        super().__init__([output])


@contextmanager
def watched() -> Iterator[None]:
    """While this is open, faults are injected into writes."""
    calls = (
        "pwrite",
        "write",
        "posix_fallocate",
        "ftruncate",
        "fsync",
        "rename",
        "replace",
        "unlink",
    )
    column = Arena.column
    with (
        mock.patch.multiple(os, **{name: _counted(getattr(os, name), name) for name in calls}),
        mock.patch.object(Arena, "column", lambda *args: column(*args).view(Watched)),
        mock.patch.object(os, "urandom", _names.randbytes),
        mock.patch.object(uuid, "uuid4", _name),
        mock.patch.object(Arena, "sync", _counted(Arena.sync, "msync")),
        mock.patch.object(Journal, "flush", _counted(Journal.flush, "msync")),
        mock.patch.object(Positions, "flush", _counted(Positions.flush, "msync")),
        mock.patch.object(dreamfleet.replay.storage.journal, "np", _Numpy()),
        mock.patch.object(dreamfleet.replay.positions, "np", _Numpy()),
        mock.patch.object(dreamfleet.roles.logger, "np", _Numpy()),
        mock.patch.object(dreamfleet.roles.logger, "BackgroundOutput", _Direct),
        # No thread: a history is the same each time.
        mock.patch.object(dreamfleet.replay.replay, "SYNC_SECONDS", threading.TIMEOUT_MAX),
    ):
        gc.collect()
        gc.freeze()  # after each kill only what it left behind is looked through
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            gc.unfreeze()


# --- the network ---------------------------------------------------------------------------------


class Future:
    """The answer to a call."""

    def __init__(self) -> None:
        self.answer: tuple[Any, BaseException | None] | None = None

    def done(self) -> bool:
        return self.answer is not None

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        return self.done()

    def result(self, timeout: float | None = None) -> Any:
        del timeout
        assert self.answer is not None, "nothing waits in a simulation"
        value, error = self.answer
        if error is not None:
            raise error
        return value


class Call(NamedTuple):
    future: Future
    method: str
    args: tuple[Any, ...]
    note: Any


class Link:
    """A client and its connection: calls are processed in order, answers come in order, and all
    that have no answer are sent again when the connection or the server is lost."""

    def __init__(self, caller: str, server: str, world: World) -> None:
        self.caller, self.server, self._world = caller, server, world
        self.calls: deque[Call] = deque()
        self.answers: deque[tuple[Any, BaseException | None]] = deque()
        self.note: Any = None
        self._source, self._numbers = str(uuid.uuid4()), itertools.count(1)

    def memory(self, size: int) -> None:
        """There is none to share."""

    def call(self, method: str, *args: Any) -> Future:
        future = Future()
        if method in ("tran", "add"):  # as `LoggerClient` does
            args = (*args, self._source, next(self._numbers))
        self.calls.append(Call(future, method, _copied(args), self.note))
        return future

    def __getattr__(self, method: str) -> Callable[..., Future]:
        return partial(self.call, method)

    def stats(self) -> dict[str, float]:
        return {"connected": 1.0, "inflight": float(len(self.calls))}

    def cut(self) -> None:
        """The connection is lost, with the answers that are under way."""
        self.answers.clear()

    def process(self) -> bool:
        """Let the server answer the next call; False if it has to wait, or there is none."""
        if len(self.answers) >= len(self.calls):
            return False
        call = self.calls[len(self.answers)]
        server = self._world.parts[self.server]
        if server is None:
            return False
        if faults.message():
            self.cut()
            return True
        try:
            value = self._world.as_process(
                self.server, lambda: _method(server, call.method)(*_copied(call.args))
            )
        except Unanswered:
            return False  # the limiter makes it wait: it is processed again
        except _ANSWERED as error:
            raise AssertionError(f"{call.method} was refused: {error}") from error
        except Exception as error:
            if self.server == "replay":  # which ends, and leaves the call to its successor
                self._world.end("replay")
                return True
            self.answers.append((None, RemoteError(str(error))))
            return True
        except Killed:
            return True
        self.answers.append((value, None))
        return True

    def deliver(self) -> bool:
        """Bring the oldest answer to the caller."""
        if not self.answers:
            return False
        if faults.message():
            self.cut()
            return True
        call, answer = self.calls.popleft(), self.answers.popleft()
        call.future.answer = answer
        self._world.answered(self, call, answer)
        return True


def _method(server: Any, name: str) -> Callable[..., Any]:
    """What a server offers under this name, as `bind` has it of a replay."""
    found: Callable[..., Any] = (
        partial(server.sample, "train")
        if name == "sample_train"
        else getattr(server.lead if name == "permit" else server, name)
    )
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(each) for each in value)
    return value


# --- the run -------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What an observation tells: which environment, its episode and its step."""

    env: int
    episode: int
    step: int

    @property
    def tag(self) -> int:
        return (self.env * 1000 + self.episode) * 100 + self.step

    @classmethod
    def of(cls, tag: int) -> Self:
        return cls(tag // 100_000, tag // 100 % 1000, tag % 100)

    @property
    def reward(self) -> float:
        return float(self.tag % 13) if self.step else 0.0


class _Player(AgentBase):
    """Acts without thinking."""

    def __init__(self) -> None:
        super().__init__({}, {})

    def init_policy(self, n: int) -> Any:
        return {"count": np.zeros(n, np.int32)}

    def policy(self, carry: Any, obs: Mapping[str, Any], mode: str = "train") -> Any:
        del mode
        rows = len(obs["tag"])
        outs = {"state": np.zeros((rows, 2), np.float32)}
        return carry, {"action": np.zeros(rows, np.int32)}, outs


class World:
    """The processes of a run, and who does what next."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        at: Collection[str] | None = None,
        before: World | None = None,
    ) -> None:
        """With `at` these faults happen and no others. `before` is resumed."""
        self.rng = random.Random(seed)
        self.folder, self.seed = folder, seed
        chunk, ratio = self.rng.choice([3, 4, 8, 16]), self.rng.choice([0.5, 2.0, 8.0])
        self.fault_rate = self.rng.choice([0.0, 0.01, 0.05])
        self.config = small_run(
            folder,
            envs=ENVS,
            envs_per_process=ENVS,
            batch_size=2,
            train_ratio=ratio,
            replay=ReplayConfig(chunk=chunk, capacity=CAPACITY),
            report_every=0.0,
        )
        faults.__init__(set(at or ()))  # type: ignore[misc]
        _names.seed(f"{seed} {before is None}")
        if at is None:
            for _ in range(self.rng.randrange(6)):
                kind = self.rng.choice(["kill", "kill", "full"])
                faults.at.add(f"{kind}@{self.rng.randrange(600)}")
        else:
            self.fault_rate = 0.0
        self.steps = [Step(env, -1, EPISODE) for env in range(ENVS)]  # over: the next one is reset
        self.reset = [True] * ENVS
        self.made: list[list[Transitions]] = []
        self.parts: dict[str, Any] = dict.fromkeys(ROLES)
        self._ended: set[str] = set()
        self.checker = Checker(self.config)
        if before is not None:
            self.steps, self.fault_rate = before.steps, 0.0
            self.checker.resume(before.checker)
        self.links: dict[str, Link] = {}
        self.reader: ScoreReader | None = None
        self.permit: Future | None = None
        self.sample: Future | None = None
        self.known: int | None = None
        self.metrics = before.metrics if before else 0
        self.now = ""
        for role in ("logger", "replay", "agent"):
            self.start(role)

    # --- processes -------------------------------------------------------------------------------

    def as_process(self, role: str, action: Callable[[], Any]) -> Any:
        """Run an action of a process, in which its writes may fail."""
        faults.armed, faults.dead = True, False
        before = len(faults.done)
        try:
            return action()
        except Killed:
            faults.armed = False
            self.end(role)
            raise
        except (Unanswered, *_ANSWERED):
            raise
        except Exception as error:
            if len(faults.done) == before:
                raise Broken(f"the {role} failed without a fault: {error!r}") from error
            raise
        finally:
            faults.armed = False

    def end(self, role: str) -> None:
        """A process is killed: nothing of it is left but its files."""
        faults.armed = False
        self.parts[role] = None
        self._ended.add(role)
        self.checker.killed[role] += 1
        for name, link in list(self.links.items()):
            if link.server == role:
                link.cut()
            if link.caller == role:
                del self.links[name]
        if role == "agent":
            self.made.clear()
            self.permit = self.sample = self.known = None
        if role == "logger":
            self.reader = None

    def start(self, role: str) -> None:
        """Start a process, which may be killed, and started again, while it starts."""
        makers = {"agent": self._agent, "replay": self._replay, "logger": self._logger}
        for attempt in itertools.count():
            assert attempt < 20, f"the {role} cannot be started"
            if role in self._ended:
                self._let_go()
            try:
                self.parts[role] = self.as_process(role, makers[role])
            except (Killed, OSError):
                self.end(role)
            except Exception as error:  # a full disk, in the words of the part
                if "full" not in "".join(faults.done):
                    raise
                self.end(role)
                del error
            else:
                return

    def _let_go(self) -> None:
        """Close what the kernel would have closed."""
        gc.collect()
        files = tuple(f"{self.folder}/{name}" for role in self._ended for name in FILES[role])
        for entry in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):
                if (name := str(entry.readlink())).startswith(files):
                    # A map closes its file when it is collected, by then perhaps another's file.
                    assert not name.endswith(MAPPED), f"a killed process still holds {name}"
                    os.close(int(entry.name))
        self._ended.clear()

    def _link(self, caller: str, server: str) -> Link:
        name = f"{caller}-{server}-{len(self.links)}"
        self.links[name] = Link(caller, server, self)
        return self.links[name]

    def _agent(self) -> Actor:
        progress = Progress()
        service = self.parts["replay"]
        progress.restore(service.lead.position()["steps"] if service else 0)
        links = self._link("agent", "replay"), self._link("agent", "logger")
        self.storing, _ = links
        self.learning = self._link("agent", "replay")
        return Actor(_Player(), self.config, progress, *links)  # type: ignore[arg-type]

    def _replay(self) -> ReplayService:
        limits = limiter_for(self.config)
        limiter = _AtOnce(limits.ratio, limits.tolerance, limits.minsize, limits.debt)
        service = ReplayService(
            make_replay(self.config, "replay"),
            Replay(self.config.window, 10),
            partial(make_stream, self.config),
            limiter,
            self.config,
            _STOP,
        )
        service.attach({})
        return service

    def _logger(self) -> Logger:
        logger = Logger(JsonlOutput(self.folder / "metrics.jsonl"), self.config)
        replays: Any = {0: self._link("logger", "replay")}
        self.reader = ScoreReader(logger, replays)
        return logger

    # --- what happens ----------------------------------------------------------------------------

    def run(self, events: int) -> None:
        """Let things happen."""
        actions = [self._act, self._act, self._send, self._send, self._process, self._process]
        actions += [self._process, self._deliver, self._deliver, self._deliver, self._learn]
        actions += [self._metrics, self._metrics, self._read, self._read]
        for _ in range(events):
            for role in ROLES:
                if self.parts[role] is None:
                    self.start(role)
            if self.rng.random() < self.fault_rate:
                self.rng.choice([self._cut, self._kill, self._save])()
            else:
                self.rng.choice(actions)()
            self.checker.counts(self.parts["replay"])

    def finish(self) -> None:
        """Send and answer everything, as a run does at its end; then look at the files."""
        faults.at.clear()
        self._drain()
        # A logger that is started again finds nothing that it has not written.
        self.end("logger")
        self.checker.killed["logger"] -= 1
        self._drain()
        service = self.parts["replay"]
        self.checker.counts(service)
        position = service.lead.position()
        service.close()
        del service
        self.parts["logger"].close()
        self.kill_all()
        self.checker.files(position["steps"])

    def _drain(self) -> None:
        """Let everything that was sent arrive and be answered."""
        for role in ROLES:
            if self.parts[role] is None:
                self.start(role)
        for _ in range(1000):
            self._read()
            self._send()
            moved = [link.process() or link.deliver() for link in list(self.links.values())]
            self._learn()
            service = self.parts["replay"]
            unread = any(each.has_unread_episodes for each in service._buffers.values())
            del service
            if not any(moved) and not self.storing.calls and not unread:
                break
        else:
            raise AssertionError("the run does not come to its end")

    def kill_all(self) -> None:
        for role in ROLES:
            self.end(role)
        self._let_go()

    def _act(self) -> None:
        actor = self.parts["agent"]
        if sum(len(part) for batch in self.made for part in batch) > 12:
            return  # no more may wait to be passed on
        envs = self.rng.sample(range(ENVS), self.rng.randint(1, ENVS))
        for env in envs:
            before = self.steps[env]
            again = self.reset[env] or before.step >= EPISODE
            self.steps[env] = (
                Step(env, before.episode + 1, 0) if again else before._replace(step=before.step + 1)
            )
        now = [self.steps[env] for env in envs]
        if self.rng.random() < 0.02:  # an environment fails, and is built again
            self.steps[envs[0]] = now[0] = Step(envs[0], now[0].episode + 1, 0)
        obs = {
            "envid": np.array(envs),
            "is_eval": np.zeros(len(envs), bool),
            "tag": np.array([each.tag for each in now], np.int64),
            "reward": np.array([each.reward for each in now], np.float32),
            "is_first": np.array([each.step == 0 for each in now]),
            "is_last": np.array([each.step == EPISODE for each in now]),
            "is_terminal": np.zeros(len(envs), bool),
        }
        actions, transitions = actor.act(obs)
        for env, reset in zip(envs, actions["reset"].tolist(), strict=True):
            self.reset[env] = reset
        self.made.append(transitions)

    def _send(self) -> None:
        """Batches that follow each other share a message."""
        if self.made and len(self.storing.calls) < 2:
            count = self.rng.randint(1, len(self.made))
            self.storing.note = [
                tag
                for batch in self.made[:count]
                for each in batch
                for tag in each.steps["tag"].tolist()
            ]
            self.parts["agent"].send(self.made[:count])
            self.checker.sent(self.storing.note)
            del self.made[:count]

    def _process(self) -> None:
        waiting = [link for link in self.links.values() if len(link.calls) > len(link.answers)]
        if waiting:
            self.rng.choice(waiting).process()

    def _deliver(self) -> None:
        answered = [link for link in self.links.values() if link.answers]
        if answered:
            self.rng.choice(answered).deliver()

    def _learn(self) -> None:
        """As `ReplayClient.sample`: a batch is permitted, then drawn."""
        service = self.parts["replay"]
        if self.permit is not None and self.permit.done():
            known, self.known = self.known, int(self.permit.result())
            self.permit = None
            if self.known == (known or 0) + self.config.batch_size:
                self.sample = self.learning.call("sample_train")
        elif self.sample is not None and self.sample.done():
            batch, self.sample = self.sample.result(), None
            self.checker.sampled(batch)
            states = {"stepid": batch["stepid"], "state": batch["state"] + 1}
            self.learning.call("update", states)
        elif self.known is None and service is not None:
            self.known = service.lead.position()["samples"]
        elif self.known is not None and not len(self.learning.calls):
            self.permit = self.learning.call("permit", self.known)

    def _metrics(self) -> None:
        actor = self.parts["agent"]
        self.metrics += 1
        actor._logger.call("add", actor._progress.step, {"loss": float(self.metrics)})

    def _read(self) -> None:
        reader = self.reader
        if reader is not None:
            with suppress(Killed):
                self.as_process("logger", reader.poll)

    def _cut(self) -> None:
        self.rng.choice(list(self.links.values())).cut()

    def _kill(self) -> None:
        self.end(self.rng.choice(ROLES))

    def _save(self) -> None:
        service = self.parts["replay"]
        try:
            self.as_process("replay", service.save)
        except (Killed, Exception):  # a full disk ends the process
            self.end("replay")

    def answered(self, link: Link, call: Call, answer: tuple[Any, BaseException | None]) -> None:
        """The caller knows the answer."""
        if link.server == "replay":
            assert answer[1] is None, f"{call.method}: {answer[1]}"
        if call.method == "add_batch":
            self.checker.acknowledged(call.note)


_STOP = threading.Event()  # who would have to wait is told so at once
_STOP.set()


# --- what has to be true -------------------------------------------------------------------------


class Checker:
    """Knows what was sent, acknowledged and sampled, and compares it with what the files hold."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._sent: list[list[int]] = []
        self._acknowledged: set[int] = set()
        self._counts = (0, 0)
        self.samples = 0
        self.killed: Counter[str] = Counter()
        self.cut = ""
        """A file that has lost its end, with what only it knew."""

    def resume(self, before: Checker) -> None:
        self._sent, self._acknowledged = before._sent.copy(), before._acknowledged.copy()

    @property
    def steps(self) -> int:
        """That were acknowledged."""
        return len(self._acknowledged)

    @property
    def _doubt(self) -> int:
        """Steps that may not be counted: a count that is cut off is the one before."""
        return _MESSAGE if "positions" in self.cut else 0

    def sent(self, tags: list[int]) -> None:
        self._sent.append(tags)

    def acknowledged(self, tags: list[int]) -> None:
        self._acknowledged |= set(tags)

    def counts(self, service: ReplayService | None) -> None:
        """Counts never go back, and no step that was acknowledged is not counted."""
        if service is None or service.lead is None:
            return
        position = service.lead.position()
        counts = position["steps"], position["samples"]
        assert counts[0] >= self._counts[0], f"steps went back: {self._counts} to {counts}"
        assert counts[1] >= self._counts[1], f"samples went back: {self._counts} to {counts}"
        uncounted = self.steps - counts[0]
        assert uncounted <= self._doubt, f"{uncounted} steps were acknowledged and not counted"
        limiter = service.lead._limiter
        least = -max(limiter.debt, limiter.tolerance) - self._config.batch_size
        most = (limiter.tolerance + _MESSAGE) * limiter.ratio
        assert least <= limiter.avail <= most, f"the limiter owes {limiter.avail}"
        batch = self._config.batch_size
        twice = counts[1] - self.samples - batch * (1 + self.killed["agent"])
        assert self.cut or twice <= 0, f"{twice} samples were counted twice"
        self._counts = counts

    def sampled(self, batch: Mapping[str, Any]) -> None:
        """Sequences are steps that follow each other."""
        self.samples += len(batch["tag"])
        for tags, first in zip(batch["tag"].tolist(), batch["is_first"].tolist(), strict=True):
            self._follow(tags, first)

    @staticmethod
    def _follow(tags: list[int], first: list[bool]) -> None:
        steps = [Step.of(tag) for tag in tags]
        for before, after, begins in zip(steps, steps[1:], first[1:], strict=False):
            goes_on = after == before._replace(step=before.step + 1) and not begins
            begun = after.env == before.env and after.step == 0 and begins
            later = after.episode > before.episode
            assert goes_on or (begun and later), f"{after} is spliced to {before}"

    def files(self, steps: int) -> None:
        """Look at what the run has left behind."""
        directory = self._config.logdir / "replay"
        assert self.cut or not (directory / "damaged").exists(), "no disk has damaged it"
        chains = read_chains(directory)
        stored = [tag for chain in chains for tag in chain["tag"].tolist()]
        for chain in chains:
            self._follow(chain["tag"].tolist(), chain["is_first"].tolist())
        twice = [tag for tag, count in Counter(stored).items() if count > 1]
        assert not twice, f"stored twice: {[Step.of(tag) for tag in twice]}"
        there = set(stored)
        lost = self._acknowledged - there
        assert not lost, f"acknowledged and lost: {sorted(Step.of(tag) for tag in lost)}"
        known = {tag for tags in self._sent for tag in tags}
        assert there <= known, f"never sent: {there - known}"
        for tags in self._sent:
            assert set(tags) <= there or not set(tags) & there, f"a part of a message: {tags}"
        assert len(stored) - self._doubt <= steps <= len(stored), (len(stored), steps)
        order: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for chain in chains:
            for tick, tag in zip(chain["tick"].tolist(), chain["tag"].tolist(), strict=True):
                order[Step.of(tag).env].append((tick, tag))
        for rows in order.values():
            assert [tag for _, tag in sorted(rows)] == sorted(tag for _, tag in rows), "reordered"
        self._scores(there)
        losses = [row.get("loss") for row in read_jsonl(self._config.logdir / "metrics.jsonl")]
        numbers = [loss for loss in losses if loss is not None]
        # What a logger that was killed had written is not known to its successor.
        again = len(numbers) - len(set(numbers))
        assert not again or self.killed["logger"] > 1, f"{again} metrics were written twice"
        at = [row["step"] for row in read_jsonl(self._config.logdir / "metrics.jsonl")]
        back = "logger" in self.cut  # only the file knew of steps that were not stored
        assert back or at == sorted(at), f"steps of the metrics go back: {at}"

    def _scores(self, there: set[int]) -> None:
        """Each episode that is stored from its first to its last step has its score once."""
        ended = Counter()
        for tag in there:
            env, episode, step = Step.of(tag)
            if step == EPISODE and all(Step(env, episode, n).tag in there for n in range(EPISODE)):
                ended[sum(Step(env, episode, n).reward for n in range(EPISODE + 1))] += 1
        rows = list(read_jsonl(self._config.logdir / "scores.jsonl"))
        assert len({row["id"] for row in rows}) == len(rows), "a score is there twice"
        found = Counter(row["episode/score"] for row in rows)
        lost = self.cut == "replay/episodes.json"
        assert found <= ended, f"scores of no episodes: {found - ended}"
        assert lost or found == ended, f"scores are missing: {ended - found}"


def read_chains(directory: Path) -> list[dict[str, Any]]:
    """The stored rows of each chain, in order."""
    with Replay(1, CAPACITY, directory) as replay:
        table = replay._table
        if table is None:
            return []
        store, found = table.store, []
        for head in table.head_slot[table.head_slot >= 0].tolist():
            slots = list(store.preceding(head))[::-1]
            parts = {
                key: np.concatenate([np.array(column[s, : store.lengths[s]]) for s in slots])
                for key, column in {**store.columns, "tick": store.ticks}.items()
            }
            found.append(parts)
        return found


# --- histories -----------------------------------------------------------------------------------

EVENTS = 150


class Failed(AssertionError):
    """A history after which something is not true; says how to see it again."""


def history(seed: int, at: Collection[str] | None = None) -> World:
    """One history; raises `Failed`. With `at` these faults happen and no others."""
    with _folder() as folder:
        try:
            world = World(folder / "run", seed, at)
            world.run(EVENTS)
            world.finish()
        except (Broken, Exception) as error:
            more = "".join(f" --fault {fault}" for fault in at or ())
            more = more or " --minutes 0 --processes 1"
            again = f"python tests/simulation.py --seed {seed}{more}"
            raise Failed(f"{error} Faults: {faults.done}. Again: {again}") from error
        return world


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory, where that can be: thousands of histories make many files."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="dreamfleet-simulation-", dir=memory) as folder:
        yield Path(folder)


Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""Calls a function with each of some values, as `map` does."""


def every_fault(seed: int, kind: str, stride: int = 1, each: Each = map) -> int:
    """A history with one fault, at each of its writes or messages; returns how many there were."""
    history(seed, ())
    numbers = range(0, faults.messages if kind == "drop" else faults.count, stride)
    made = each(partial(_steps, seed), [[f"{kind}@{number}"] for number in numbers])
    return sum(1 for _ in made)


def _steps(seed: int, at: Collection[str] | None = None) -> int:
    return history(seed, at).checker.steps


_SMALL = (
    *("ckpt/replay/positions", "replay/episodes.json", "ckpt/logger/step"),
    *("scores.jsonl", "metrics.jsonl", "replay/journal"),
)
_MOST_BYTES = 400  # of a longer file, those at its beginning


def every_truncation(seed: int, stride: int = 1, each: Each = map) -> int:
    """The small files that killed processes leave, each cut off at each byte: the run is resumed,
    and has every step. Returns how many runs were resumed."""
    with _killed(seed) as (folder, _):
        sizes = {name: min((folder / name).stat().st_size, _MOST_BYTES) for name in _SMALL}
    cuts = [(name, length) for name, size in sizes.items() for length in range(0, size, stride)]
    parts = [cuts[first : first + 50] for first in range(0, len(cuts), 50)]
    return sum(each(partial(_truncate, seed), parts))


@contextmanager
def _killed(seed: int) -> Iterator[tuple[Path, World]]:
    """A run whose processes were all killed, and its directory."""
    with _folder() as folder:
        world = World(folder / "run", seed, ())
        world.run(EVENTS)
        world.kill_all()
        yield folder / "run", world


def _truncate(seed: int, cuts: Sequence[tuple[str, int]]) -> int:
    with _killed(seed) as (run, world):
        cut = run.with_name("cut")
        for name, length in cuts:
            shutil.copytree(run, cut)
            os.truncate(cut / name, length)
            try:
                again = World(cut, seed, (), world)
                again.checker.cut = name
                again.run(EVENTS // 5)
                again.finish()
            except Exception as error:
                raise Failed(f"{name} of history {seed}, cut off at {length}: {error}") from error
            shutil.rmtree(cut)
    return len(cuts)


def _until(end: float, stride: int, seed: int) -> tuple[int, int, int]:
    """Histories until a time: how many, their steps, and the writes that failed."""
    made = steps = failed = 0
    while not made or time.monotonic() < end:
        steps += _steps(seed + made * stride)
        made, failed = made + 1, failed + len(faults.done)
    return made, steps, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first history")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many at once")
    parser.add_argument(
        "--every", action="store_true", help="it, with a fault at each write and message"
    )
    parser.add_argument("--fault", action="append", help="it, with kill@230, full@12 or drop@5")
    parser.add_argument("--truncate", action="store_true", help="its files, cut off at each byte")
    args = parser.parse_args()
    start, count = time.monotonic(), args.processes
    with watched(), multiprocessing.get_context("fork").Pool(count) as pool:
        if args.every:
            kinds = ("kill", "full", "drop")
            made = sum(every_fault(args.seed, kind, each=pool.imap_unordered) for kind in kinds)
        elif args.truncate:
            made = every_truncation(args.seed, each=pool.imap_unordered)
        elif args.fault:
            _steps(args.seed, args.fault)
            made = 1
        else:
            work = partial(_until, start + 60 * args.minutes, count)
            done = list(pool.imap_unordered(work, range(args.seed, args.seed + count)))
            made, steps, failed = map(sum, zip(*done, strict=True))
            sys.stdout.write(f"{steps:,} steps were acknowledged, {failed:,} writes failed.\n")
    rate = 60 * made / (time.monotonic() - start)
    sys.stdout.write(f"{made:,} histories, {rate:,.0f} a minute: all as they should be.\n")


if __name__ == "__main__":
    main()
