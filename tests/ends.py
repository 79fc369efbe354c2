"""Ends runs at random moments, and looks whether each has ended in order.

    python tests/ends.py --ends 500 --seed 0 --dreamer 0.1

A seed says when and how each run is ended: while it starts, compiles, saves, reports, evaluates or
trains, around its very end, right after one of its processes was killed, or while one is stopped;
by Ctrl-C, by SIGTERM or SIGHUP, or by one of these to every process of it. A directory is resumed
some times; some runs have two actors or a replay of two shards.

An end is in order if the run exits soon and as it should, has saved what its replay holds, and
leaves nothing behind: no process, no half-written checkpoint, no socket file. What is stored is
audited. The directory of an end that was not in order is kept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from chaos.audit import audit
from chaos.env import TASK

import dreamfleet.training  # noqa: F401 - each run is forked from here, and has it then
from dreamfleet.cli import main as dreamfleet_main
from dreamfleet.cli.console import say
from dreamfleet.fleet.record import read_record
from dreamfleet.resuming import steps_made
from dreamfleet.roles.health import read_health
from dreamfleet.transport.address import remove_socket_files

MOMENTS = (
    *("replay killed", "save", "logger killed", "replay stopped", "start", "compile", "report"),
    *("evaluation", "agent killed", "train", "finish", "env-0 killed", "logger stopped"),
)
WAYS = ("SIGINT", "SIGTERM", "SIGTERM to all", "SIGHUP", "SIGHUP to all")
RESUMED = 8
"""Runs in one directory, one after the other."""
SETTINGS = f"""--task {TASK} --envs 4 --envs-per-process 2 --batch-size 4 --batch-length 8
--report-length 8 --train-ratio 16 --log-every 0.5 --save-every 0.3"""
_PATIENCE = 120.0
_FIRST_PATIENCE = 900.0  # in which Dreamer is compiled, also on a busy machine


@dataclass(frozen=True)
class Plan:
    """How one run is ended."""

    moment: str
    way: str
    delay: float
    """Seconds after the moment has come."""
    agent: str
    actors: int = 1
    shards: int = 1

    @property
    def victim(self) -> str:
        """The process that is killed first; empty if none is."""
        return self.moment.removesuffix(" killed") if self.moment.endswith(" killed") else ""

    @property
    def stopped(self) -> str:
        """The process that is stopped first; empty if none is."""
        return self.moment.removesuffix(" stopped") if self.moment.endswith(" stopped") else ""

    def settings(self, logdir: Path) -> list[str]:
        steps = steps_made(logdir) + 400 if self.moment == "finish" else 0
        text = f"{SETTINGS} --agent {self.agent} --steps {steps} --actors {self.actors}"
        text += f" --replay-shards {self.shards}"
        text += " --dreamer.model cpu-tiny" if self.agent == "dreamer" else ""
        text += " --report-every 0.05" if self.moment == "report" else " --report-every 300"
        evaluated = self.moment == "evaluation"
        text += " --eval-every 64 --eval-envs 1" if evaluated else " --eval-every 0 --eval-envs 0"
        text += f" --eval-episodes {0 if not steps and not evaluated else 2}"
        return [*text.split(), "--logdir", str(logdir)]


class OutOfOrder(Exception):
    """A run that has not ended as it should."""


def end_one(plan: Plan, folder: Path) -> float:
    """Start or resume the run of a folder, end it, and look; returns the seconds that it took."""
    logdir, log = folder / "run", folder / "run" / "logs" / "agent.log"
    before, stored = len(read(log)), [*logdir.glob("replay*")]
    faults = Counter(audit(stored).faults if stored else {})
    run = psutil.Process(start(plan, folder))
    try:
        wait_for(plan, run, logdir, before)
    except OutOfOrder:
        run.kill()  # its processes end with it
        run.wait()
        raise
    time.sleep(plan.delay)
    processes: list[psutil.Process] = []
    began = time.monotonic()
    with suppress(psutil.NoSuchProcess):
        processes = run.children(recursive=True)
        for process in [run, *(processes if plan.way.endswith(" to all") else [])]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.Signals[plan.way.split()[0]])
    code = exit_code(run.pid)
    seconds = time.monotonic() - began
    look(plan, code, folder, processes, read(log)[before:], faults)
    return seconds


def start(plan: Plan, folder: Path) -> int:
    """Run the command in a process that has imported all of it already."""
    settings = plan.settings(folder / "run")
    if child := os.fork():
        return child
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a shell may ignore it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        tempfile.tempdir = os.environ["TMPDIR"] = str(sockets(folder))
        code = dreamfleet_main(["train", *settings])
        sys.stdout.flush()
    finally:
        remove_socket_files()  # as at the end of a process that was not forked
        os._exit(code)


def wait_for(plan: Plan, run: psutil.Process, logdir: Path, before: int) -> None:
    """Wait until the moment has come, or the run has ended by itself."""
    notes = logdir / "workers" / "env-0"
    steps = read_health(notes).steps

    def come() -> bool:
        if plan.moment == "start" or run.status() == psutil.STATUS_ZOMBIE:
            return True
        if plan.moment == "compile":
            return "The agent is" in read(logdir / "logs" / "agent.log")[before:]
        if read_health(notes).steps <= steps:
            return False
        return plan.moment != "save" or any((logdir / "ckpt").glob("*/.writing-*"))

    wait_until(come, plan.moment, _FIRST_PATIENCE)
    for child in run.children():
        with suppress(psutil.NoSuchProcess):
            name = " ".join(child.cmdline()).split()[1:2]
            if name == [plan.victim]:
                child.kill()
            elif name == [plan.stopped]:
                child.suspend()


def look(
    plan: Plan,
    code: int,
    folder: Path,
    processes: list[psutil.Process],
    log: str,
    earlier: Counter[str],
) -> None:
    """Whether a run has ended in order, apart from the faults that earlier ones have left."""
    logdir, output = folder / "run", read(folder / "output")
    # Before the fleet is there, and after it, a signal ends the command as any other.
    outside = plan.moment in ("start", "finish") and code in (
        128 + signal.SIGTERM,
        128 + signal.SIGHUP,
    )
    done = plan.moment == "finish" and code == 0
    expect(code == 130 or outside or done, f"exit code {code}", output)
    # The kill of this program may come to be known after the end has begun.
    own = f"{plan.victim or None} was killed by signal 9 while it was stopping"
    said = output.replace(own, "")
    for words in ("Traceback", "did not stop", "it was stopping", "ends without"):
        expect(words not in said, f"it says {words!r}", output)
    wait_until(lambda: not any(map(lives, processes)), "its processes to end")
    record = read_record(logdir)
    expect(record is None or record.state == "ended" or outside, "no end", str(record))
    left = [*(logdir / "addresses").glob("*")]
    saved = "The agent is" in log and "nothing is saved" not in log
    # What those had half written is removed by the next agent.
    if saved and plan.victim not in ("agent", "replay"):
        left += (logdir / "ckpt").glob("*/.*")
    left += sockets(folder).iterdir()
    expect(not left, "something is left behind", str(left))
    if not saved:
        return
    found, steps = audit(logdir.glob("replay*")), steps_made(logdir)
    # A killed agent takes along what it has answered, and the replay has not confirmed.
    faults = (Counter(found.faults) - earlier).keys()
    faults -= {"lost_ends"} if plan.victim == "agent" else set()
    expect(not faults, str(found.faults), log)
    # A run that is stopped waits 5 s for its replay, and else saves the last position it knows.
    away = "replay" in plan.moment and "The checkpoint keeps an older position" in log
    good = steps == found.rows or plan.victim == "agent" or (away and steps < found.rows)
    expect(good, f"{steps} of {found.rows} steps are saved", log)


def sockets(folder: Path) -> Path:
    """Where a run keeps its sockets: paths of sockets have to be short."""
    return folder.parent / "tmp"


def expect(good: bool, what: str, shown: str) -> None:
    if not good:
        raise OutOfOrder(f"{what}\n{shown}")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = _PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        expect(time.monotonic() < deadline, f"waited {seconds:g} s for {what}", "")
        time.sleep(0.002)


def exit_code(pid: int) -> int:
    found: list[int] = []

    def ended() -> bool:
        which, status = os.waitpid(pid, os.WNOHANG)
        if which:
            found.append(os.waitstatus_to_exitcode(status))
        return bool(found)

    try:
        wait_until(ended, "the run to end")
    except OutOfOrder:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return found[0]


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def stress(
    ends: int, seed: int, folder: Path, dreamer: float = 0.0, say: Callable[[str], Any] = say
) -> dict[str, list[float]]:
    """End so many runs; returns the seconds that ends took, by moment, `wrong` for those that were
    not in order.

    Args:
        ends: How many.
        seed: Which.
        folder: Where the runs lie meanwhile.
        dreamer: The share of runs that train Dreamer; the others act at random.
        say: Takes a line for each end.
    """
    rng, took = random.Random(seed), defaultdict(list)
    sockets(folder / "any").mkdir()
    folders: dict[str, Path] = {}
    left: dict[str, int] = {}
    shards_of: dict[str, int] = {}
    for number in range(ends):
        agent = "dreamer" if rng.random() < dreamer else "random"
        moment = MOMENTS[(seed + number) % len(MOMENTS)]
        longest = {"save": 0.01, "start": 3.0}.get(moment, 0.5 if "killed" in moment else 1.5)
        delay = rng.uniform(0.0, longest)
        way, actors, shards = rng.choice(WAYS), rng.choice([1, 1, 1, 2]), rng.choice([1, 1, 2])
        if not left.get(agent):
            if agent in folders:
                shutil.rmtree(folders[agent])
            folders[agent] = folder / f"{seed}-{number}"
            folders[agent].mkdir(parents=True)
            left[agent], shards_of[agent] = RESUMED, shards
        left[agent] -= 1
        plan = Plan(moment, way, delay, agent, actors, shards_of[agent])
        try:
            seconds = end_one(plan, folders[agent])
            took[plan.moment].append(seconds)
            say(f"{number} {seconds:.1f} s {plan}")
        except OutOfOrder as error:
            took["wrong"].append(number)
            say(f"{number} NOT IN ORDER {plan}, see {folders.pop(agent)}: {error}")
            left[agent] = 0
    for each in (*folders.values(), sockets(folder / "any")):
        shutil.rmtree(each)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ends", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dreamer", type=float, default=0.1, help="share of runs with Dreamer")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ends-"))
    took = stress(args.ends, args.seed, folder, args.dreamer)
    wrong = took.pop("wrong", [])
    for moment, seconds in sorted(took.items()):
        times = f"median {median(seconds):5.1f} s, longest {max(seconds):5.1f} s"
        say(f"{moment:12} {len(seconds):4} ends, {times}")
    say(f"{args.ends - len(wrong)} of {args.ends} ends were in order")
    if wrong:
        sys.exit(1)
    folder.rmdir()


if __name__ == "__main__":
    main()
