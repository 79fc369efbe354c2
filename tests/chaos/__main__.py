"""`make chaos ARGS='--minutes 30 --goals'`: run a fleet under faults, and audit every step."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Self

from benchmarks.report import split_settings
from chaos.audit import Accounts, accounts_of, left_files
from chaos.faults import ChaosError, Disk, Injector, Outcome
from chaos.fleet import AGENTS, SETTINGS, STOPPED_BY_SIGNAL, Fleet
from chaos.report import Report
from chaos.schedule import SUPERVISOR, Fault, schedule
from dreamfleet.cli.console import complain, say, write
from dreamfleet.errors import DreamfleetError
from dreamfleet.files import temporary_folder
from dreamfleet.roles.progress import limiter_for

_DISK_BYTES = 2 << 30
_START_SECONDS = 300.0  # until the first steps: a cold start compiles
_POLL_SECONDS = 0.05
_QUIET_RESTS = 15  # the fleet runs undisturbed for at most so many rests, before and after

_ABOUT = """Run a fleet under faults, and account for every step. A seeded schedule kills, stops and
terminates processes, also two at once and while they start, compile or save; cuts connections and
loses replies; sends requests that no server may accept; and fills the disk. Then every stored step
is audited. The exit code is 1 if a promise did not hold."""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=_ABOUT)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long there are faults")
    parser.add_argument("--seed", type=int, default=0, help="decides the faults and their order")
    parser.add_argument("--faults", type=int, default=0, help="stop after so many; 0: by time only")
    parser.add_argument("--rest", type=float, default=4.0, help="mean seconds between two faults")
    parser.add_argument("--agent", choices=sorted(AGENTS), default="dreamer")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/chaos"), help="directory of the report"
    )
    parser.add_argument(
        "--goals",
        action="store_true",
        help="also fail if recovery takes over 3 s (median) or 10 s (worst), if under 70 %% of the "
        "undisturbed steps are made, or under 200 faults in 30 minutes; for a quiet machine",
    )
    parser.epilog = "Settings of `dreamfleet train` follow after --, as in -- --actors 2"
    words, settings = split_settings(sys.argv[1:] if arguments is None else arguments)
    return parser.parse_args(words, argparse.Namespace(settings=settings))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    options = _options(arguments)
    settings = [*SETTINGS.split(), *AGENTS[options.agent].split()]
    settings += ["--seed", str(options.seed), *options.settings]
    try:
        report = run_chaos(
            settings,
            options.seed,
            options.minutes,
            most=options.faults,
            rest=options.rest,
            keep=options.out / "run",
        )
    except DreamfleetError as error:
        complain(str(error))
        return 1
    write(options.out / "report.json", report.to_json())
    write(options.out / "report.txt", report.to_text())
    say(f"\n{report.to_text()}\nreport         {options.out}")
    return 1 if report.problems or (options.goals and report.misses) else 0


def run_chaos(
    settings: Sequence[str],
    seed: int,
    minutes: float,
    *,
    most: int = 0,
    rest: float = 4.0,
    keep: Path | None = None,
) -> Report:
    """Run a fleet under faults, end it, and audit what it has left.

    Args:
        settings: Of the fleet, as for `dreamfleet train`.
        seed: Decides the faults.
        minutes: How long there are faults.
        most: Faults after which it stops; 0 for no limit but the time.
        rest: Mean seconds between the recovery from a fault and the next one.
        keep: Where to copy the run's directory to if a promise did not hold.
    """
    with temporary_folder("dreamfleet-chaos-") as folder, Disk(folder / "run", _DISK_BYTES) as disk:
        if disk.kind != "tmpfs":
            say("A small disk cannot be mounted here: the size of files is limited instead.")
        logdir = folder / "run"
        with closing(Fleet(logdir, folder, settings)) as fleet:
            run = _Run(fleet, Injector(fleet, disk, seed))
            report = run.run(seed, minutes, most, rest)
        if report.problems and keep is not None:
            shutil.copytree(logdir, keep, dirs_exist_ok=True)
            shutil.copy(fleet.output, keep)
    return replace(report, settings=" ".join([f"seed {seed}:", *settings]))


class _Run:
    """One run under faults."""

    def __init__(self, fleet: Fleet, injector: Injector) -> None:
        self._fleet, self._injector = fleet, injector
        self._outcomes: list[Outcome] = []
        self._problems: list[str] = []
        self._begin = 0.0

    def run(self, seed: int, minutes: float, most: int, rest: float) -> Report:
        fleet, quiet = self._fleet, min(6 * minutes, _QUIET_RESTS * rest)
        fleet.start()
        _await_training(fleet)
        threads = fleet.config.launcher == "serial"
        names = sorted(fleet.workers().keys() - {SUPERVISOR})
        faults = islice(schedule(seed, names, threads=threads), most or None)
        with _Meter(fleet.steps) as meter:
            before = meter.rate(quiet)
            say(f"{before:,.0f} steps per second without faults")
            self._begin, steps = time.monotonic(), fleet.steps()
            try:
                self._disturb(faults, random.Random(seed), 60 * minutes, rest)
            except ChaosError as error:
                self._problems.append(f"{error} The last fault was: {self._last}.")
            except KeyboardInterrupt:
                say("No more faults; the run is ended and audited.")
                quiet = 0.0
            seconds = time.monotonic() - self._begin
            disturbed = (fleet.steps() - steps) / seconds
            after = meter.rate(quiet) if quiet and not fleet.ended else before
        return Report(
            minutes=seconds / 60,
            outcomes=self._outcomes,
            quiet=(before + after) / 2,
            disturbed=disturbed,
            longest_pause=meter.longest_pause,
            accounts=self._end(),
            problems=self._problems,
            orphans=self._injector.orphans,
        )

    def _disturb(
        self, faults: Iterable[Fault], rng: random.Random, seconds: float, rest: float
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
            say(f"{at:7.1f} s  {outcome}")
            if outcome.accepted:
                self._problems.append(f"A hostile request was carried out: {outcome.accepted[0]}.")
            if outcome.collateral:
                names = " and ".join(outcome.collateral)
                self._problems.append(f"'{fault}' also restarted {names}.")

    def _end(self) -> Accounts:
        """End the run in order, and audit what it has left."""
        fleet, config = self._fleet, self._fleet.config
        if fleet.ended:
            self._problems.append("The run had ended by itself; fleet.log says why.")
        elif (code := fleet.end()) != STOPPED_BY_SIGNAL:
            self._problems.append(f"The run ended with code {code}.")
        fleet.wait_until_gone()
        if left := [" ".join(each.cmdline()) for each in fleet.processes()]:
            self._problems.append(f"Processes are left behind: {', '.join(left)}.")
        if files := left_files(config.logdir, fleet.temporary):
            self._problems.append(f"Files are left behind: {', '.join(files)}.")
        ended = self._injector.ended
        accounts = accounts_of(config, ended["replay"] + ended[SUPERVISOR] + ended["disk"])
        killed = sum(ended[role] for role in ("agent", "actor", SUPERVISOR, "disk"))
        most = 8 * config.batch_size + config.all_envs  # steps that an actor has not stored yet
        self._problems += accounts.problems(killed * config.actors * most)
        return accounts


def _await_training(fleet: Fleet) -> None:
    """Until every environment has made steps, and the agent has trained on them."""
    end = time.monotonic() + _START_SECONDS
    while not fleet.is_configured or fleet.steps() < 2 * limiter_for(fleet.config).minsize:
        if fleet.ended or time.monotonic() > end:
            said = fleet.output.read_text()[-2000:]
            raise ChaosError(f"The fleet did not start. It said:\n{said}")
        time.sleep(_POLL_SECONDS)


class _Meter:
    """Samples the number of steps in a thread."""

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps = steps
        self.longest_pause = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="meter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        last, moved = -1, time.monotonic()
        while not self._over.wait(_POLL_SECONDS):
            steps, now = self._steps(), time.monotonic()
            if steps != last:
                last, moved = steps, now
            self.longest_pause = max(self.longest_pause, now - moved)

    def rate(self, seconds: float) -> float:
        """Steps per second over the next seconds."""
        begin, steps = time.monotonic(), self._steps()
        time.sleep(seconds)
        return (self._steps() - steps) / max(time.monotonic() - begin, 1e-9)


if __name__ == "__main__":
    sys.exit(main())
