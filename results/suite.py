"""Learning results, made by one command.

    python results/suite.py run --root DIR [--group minutes] [--workers 2]
    python results/suite.py write --root DIR

`run` makes every run of the table below that is not finished, one on each core, at idle priority.
It may be stopped at any time and started again: runs resume. Each run is an ordinary
`dreamfleet train`. Linux shares its cores between sessions first: for idle priority to count there,
say `sysctl kernel.sched_autogroup_enabled=0` before. `write` copies the settings, scores, command,
version, machine and minutes of each run to `runs/`, and makes README.md and its pictures from these
files alone.

Settings were tuned on seeds 100 and up; `tuning.json` has what was tried where a goal is missed.
Reported seeds are 0, 1, 2; every run that was started is listed. `peers/` holds scores of other
programs, each with the command that made them.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.config import read_config
from dreamfleet.errors import MetricsError
from dreamfleet.metrics.outputs.jsonl import read_jsonl
from dreamfleet.plotting import (
    Group,
    Panel,
    PlottedRun,
    Scores,
    action_repeat,
    bin_width,
    combine,
    draw,
    final_score,
    published_curve,
    read_evaluations,
    read_scores,
)
from dreamfleet.statistics import aggregate, mean_interval, probability_of_improvement

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
    known = account(logdir) if (logdir / "ckpt").is_dir() else {}  # else it begins again
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
        ["git", "rev-parse", "HEAD"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout[:7] or "unknown"


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
    """`results/` and its part of the front page anew, from the runs."""
    for entry in SUITE:
        for seed in entry.seeds:
            keep(root / entry.name(seed), RUNS / entry.name(seed))
    for group, entries in grouped():
        if shown := panels(group, entries):
            draw(shown, HERE / f"{group}.png")
    (HERE / "README.md").write_text(page())
    front = HERE.parent / "README.md"
    front.write_text(with_summary(front.read_text()))


def keep(logdir: Path, target: Path) -> None:
    """What is needed to check a result, without logs, checkpoints and replay. A run that had to be
    begun again is kept as it was, beside the new one."""
    if begun(logdir) and begun(target) not in ("", begun(logdir)):
        target.rename(target.with_name(f"{target.name}.lost{len(lost(target))}"))
    for name in ("config.json", "scores.jsonl", "evaluations.jsonl", "suite.json"):
        if (logdir / name).is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(logdir / name, target / name)
    if (config := target / "config.json").is_file():  # where it was made says nothing
        settings = {**json.loads(config.read_text()), "logdir": f"runs/{target.name}"}
        config.write_text(json.dumps(settings, indent=1) + "\n")


def begun(logdir: Path) -> str:
    """The first episode of a run, by which a run is told from another of the same name."""
    path = logdir / "scores.jsonl"
    return path.read_text().partition("\n")[0] if path.is_file() else ""


def lost(logdir: Path) -> list[Path]:
    """Runs of this name whose checkpoints were lost, so that they were begun again."""
    return sorted(logdir.parent.glob(f"{logdir.name}.lost*"))


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


def finals(entry: Entry) -> list[float]:
    """The means of the evaluations that ended the finished runs of an entry."""
    done = [each for each in kept(entry) if account(each).get("finished")]
    return [float(read_evaluations(each).score[-1]) for each in done]


def trained(logdir: Path) -> Scores | None:
    """The training episodes of a run; None before the first has ended."""
    with suppress(MetricsError):
        return read_scores(logdir)
    return None


def peers(group: str) -> Iterator[tuple[dict[str, Any], Scores]]:
    """What other programs scored, as `peers/` has it."""
    for path in sorted((HERE / "peers").glob("*/peer.json")):
        about = json.loads(path.read_text())
        if about["group"] == group:
            yield about, read_scores(path.parent)


def panels(group: str, entries: Sequence[Entry]) -> list[Panel]:
    """The curves of a group by task, with those of other programs."""
    made = []
    for task in dict.fromkeys(entry.task for entry in entries):
        mine = [entry for entry in entries if entry.task == task]
        config = read_config(kept(mine[0])[0])
        found = [
            (entry.label or OURS, read_config(each), scores)
            for entry in mine
            for each in kept(entry)
            # What has hardly begun shows nothing, and is only listed.
            if (scores := trained(each)) and scores.at[-1] >= entry.steps / 10
        ]
        found += [
            (about["program"], replace(config, seed=about["seed"]), scores)
            for about, scores in peers(group)
            if about["task"] == task
        ]
        lines: dict[str, list[PlottedRun]] = {}
        for label, settings, scores in found:
            frames = Scores(scores.at * action_repeat(config), scores.score)
            lines.setdefault(label, []).append(PlottedRun(settings, frames))
        if lines:
            longest = max(float(run.scores.at[-1]) for runs in lines.values() for run in runs)
            # Episodes of dm_control are long, and those of several environments end together.
            width = bin_width(longest, 15 if task.startswith("dmc:") else 50)
            curves = [
                Group(label, runs, combine([run.scores for run in runs], width))
                for label, runs in lines.items()
            ]
            published = published_curve(task, config.env_options)
            made.append(Panel(task, curves, published, mine[0].goal))
    return made


def page() -> str:
    """README.md, from the files beside it."""
    text = [HEAD.format(**facts())]
    for group, entries in grouped():
        text += [f"## {group}\n", ABOUT[group], table(map(row, entries)), *compared(group, entries)]
        text += [part for entry in entries for part in missed(entry)]
        text += [f"![Curves of {group}]({group}.png)\n"]
    started = [each for _, entries in grouped() for entry in entries for each in kept(entry)]
    every = [each for run in started for each in (*lost(run), run)]
    return "\n".join([*text, ALL, table(map(listed, every))])


def with_summary(text: str) -> str:
    """The front page, with what the runs came to between its two marks."""
    before, rest = text.split(MARKS[0])
    done = [entry for _, entries in grouped() for entry in entries if finals(entry)]
    rows = [front_row(entry) for entry in done if entry.group in SUMMARY]
    made = FRONT.format(table=table(rows), **facts())
    return f"{before}{MARKS[0]}\n{made}{MARKS[1]}{rest.split(MARKS[1])[1]}"


def front_row(entry: Entry) -> dict[str, str]:
    """The columns that a newcomer reads."""
    made = row(entry)
    return {
        **{name: made[name] for name in ("task", "steps")},
        "runs": str(len(finals(entry))),
        "score": made["score"],
        "goal, or published": made["goal"] or made["published"],
        "CPU minutes": made["CPU minutes"],
    }


def facts() -> dict[str, str]:
    """When, where and from which version the runs were made, and the most that was tried."""
    runs = sorted(RUNS.iterdir())
    accounts = [found for each in runs if "version" in (found := account(each))]
    times = [line["time"] for each in runs for line in read_jsonl(each / "scores.jsonl")]
    days = dict.fromkeys(f"{datetime.fromtimestamp(t, UTC):%-d %B %Y}" for t in minmax(times))
    return {
        "days": " to ".join(days),
        "versions": ", ".join(sorted({each["version"][:7] for each in accounts})),
        "machines": "; ".join(sorted({each["machine"] for each in accounts})),
        "count": str(len(runs)),
        "open": str(len(runs) - sum(each["finished"] for each in accounts)),
        "longest": f"{max(entry.steps for _, group in grouped() for entry in group):,}",
        "minutes": f"{max(each['cpu_minutes'] for each in accounts):.0f}",
        "missing": ", ".join(sorted({each.group for each in SUITE} - {*dict(grouped())})) or "none",
    }


def minmax(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


OURS = "Dreamfleet"
SUMMARY = ("cartpole", "minutes", "proprio")
MARKS = ("<!-- made by results/suite.py -->", "<!-- end of what results/suite.py made -->")
HEAD = """# Results

`python results/suite.py` made the runs, and this page from their files. All {count} runs are of
commit {versions}, made on {days} ({machines}, no GPU).
Every run that was started is [listed](#all-runs), also those that failed and the {open} that are
not finished. `runs/` holds the settings, command, version, machine and scores of each. Settings
were tuned on seeds 100 and up; only CartPole's go back to versions that were tuned on its seeds.

- **score**: the mean over finished runs of the evaluation at the end (20 episodes each), with the
  95 % interval over seeds (Student's t). One seed has no interval, and proves little.
- **published**: the mean ± deviation of DreamerV3's five published seeds at as many frames; they
  have 12 times the parameters of `dmc_cpu` and twice its replay ratio.
- **CPU minutes** are those of all processes of a run. **Wall minutes** depend on what else the two
  cores did: runs had idle priority beside other work.
- In pictures a line is the mean of training episodes over seeds, with the range from the lowest to
  the highest seed. Dots are episodes of a single seed.

**Not tried**: a GPU or TPU, runs of more than {longest} steps or {minutes} CPU minutes, and models
of more than a million parameters. Groups without any run so far: {missing}.
"""
ABOUT = {
    "cartpole": "`make train`, with ten seeds.\n",
    "minutes": "`default` for vectors and `pixels` for images, with no flag but the steps.\n",
    "proprio": "dm_control from states, action repeat 2.\n",
    "pixels": "Images, with reconstruction and with `representation=barlow` without a decoder.\n",
    "reference": "danijar/dreamerv3 and Dreamfleet with equal settings, on a core each.\n",
    "ablation": "One setting changed at a time; `dmc_cpu` has `imag_last=8` and ratio 256.\n",
}
COMPARED = """Training episodes in the last tenth of each run, as published scores are of training.
The interquartile mean (IQM) is of scores / 1000. Intervals (95 %, stratified bootstrap) are shown
where each task has several seeds.
"""
MISSED = """**`{task}` misses its goal of {goal:g}.** {reached} of {episodes} training episodes
reached it, {positive} scored above 0. In the second half {longest} of {late} episodes lasted
{length:,} steps, the longest there. {why}
"""
ALL = """## All runs

An open run is under way or waits to be resumed. The checkpoint of a lost run was lost with its
machine; it was begun again, and its minutes are in those of the run below it.
"""
FRONT = """
{table}
A score is the mean of 20 evaluation episodes after training, over seeds with its 95 % interval.
Published is DreamerV3's mean ± deviation at as many frames. Commit {versions}, {days}; {machines}.
[results/](results/README.md) lists every run, also failed and unfinished ones, and what was tried
where a goal is missed; `make results` repeats them. Not tried: GPUs, more than {longest} steps.

![dm_control from states, with the published curves](results/proprio.png)

"""


def table(rows: Iterable[dict[str, str]]) -> str:
    """Rows as Markdown, without columns that are empty everywhere."""
    lines = list(rows)
    names = [name for name in lines[0] if any(line[name] for line in lines)]
    cells = [names, ["---"] * len(names), *([line[name] for name in names] for line in lines)]
    return "".join(f"| {' | '.join(each)} |\n" for each in cells)


def row(entry: Entry) -> dict[str, str]:
    """What all runs of an entry came to."""
    runs, scores = kept(entry), finals(entry)
    config = read_config(runs[0])
    curve = published_curve(entry.task, config.env_options)
    theirs = curve.at(entry.steps * action_repeat(config)) if curve else None
    reached = sum(score >= entry.goal for score in scores) if entry.goal is not None else 0
    known = [account(each) for each in runs]
    spent = [each for each in known if each.get("finished")] or known
    side = ("above" if np.mean(scores) > theirs[0] else "below") if theirs and scores else ""
    waiting = len(runs) - len(scores)
    return {
        "task": f"`{entry.task}`",
        "settings": " ".join((entry.preset, *entry.flags)),
        "steps": f"{entry.steps:,}",
        "runs": f"{len(runs)}{f' ({waiting} unfinished)' if waiting else ''}",
        "score": str(mean_interval(scores)) if scores else "",
        "each": ", ".join(f"{score:.4g}" for score in scores) if len(scores) > 1 else "",
        "goal": "" if entry.goal is None else f"{entry.goal:g}",
        "reached": f"{reached} of {len(scores)}" if entry.goal is not None and scores else "",
        "published": "{:.0f} ± {:.0f}".format(*theirs) if theirs else "",
        "ours is": side,
        "CPU minutes": span(each.get("cpu_minutes") for each in spent),
        "wall minutes": span(each.get("minutes") for each in spent),
    }


def span(minutes: Iterable[float | None]) -> str:
    known = [each for each in minutes if each is not None]
    return " to ".join(dict.fromkeys(f"{each:.0f}" for each in minmax(known))) if known else ""


def listed(logdir: Path) -> dict[str, str]:
    """A run, however far it came."""
    known, scores = account(logdir), trained(logdir)
    state = "lost" if ".lost" in logdir.name else "finished" if known.get("finished") else "open"
    if known.get("exit") not in (None, 0, 130):  # 130: it was asked to stop, to go on later
        state = f"failed ({known['exit']})"
    return {
        "run": f"`{logdir.name}`",
        "state": state,
        "steps": f"{scores.at[-1]:,.0f}" if scores else "0",
        "evaluation": f"{read_evaluations(logdir).score[-1]:.4g}" if state == "finished" else "",
        "last tenth of training": f"{final_score(scores):.4g}" if scores else "",
        "CPU minutes": span([known.get("cpu_minutes")]),
        "wall minutes": span([known.get("minutes")]),
        "sittings": str(known.get("sittings", "")),
    }


def compared(group: str, entries: Sequence[Entry]) -> Iterator[str]:
    """Ours against each other setting and program, on the tasks that both have."""
    methods: dict[str, dict[str, list[float]]] = {}
    for entry in entries:
        done = [each for each in kept(entry) if account(each).get("finished")]
        if done:
            scores = [final_score(read_scores(each)) for each in done]
            methods.setdefault(entry.label or OURS, {})[entry.task] = scores
    minutes: dict[str, list[float]] = {}
    for about, scores in peers(group):
        method = methods.setdefault(about["program"], {})
        method.setdefault(about["task"], []).append(final_score(scores))
        minutes.setdefault(about["program"], []).append(about["cpu_minutes"])
    if group == "proprio":
        methods["published"] = json.loads((HERE / "peers" / "published.json").read_text())["scores"]
    first, *others = methods.items()
    if not others:
        return
    rows = []
    for label, theirs in others:
        tasks = [task for task in first[1] if task in theirs]
        if not tasks:
            continue
        ours, theirs = ({task: each[task] for task in tasks} for each in (first[1], theirs))
        several = min(len(x) for each in (ours, theirs) for x in each.values()) > 1
        chance = probability_of_improvement(ours, theirs)
        rows.append(
            {
                "compared with": label,
                "tasks": str(len(tasks)),
                "runs": f"{sum(map(len, ours.values()))}, {sum(map(len, theirs.values()))}",
                f"IQM of {first[0]}": scaled(ours, several),
                "IQM of the other": scaled(theirs, several),
                f"P({first[0]} scores higher)": str(chance) if several else f"{chance.value:.2g}",
                "its CPU minutes": span(minutes.get(label, [])),
            }
        )
    if rows:
        yield COMPARED
        yield table(rows)


def scaled(scores: Mapping[str, Sequence[float]], several: bool) -> str:
    """The interquartile mean of scores of dm_control, which are at most 1000."""
    if not all(task.startswith("dmc:") for task in scores):
        return ""
    found = aggregate({task: [x / 1000 for x in runs] for task, runs in scores.items()})
    return str(found) if several else f"{found.value:.3g}"


def missed(entry: Entry) -> Iterator[str]:
    """Where a finished run misses its goal: what its episodes show, and what was tried."""
    if entry.goal is None or min(finals(entry), default=entry.goal) >= entry.goal:
        return
    rows = [line for each in kept(entry) for line in read_jsonl(each / "scores.jsonl")]
    late = [line["episode/length"] for line in rows if line["step"] > entry.steps / 2]
    known = json.loads((HERE / "tuning.json").read_text()).get(entry.task, {"why": "", "tried": []})
    yield MISSED.format(
        task=entry.task,
        goal=entry.goal,
        reached=sum(line["episode/score"] >= entry.goal for line in rows),
        positive=sum(line["episode/score"] > 0 for line in rows),
        episodes=len(rows),
        longest=late.count(max(late)),
        late=len(late),
        length=max(late),
        why=known["why"],
    )
    if known["tried"]:
        yield table(known["tried"])


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
