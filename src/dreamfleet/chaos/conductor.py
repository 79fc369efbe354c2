"""Runs a fleet under faults, and settles the accounts."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

from dreamfleet.agents.dreamer.config import DreamerConfig, size_preset
from dreamfleet.chaos.accounts import Accounts, left_files, settle
from dreamfleet.chaos.faults import ChaosError, Disk, Injector, Outcome
from dreamfleet.chaos.fleet import Fleet
from dreamfleet.chaos.network import Network
from dreamfleet.chaos.report import Report
from dreamfleet.chaos.schedule import Fault, schedule
from dreamfleet.config import RunConfig
from dreamfleet.files import temporary_folder
from dreamfleet.fleet.workers import worker_names
from dreamfleet.replay.config import ReplayConfig
from dreamfleet.roles.addresses import server_name
from dreamfleet.roles.replay import limiter_for

Say = Callable[[str], None]

_DISK_BYTES = 2 << 30
_START_SECONDS = 300.0  # until the first steps: a cold start compiles
_LOOK_SECONDS = 0.05
_SAID = 2000  # characters of what a fleet said
_QUIET = 15  # rests without faults before the first and after the last one, at most


def fleet_config(logdir: Path, agent: str = "dreamer", **changes: Any) -> RunConfig:
    """A small fleet that saves and logs often, with environments whose steps can be audited."""
    settings: dict[str, Any] = {
        "task": "bundled:audit",
        "env_options": {"seconds": 0.002},
        "logdir": logdir,
        "agent": agent,
        "envs": 8,
        "envs_per_process": 4,
        "eval_envs": 1,
        "eval_episodes": 0,
        "steps": 0,
        "batch_size": 8,
        "batch_length": 16,
        "train_ratio": 16.0,
        "replay": ReplayConfig(chunk=256, capacity=4_000_000),
        "log_every": 1.0,
        "save_every": 5.0,
        "report_every": 20.0,
        "outputs": ("jsonl",),
        "ray_address": "local",  # a cluster of its own: nobody else's may be disturbed
    }
    if agent == "dreamer":
        settings["agent_config"] = DreamerConfig(model=size_preset("debug"))
    else:  # cheap enough for a machine that has other things to do
        settings |= {"envs": 4, "envs_per_process": 2, "env_options": {"seconds": 0.01}}
    if changes.get("eval_every"):
        settings["eval_episodes"] = 2
    return RunConfig(**{**settings, **changes})


def servers_of(config: RunConfig) -> dict[str, bool]:
    """The names of a run's servers, and whether each listens at a port."""
    names = [server_name("actor", index) for index in range(config.actors)]
    names += ["learner"] if config.actors > 1 else []
    names += [server_name("replay", shard) for shard in range(config.replay_shards)]
    names += ["logger", *(["evaluator"] if config.eval_every else [])]
    every, actors = config.launcher == "ray", config.actor_addr.startswith("tcp:")
    return {name: every or (actors and name.startswith("actor")) for name in names}


def run_chaos(
    config: RunConfig,
    seed: int,
    minutes: float,
    say: Say,
    *,
    most: int = 0,
    rest: float = 4.0,
    keep: Path | None = None,
) -> Report:
    """Run a fleet under faults, end it, and audit what it has left.

    Args:
        config: The fleet; its directory does not exist yet.
        seed: Decides the faults.
        minutes: How long there are faults.
        say: Takes lines for the person.
        most: Faults after which it is enough; 0 for no end but that of the time.
        rest: Mean seconds between the recovery from a fault and the next one.
        keep: Where to put a copy of the run's directory if a promise did not hold.
    """
    threads = config.launcher == "serial"
    servers = {} if threads else servers_of(config)
    # Nobody calls an evaluator between two rounds, so nobody notices what happens to its network.
    called = [name for name in servers_of(config) if name != "evaluator"]
    faults = schedule(seed, worker_names(config), called, threads=threads)
    with (
        temporary_folder("dreamfleet-chaos-") as folder,
        Disk(config.logdir, _DISK_BYTES) as disk,
        Network(config.logdir, servers, folder) as network,
    ):
        if disk.kind != "tmpfs":
            say("No small disk can be mounted here: a full one is a limit on the size of files.")
        with closing(Fleet(config, network.addresses, folder)) as fleet:
            conductor = _Conductor(fleet, Injector(fleet, network, disk, seed), say)
            report = conductor.run(islice(faults, most or None), random.Random(seed), minutes, rest)
        if report.problems and keep is not None:
            shutil.copytree(config.logdir, keep, dirs_exist_ok=True)
    return replace(report, settings={"seed": seed, **json.loads(config.to_json())})


class _Conductor:
    """One run under faults."""

    def __init__(self, fleet: Fleet, injector: Injector, say: Say) -> None:
        self._fleet, self._injector, self._say = fleet, injector, say
        self._outcomes: list[Outcome] = []
        self._problems: list[str] = []
        self._begin = 0.0

    def run(
        self,
        faults: Iterable[Fault],
        rng: random.Random,
        minutes: float,
        rest: float,
    ) -> Report:
        fleet, quiet = self._fleet, min(6 * minutes, _QUIET * rest)
        fleet.start()
        with _Meter(fleet) as meter:
            meter.await_steps()
            before = meter.rate(quiet)
            self._say(f"{before:,.0f} steps a second without faults")
            self._begin, steps = time.monotonic(), fleet.steps()
            try:
                self._disturb(faults, rng, 60 * minutes, rest)
            except ChaosError as error:
                self._problems.append(f"{error} The last fault was: {self._last}.")
            except KeyboardInterrupt:
                self._say("No more faults; the run is ended and audited.")
                quiet = 0.0
            seconds = time.monotonic() - self._begin
            disturbed = (fleet.steps() - steps) / seconds
            after = meter.rate(quiet) if quiet and not fleet.ended else before
        accounts = self._end()
        return Report(
            minutes=seconds / 60,
            outcomes=self._outcomes,
            samples=[(at - self._begin, made) for at, made in meter.samples],
            quiet=(before + after) / 2,
            disturbed=disturbed,
            accounts=accounts,
            problems=self._problems,
            lost=self._injector.lost,
            calls=self._injector.calls,
            orphans=self._injector.orphans,
        )

    def _disturb(
        self,
        faults: Iterable[Fault],
        rng: random.Random,
        seconds: float,
        rest: float,
    ) -> None:
        self._last: Fault | None = None
        for fault in faults:
            time.sleep(rng.uniform(0.5, 1.5) * rest)
            at = time.monotonic() - self._begin
            if at > seconds:
                return
            self._last = fault
            outcome = replace(self._injector.do(fault), at=at)
            self._outcomes.append(outcome)
            self._say(f"{at:7.1f} s  {outcome}")
            if outcome.accepted:
                self._problems.append(f"A hostile request was carried out: {outcome.accepted[0]}.")
            if outcome.collateral:
                names = " and ".join(outcome.collateral)
                self._problems.append(f"After '{fault}' {names} started again, too.")

    def _end(self) -> Accounts | None:
        """End the run in order, and look at what it has left."""
        fleet, config = self._fleet, self._fleet.config
        if fleet.ended:
            self._problems.append("The run had ended by itself; fleet.log says why.")
        elif code := fleet.end():
            self._problems.append(f"The run ended with code {code}.")
        fleet.wait_until_gone()
        if left := [" ".join(each.cmdline()) for each in fleet.processes()]:
            self._problems.append(f"Processes are left behind: {', '.join(left)}.")
        if files := left_files(config.logdir, fleet.temporary):
            self._problems.append(f"Files are left behind: {', '.join(files)}.")
        ended = self._injector.ended
        accounts = settle(config, ended["replay"] + ended["supervisor"] + ended["disk"])
        killed = sum(ended[role] for role in ("agent", "actor", "supervisor", "disk"))
        most = 8 * config.batch_size + config.all_envs  # that an actor has not stored yet
        self._problems += accounts.problems(killed * config.actors * most)
        return accounts


class _Meter:
    """Looks now and then how many steps the environments have made."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.samples: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="meter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self.samples.append((time.monotonic(), self._fleet.steps()))

    def await_steps(self) -> None:
        """Until every environment has made steps, and the agent has trained on them."""
        config, end = self._fleet.config, time.monotonic() + _START_SECONDS
        enough = 2 * limiter_for(config).minsize
        while self._fleet.steps() < enough:
            if self._fleet.ended or time.monotonic() > end:
                said = (config.logdir / "fleet.log").read_text()[-_SAID:]
                raise ChaosError(f"The fleet did not start. It said:\n{said}")
            time.sleep(_LOOK_SECONDS)
        self.samples.clear()  # of the start

    def rate(self, seconds: float) -> float:
        """Steps a second over the next seconds."""
        begin, steps = time.monotonic(), self._fleet.steps()
        time.sleep(seconds)
        return (self._fleet.steps() - steps) / (time.monotonic() - begin)
