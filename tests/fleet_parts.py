"""Parts of small fleets for tests: agents whose actions can be predicted, faulty environments."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dreamfleet.agents.api import AgentBase
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.fleet.factories import factories
from dreamfleet.replay import Replay, ReplayConfig
from dreamfleet.roles.runtime import stop_event
from dreamfleet.spaces import Space

EVERY_STEP = {"length": 25, "size": (8, 8)}


def until_stopped() -> None:
    """A role that does nothing until it is asked to end."""
    stop_event().wait()


def note_start(role: Callable[..., Any], make: Callable[[], Any], path: Path) -> None:
    """What a process of this role does before it serves; notes the processor's seconds so far."""
    del role  # importing it was all that is wanted of it
    part = make()
    path.write_text(str(time.process_time()))
    if close := getattr(part, "close", None):
        close()


def left_behind() -> list[str]:
    """Commands of the processes that this one has started and that still run, but for the helper
    that Python's multiprocessing keeps."""
    children = psutil.Process().children(recursive=True)
    commands = [" ".join(child.cmdline()) for child in children if child.is_running()]
    return [text for text in commands if text and "resource_tracker" not in text]


def small_run(logdir: Path, **changes: Any) -> RunConfig:
    """A run of the dummy environment that is over in seconds."""
    settings: dict[str, Any] = {
        "task": "bundled:dummy",
        "env_options": EVERY_STEP,
        "logdir": logdir,
        "agent": "random",
        "envs": 4,
        "envs_per_process": 2,
        "actor_batch": 0,
        "steps": 600,
        "batch_size": 2,
        "batch_length": 4,
        "report_length": 4,
        "train_ratio": 1.0,
        "replay": ReplayConfig(chunk=64),
        "log_every": 0.1,
        "on_failure": "stop",
    }
    return RunConfig(**{**settings, **changes})


def parts(config: RunConfig, **changes: Any) -> dict[str, Any]:
    return {**vars(factories(config)), **changes}


def dummy_with_its_id(envid: int) -> Any:
    """A dummy whose observations begin with its id, so that every step can be told apart."""
    return make_env("bundled:dummy", seed=envid, **EVERY_STEP)


def run_until(config: RunConfig, fleet: Mapping[str, Any], enough: Callable[[], bool]) -> None:
    """Run a fleet until there is enough to look at, however long that takes, and end it as Ctrl-C
    does. The question is asked with each line that the run says."""
    from dreamfleet.parallel import combined  # environments import this file, and stay small

    asked_to_end = False

    def look(line: str) -> None:
        nonlocal asked_to_end
        if not asked_to_end and enough():
            asked_to_end = True
            os.kill(os.getpid(), signal.SIGINT)

    with suppress(KeyboardInterrupt):
        combined(**fleet, args=config, say=look)
    assert asked_to_end, "the run was over before there was enough to look at"


def logged(logdir: Path) -> set[str]:
    """The metrics that a run has logged so far."""
    return {key for row in rows(logdir / "metrics.jsonl") for key in row}


class Together:
    """A dummy that takes its first step when all environments of the run are there, so that none
    can make all the steps alone."""

    def __init__(self, folder: Path, count: int, envid: int) -> None:
        self._env = dummy_with_its_id(envid)
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space
        (folder / f"made-{envid}").touch()
        self._awaited = [folder / f"made-{other}" for other in range(count)]

    def step(self, action: Mapping[str, Any]) -> Any:
        while self._awaited and not all(path.exists() for path in self._awaited):
            time.sleep(0.005)
        self._awaited = []
        return self._env.step(action)


class Paced:
    """A dummy that takes its time, and earns nothing, until a file `go` is in the folder.

    With a target score a run cannot be over before a test has done to it what it came for. A file
    tells that this process has made its first step.
    """

    def __init__(self, folder: Path, envid: int) -> None:
        self._env = dummy_with_its_id(envid)
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space
        self._go, self._free = folder / "go", False
        self._stepped = folder / f"stepped-{os.getpid()}"

    def step(self, action: Mapping[str, Any]) -> Any:
        obs = self._env.step(action)
        if not self._free:
            self._free = self._go.exists()
            self._stepped.touch()
            time.sleep(0.005)
            obs = {**obs, "reward": np.zeros_like(obs["reward"])}
        return obs


class Scored:
    """A dummy whose episodes score nothing until a file `go` is in the folder, then 1 a step."""

    def __init__(self, folder: Path, envid: int) -> None:
        self._env = dummy_with_its_id(envid)
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space
        self._go = folder / "go"

    def step(self, action: Mapping[str, Any]) -> Any:
        obs = self._env.step(action)
        reward = np.ones_like(obs["reward"]) if self._go.exists() else 0 * obs["reward"]
        return {**obs, "reward": reward}


class Awaiting(Scored):
    """One that waits in the middle of its first episode until there is a file `killed`."""

    def __init__(self, folder: Path, envid: int) -> None:
        super().__init__(folder, envid)
        self._folder, self._made = folder, 0

    def step(self, action: Mapping[str, Any]) -> Any:
        self._made += 1
        if self._made == 10:
            (self._folder / "playing").touch()
            while not (self._folder / "killed").exists():
                time.sleep(0.01)
        return super().step(action)


class Halting:
    """A dummy that halts at some steps until files let it go on."""

    def __init__(self, folder: Path, at: Mapping[int, str], envid: int) -> None:
        self._env = dummy_with_its_id(envid)
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space
        self._folder, self._at, self._made = folder, at, 0

    def step(self, action: Mapping[str, Any]) -> Any:
        self._made += 1
        if (name := self._at.get(self._made)) is not None:
            while not (self._folder / name).exists():
                time.sleep(0.01)
        return self._env.step(action)


class Troubled(Paced):
    """One whose environment 1 gets into trouble, once in the life of a run."""

    def __init__(self, folder: Path, trouble: Callable[[], Any], envid: int) -> None:
        super().__init__(folder, envid)
        self._mark = folder / f"trouble-{envid}"
        self._left = 50 if envid == 1 and not self._mark.exists() else -1
        self._trouble = trouble

    def step(self, action: Mapping[str, Any]) -> Any:
        if self._left == 0:
            self._mark.touch()
            self._trouble()
        self._left -= 1
        return super().step(action)


def sleep_for_ever() -> None:
    while True:
        time.sleep(1000)


def never_let_go_of_the_interpreter() -> None:
    re.match(r"(a|aa)+$", "a" * 200 + "b")


class Witness:
    """Takes the lines of a run, and acts on them while the supervisor waits for it.

    Sends processes signals, one after the other, once the run has made steps; for None the process
    fails by itself. Each has to be started again and to run for some lines before the next one's
    turn. After the last one the run may reach its target.
    """

    def __init__(self, folder: Path, *faults: tuple[str, signal.Signals | None]) -> None:
        self._folder, self._faults = folder, list(faults)
        self.lines: list[str] = []
        self._handled = 0
        self._sent = False
        self._seen = 0

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if not line.startswith("step ") or line.startswith("step 0"):
            return
        if self._handled == len(self._faults):
            return
        name, number = self._faults[self._handled]
        process = processes_by_title().get(name)
        if process is None:
            return  # steps are counted also before every process has come up
        if number is not None and not self._sent:
            process.send_signal(number)
            self._sent = True
        elif len(self.restarts) > self._handled:
            stepped = (self._folder / f"stepped-{process.pid}").exists()
            self._seen += stepped or not name.startswith("env-")
            if self._seen == 3:
                self._handled, self._sent, self._seen = self._handled + 1, False, 0
                if self._handled == len(self._faults):
                    (self._folder / "go").touch()

    @property
    def restarts(self) -> list[str]:
        """Names of the processes that were started again."""
        return [line.split()[0] for line in self.lines if "is started again" in line]


def processes_by_title() -> dict[str, psutil.Process]:
    """The processes of the fleet that this one runs, by role."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = " ".join(child.cmdline()).split()
            if words[:1] == ["dreamfleet"]:
                # A process that a worker is just starting still has the worker's title.
                found.setdefault(words[1], child)
    return found


class Raising:
    """An environment that raises after some steps; with `only`, the one of that id."""

    def __init__(self, envid: int, after: int = 30, only: int | None = None) -> None:
        self._env = dummy_with_its_id(envid)
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space
        self._left = after
        self._raises = only is None or only == envid

    def step(self, action: Mapping[str, Any]) -> Any:
        self._left -= 1
        if self._raises and self._left < 0:
            raise RuntimeError("the pole is broken")
        return self._env.step(action)


class CountingAgent(AgentBase):
    """Acts by how many steps it has seen of the environment's episode, and counts in its carry.

    The action is `count % 5`, so stored actions tell whether carries were kept for each
    environment and reset with each episode.
    """

    def __init__(self, raise_in: str = "") -> None:
        env = make_env("bundled:dummy", **EVERY_STEP)
        super().__init__(env.obs_space, env.act_space)
        self.stored_space = {"updates": Space(np.int32)}
        self._raise_in = raise_in
        self._updates = 0

    def init_policy(self, n: int) -> Any:
        return {"nested": {"count": np.zeros(n, np.int64)}}

    def init_train(self, n: int) -> Any:
        return n

    init_report = init_train

    def policy(self, carry: Any, obs: Mapping[str, Any], mode: str = "train") -> Any:
        if self._raise_in == "policy":
            raise RuntimeError("the policy is broken")
        count = carry["nested"]["count"]
        actions = {"action": (count % 5).astype(np.int32)}
        outs = {"updates": np.full(len(count), self._updates, np.int32)}
        return {"nested": {"count": count + 1}}, actions, outs

    def train(self, carry: Any, batch: Mapping[str, Any]) -> Any:
        if self._raise_in == "train":
            raise RuntimeError("the training is broken")
        self._updates += 1
        return carry, {"replay": {"stepid": batch["stepid"]}}, {"loss": 1.0}

    def report(self, carry: Any, batch: Mapping[str, Any]) -> Any:
        return carry, {"size": float(len(batch["is_first"]))}

    def save(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load(self, state: Mapping[str, Any], regex: str | None = None) -> None:
        self._updates = int(state["updates"])


class NeverCompiled(CountingAgent):
    """Compiles for ever, as a large network seems to."""

    def __init__(self, started: Path) -> None:
        super().__init__()
        self._started = started

    def compile(self, **_: Any) -> None:
        self._started.touch()
        threading.Event().wait()


class Prioritising(CountingAgent):
    """An agent that sends a high priority for the steps of environment 0 only, and notes in which
    share of its newest sequences that environment was."""

    def __init__(self) -> None:
        super().__init__()
        self._first: list[float] = []

    def train(self, carry: Any, batch: Mapping[str, Any]) -> Any:
        carry, outs, metrics = super().train(carry, batch)
        first = batch["vector"][..., 0] == 0
        self._first = [*self._first[-99:], float(first[:, 0].mean())]
        outs["replay"]["priority"] = np.where(first, 1.0, 1e-6).astype(np.float32)
        return carry, outs, metrics

    def save(self) -> dict[str, Any]:
        return {**super().save(), "share": float(np.mean(self._first or [0.0]))}


class SlowLearner(CountingAgent):
    """An agent whose training step takes until a file `go` is in the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._go = folder / "go"

    def train(self, carry: Any, batch: Mapping[str, Any]) -> Any:
        while not self._go.exists():
            time.sleep(0.01)
        return super().train(carry, batch)


class OnceRaising(CountingAgent):
    """An agent that raises after it was saved, once in the life of a run."""

    def __init__(self, folder: Path, method: str) -> None:
        super().__init__()
        self._folder, self._method = folder, method

    def _maybe_fail(self, method: str) -> None:
        mark = self._folder / "raised"
        if method == self._method and self._updates > 20 and not mark.exists():
            mark.touch()
            raise RuntimeError("the agent is broken")

    def policy(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe_fail("policy")
        return super().policy(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe_fail("train")
        return super().train(*args, **kwargs)


class OnceBroken(Replay):
    """A replay in which a method fails after some steps or samples, once in the life of a run."""

    def __init__(self, *args: Any, mark: Path, method: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mark, self._method, self._left = mark, method, 80

    def _maybe_fail(self, method: str, count: int) -> None:
        if method != self._method:
            return
        self._left -= count
        if self._left < 0 and not self._mark.exists():
            self._mark.touch()
            raise RuntimeError("the disk is broken")

    def add_batch(self, steps: Any, streams: Any, *args: Any, **kwargs: Any) -> int:
        self._maybe_fail("add_batch", len(streams))
        return super().add_batch(steps, streams, *args, **kwargs)

    def sample(self, count: int, *args: Any, **kwargs: Any) -> Any:
        self._maybe_fail("sample", count)
        return super().sample(count, *args, **kwargs)


def broken_replay(config: RunConfig, method: str) -> Replay:
    folder = config.logdir
    return OnceBroken(
        config.window, 10**6, folder / "replay", 64, mark=folder / "broken", method=method
    )


def stored_steps(directory: Path) -> dict[str, Any]:
    """Every stored step in the order in which they were stored, read back from the files."""
    with Replay(1, 10**6, directory) as replay:
        count = len(replay)
        numbers = np.arange(replay._table.low, replay._table.high)
        slots, indices = replay._table.starts(numbers)
        store = replay._table.store
        steps = store.gather(store.pieces(slots, indices, 1), count, 1)
    return {key: np.asarray(value)[:, 0] for key, value in steps.items()}


def stored_streams(directory: Path) -> dict[int, dict[str, Any]]:
    """The same for each environment, whose observations tell its id."""
    flat = stored_steps(directory)
    found = {}
    for envid in np.unique(flat["vector"][:, 0]).astype(int):
        rows = flat["vector"][:, 0] == envid
        found[int(envid)] = {key: value[rows] for key, value in flat.items()}
    return found


def check_order(stream: dict[str, Any], cuts: int) -> None:
    """Every step of an environment is there, once, in order, and with the action taken. The agent
    or the environment's process has ended so many times at most. Each end costs the steps that the
    replay had not confirmed, which may be the end of one episode and the beginning of another."""
    length = EVERY_STEP["length"]
    episode, step = stream["vector"][:, 1].astype(int), stream["vector"][:, 2].astype(int)
    assert stream["is_first"].tolist() == (step == 0).tolist()
    assert stream["action"].tolist() == (step % 5).tolist()
    starts = [n for n in range(1, len(step)) if step[n] != step[n - 1] + 1]
    assert all(step[n] == 0 for n in [0, *starts]), "no episode begins in its middle"
    inside = [n for n in range(1, len(step)) if step[n]]
    assert all(episode[n] == episode[n - 1] for n in inside), "steps of one episode"
    whole = [n for n in starts if step[n - 1] == length and episode[n] == episode[n - 1] + 1]
    broken = [n for n in starts if n not in whole]
    assert all(episode[n] > episode[n - 1] or episode[n] == 0 for n in broken), "0: a new process"
    assert len(broken) <= cuts


def check_counts(logdir: Path, found: Mapping[int, Any]) -> Any:
    """All roles have counted the steps that are stored; returns the newest checkpoint."""
    from dreamfleet.checkpoint import Checkpoint  # environments import this file, and stay small

    total = sum(len(stream["action"]) for stream in found.values())
    snapshot = Checkpoint(logdir / "ckpt" / "agent").load()
    assert snapshot.step == snapshot.parts["replay"]["steps"] == total
    logged = [row["step"] for row in rows(logdir / "metrics.jsonl")]
    assert logged == sorted(logged)
    return snapshot


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that may still be written: a line without an end is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


CHILD = "a simulator"


def env_with_a_child(**options: Any) -> Any:
    """An environment that has started a process, as simulators do."""
    code = f"""
import setproctitle, time
setproctitle.setproctitle({CHILD!r})
print(flush=True)
time.sleep(600)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()  # it has its title
    return make_env("bundled:dummy")


_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = random.Random(os.getpid()).sample(
    range(10_000 + 2_000 * _worker, 12_000 + 2_000 * _worker), 2_000
)


def fixed_address() -> str:
    """A tcp address for a server that is yet to be started.

    Its port is below those that the kernel hands out, so no other server gets it meanwhile.
    """
    while True:
        port = _ports.pop()
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"
