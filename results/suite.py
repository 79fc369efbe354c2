"""Learning results, made by one command.

    python results/suite.py run --root DIR [--group minutes] [--workers 2]
    python results/suite.py write --root DIR

`run` makes every run of the table below that is not finished, one on each core, at idle priority.
It may be stopped at any time and started again: runs resume. Each run is an ordinary
`dreamfleet train`. `write` copies the settings, scores, command, version, machine and minutes of
each run to `runs/`, and makes README.md and its pictures from these files alone.

Settings were tuned on seeds 100 and up. Reported seeds are 0, 1, 2; every run that was started is
listed. `peers/` holds scores of other programs, each with the command that made them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dreamfleet.config import read_config
from dreamfleet.errors import MetricsError
from dreamfleet.plotting import (
    action_repeat,
    draw,
    final_score,
    published_curve,
    read_evaluations,
    read_panels,
    read_scores,
)
from dreamfleet.statistics import mean_interval

HERE = Path(__file__).resolve().parent
RUNS = HERE / "runs"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Entry:
    """A task with settings, for several seeds."""

    group: str
    task: str
    steps: int
    goal: float | None = None
    preset: str = "default"
    flags: tuple[str, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    label: str = ""

    def name(self, seed: int) -> str:
        parts = [self.group, self.task.replace(":", "-"), self.label, str(seed)]
        return "_".join(part for part in parts if part)

    def command(self, seed: int, logdir: str) -> list[str]:
        chosen = () if self.preset == "default" else ("--preset", self.preset)
        flags = (*chosen, "--task", self.task, "--steps", str(self.steps), *self.flags)
        return ["dreamfleet", "train", *flags, "--seed", str(seed), "--logdir", logdir]


DMC = ("cartpole_balance", "cartpole_swingup", "walker_stand", "walker_walk", "finger_spin")
_VISION = ("--env-options", "obs=pixels", "repeat=2")
_BARLOW = ("--dreamer.loss.representation", "barlow", "--dreamer.loss.reconstruction-scale", "0")
_REFERENCE = (
    *("--env-options", "repeat=2", "--batch-size", "8", "--batch-length", "32"),
    *("--report-length", "32", "--train-ratio", "128", "--envs", "4", "--envs-per-process", "4"),
    *("--actor-batch", "4", "--dreamer.optimizer.learning-rate", "3e-4"),
    *("--dreamer.optimizer.warmup", "200", "--dreamer.execution.compute-dtype", "float32"),
    *("--replay.capacity", "1000000"),
)
_ABLATION = partial(
    Entry, "ablation", "dmc:cartpole_swingup", 15_000, preset="dmc_cpu", seeds=(0, 1)
)
SUITE = (
    Entry("cartpole", "gym:CartPole-v1", 30_000, 475, seeds=tuple(range(10))),
    Entry("minutes", "gym:Acrobot-v1", 30_000, -100),
    Entry("minutes", "gym:Pendulum-v1", 30_000, -200),
    Entry("minutes", "gym:MountainCarContinuous-v0", 60_000, 90),
    Entry("minutes", "gym:LunarLander-v3", 240_000, 200),
    Entry("minutes", "bundled:corridor", 60_000, 1.5),
    Entry("minutes", "bundled:catch", 24_000, 0.9, "pixels"),
    Entry("minutes", "minigrid:Empty-5x5-v0", 12_000, 0.9, "pixels"),
    Entry("minutes", "minigrid:DoorKey-5x5-v0", 60_000, 0.9, "pixels"),
    *(Entry("proprio", f"dmc:{name}", 25_000, preset="dmc_cpu") for name in (*DMC, "reacher_easy")),
    *(
        Entry("pixels", task, steps, None, "pixels", (*flags, *how), (0, 1), label)
        for task, steps, flags in (
            ("dmc:cartpole_swingup", 50_000, _VISION),
            ("crafter:reward", 100_000, ()),
            ("atari100k:freeway", 25_000, ()),
        )
        for label, how in (
            ("", ()),
            ("barlow", _BARLOW),
        )
    ),
    Entry("reference", "dmc:cartpole_swingup", 15_000, None, "dmc_proprio", _REFERENCE, (0, 1)),
    _ABLATION(label="imag_last=8"),
    _ABLATION(label="imag_last=all", flags=("--dreamer.loss.imag-last", "0")),
    _ABLATION(label="ratio=32", flags=("--train-ratio", "32")),
    _ABLATION(label="ratio=64", flags=("--train-ratio", "64")),
    _ABLATION(label="ratio=128", flags=("--train-ratio", "128")),
    _ABLATION(label="float_variance", flags=("--dreamer.loss.float-variance",)),
    _ABLATION(label="bfloat16", flags=("--dreamer.execution.compute-dtype", "bfloat16")),
)


# --- making the runs ------------------------------------------------------------------------------


def pending(root: Path, groups: Sequence[str]) -> Iterator[tuple[Entry, int]]:
    """What is not finished, first seeds first."""
    chosen = [entry for entry in SUITE if not groups or entry.group in groups]
    for turn in range(max(len(entry.seeds) for entry in chosen)):
        for entry in chosen:
            if turn < len(entry.seeds):
                seed = entry.seeds[turn]
                if not account(root / entry.name(seed)).get("finished"):
                    yield entry, seed


def account(logdir: Path) -> dict[str, Any]:
    """What is known about how a run was made."""
    path = logdir / "suite.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def make(root: Path, entry: Entry, seed: int, stop: threading.Event) -> None:
    """One run, to its end or until all are stopped."""
    if stop.is_set():
        return
    name = entry.name(seed)
    logdir, log = root / name, root / f"{name}.log"
    known = account(logdir)
    start = time.monotonic()
    command = entry.command(seed, str(logdir))
    line = [sys.executable, "-m", "dreamfleet.cli", *command[1:]]
    idle = ["chrt", "--idle", "0"] if shutil.which("chrt") else ["nice", "-n", "19"]
    with log.open("ab") as out:
        process = subprocess.Popen([*idle, *line], stdout=out, stderr=out, start_new_session=True)
    asked, ended = False, 0
    while not ended:
        # The supervisor waits for its workers, so that their CPU time is in its own.
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
        if not ended and stop.wait(1.0) and not asked:
            asked = True
            process.send_signal(signal.SIGTERM)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    known |= {
        "command": entry.command(seed, f"runs/{name}"),
        "version": known.get("version") or version(),
        "machine": machine(),
        "minutes": known.get("minutes", 0.0) + (time.monotonic() - start) / 60,
        "cpu_minutes": known.get("cpu_minutes", 0.0) + (used.ru_utime + used.ru_stime) / 60,
        "sittings": known.get("sittings", 0) + 1,
        "exit": code,
        "finished": code == 0 and not asked,
    }
    if logdir.is_dir():
        (logdir / "suite.json").write_text(json.dumps(known, indent=1))
    print(f"{name}: exit {code} after {known['minutes']:.1f} min", flush=True)


def version() -> str:
    """The commit that the runs are made with."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def run(root: Path, groups: Sequence[str], workers: int) -> None:
    """All that is pending, so many at a time."""
    root.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    with ThreadPoolExecutor(workers) as pool:
        made = [pool.submit(make, root, *each, stop) for each in pending(root, groups)]
        for each in made:
            while not each.done():  # a main thread that waits without end hears no signal
                time.sleep(0.5)
            each.result()


# --- writing results ------------------------------------------------------------------------------


def write(root: Path) -> None:
    """`results/` anew: what is kept of the runs, and the page that follows from it."""
    for entry in SUITE:
        for seed in entry.seeds:
            keep(root / entry.name(seed), RUNS / entry.name(seed))
    for group, entries in grouped():
        scored = [each for entry in entries for each in kept(entry) if evaluated(each) is not None]
        if scored:
            draw(read_panels(scored), HERE / f"{group}.png")
    (HERE / "README.md").write_text(page())


def keep(logdir: Path, target: Path) -> None:
    """What is needed to check a result, without logs, checkpoints and replay."""
    for name in ("config.json", "scores.jsonl", "evaluations.jsonl", "suite.json"):
        if (logdir / name).is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(logdir / name, target / name)
    if (config := target / "config.json").is_file():  # where it was made says nothing
        settings = {**json.loads(config.read_text()), "logdir": f"runs/{target.name}"}
        config.write_text(json.dumps(settings, indent=1) + "\n")


def grouped() -> Iterator[tuple[str, list[Entry]]]:
    """The groups of which something was run."""
    for group in dict.fromkeys(entry.group for entry in SUITE):
        entries = [entry for entry in SUITE if entry.group == group and kept(entry)]
        if entries:
            yield group, entries


def kept(entry: Entry) -> list[Path]:
    """The runs of an entry that were started."""
    runs = [RUNS / entry.name(seed) for seed in entry.seeds]
    return [each for each in runs if each.is_dir()]


def page() -> str:
    """README.md, from the files beside it."""
    accounts = [account(each) for each in sorted(RUNS.iterdir())]
    versions = sorted({each["version"] for each in accounts if "version" in each})
    machines = sorted({each["machine"] for each in accounts if "machine" in each})
    text = [HEAD.format(versions=", ".join(versions), machines="; ".join(machines))]
    for group, entries in grouped():
        text += [f"## {group}\n", ABOUT[group], TABLE, *map(row, entries)]
        text += [f"\n![Curves of {group}]({group}.png)\n"]
        text += [f"{line}\n" for line in peers(group)]
    return "\n".join(text)


HEAD = """# Results

`python results/suite.py` made the runs and this page. All runs are of commit {versions}
({machines}). Every run that was started is listed, also those that failed or are not finished.
`runs/` holds the settings, command, version, machine and scores of each.

The score is the mean of the evaluation at the end of a run (20 episodes), or of the last tenth of
the training episodes of a run that is not finished. Brackets hold the 95 % interval over seeds (t
distribution). CPU minutes are the CPU time of all processes of a run; runs shared two cores with
other work.
"""
ABOUT = {
    "cartpole": "`make train`, with ten seeds.\n",
    "minutes": "One setting for vectors (`default`) and one for images (`pixels`).\n",
    "proprio": "dm_control from states, action repeat 2. Published: mean ± deviation at as many "
    "frames.\n",
    "pixels": "Images, with reconstruction and with `representation=barlow` without a decoder.\n",
    "reference": "The settings of the reference implementation's run in `peers/`.\n",
    "ablation": "One setting changed at a time.\n",
}
TABLE = (
    "| task | settings | steps | seeds | score | each seed | goal | reached | published | "
    "CPU minutes |\n|---|---|---|---|---|---|---|---|---|---|"
)


def row(entry: Entry) -> str:
    """A line of the table: what all runs of an entry came to."""
    runs = kept(entry)
    finals = [score for each in runs if (score := evaluated(each)) is not None]
    unfinished = sum(not account(each).get("finished") for each in runs)
    minutes = [account(each).get("cpu_minutes", 0.0) for each in runs]
    goal, reached, published = "-", "-", "-"
    if entry.goal is not None:
        goal = f"{entry.goal:g}"
        reached = f"{sum(score >= entry.goal for score in finals)} of {len(runs)}"
    config = read_config(runs[0])
    theirs = published_curve(entry.task, config.env_options)
    there = theirs.at(entry.steps * action_repeat(config)) if theirs else None
    if there:
        published = "{:.0f} ± {:.0f}".format(*there)
    cells = (
        f"`{entry.task}`",
        " ".join((entry.preset, *entry.flags)),
        f"{entry.steps:,}",
        f"{len(runs)}{f' ({unfinished} unfinished)' if unfinished else ''}",
        str(mean_interval(finals)) if finals else "-",
        ", ".join(f"{score:.4g}" for score in finals),
        goal,
        reached,
        published,
        " to ".join(dict.fromkeys(f"{each:.0f}" for each in (min(minutes), max(minutes)))),
    )
    return f"| {' | '.join(cells)} |"


def evaluated(logdir: Path) -> float | None:
    """The mean of the last evaluation, or of the last tenth of the training episodes."""
    with suppress(MetricsError):
        return float(read_evaluations(logdir).score[-1])
    with suppress(MetricsError):
        return final_score(read_scores(logdir))
    return None


def peers(group: str) -> Iterator[str]:
    """What other programs scored, as `peers/` has it."""
    for path in sorted((HERE / "peers").glob("*/peer.json")):
        about = json.loads(path.read_text())
        if about["group"] == group:
            score = final_score(read_scores(path.parent))
            yield (
                f"`peers/{path.parent.name}`: {about['name']}, seed {about['seed']}, "
                f"{score:.4g} in the last tenth of {about['steps']:,} steps, "
                f"{about['cpu_minutes']:.0f} CPU minutes."
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["run", "write", "list"])
    parser.add_argument("--root", type=Path, default=Path("runs/results"))
    parser.add_argument("--group", nargs="*", default=[], choices=sorted({e.group for e in SUITE}))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.what == "run":
        run(args.root, args.group, args.workers)
    elif args.what == "write":
        write(args.root)
    else:
        for entry, seed in pending(args.root, args.group):
            print(entry.name(seed))


if __name__ == "__main__":
    main()
