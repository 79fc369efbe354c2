"""Several runs of one command: seeds, grids of values, and searches within ranges.

Every run is an ordinary `dreamfleet train` in a directory of its own, and says in its `sweep.json`
how it ended. The same sweep again goes on: complete runs are left alone, others are resumed. A
search asks Optuna, whose journal lies in the sweep's directory, so that machines that share the
directory share the search.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.table import Table

from dreamfleet.config import read_config
from dreamfleet.errors import ConfigError, DreamfleetError, MetricsError, import_extra
from dreamfleet.files import atomic_write, read_json
from dreamfleet.fleet.preflight import check_place
from dreamfleet.fleet.tied import tied
from dreamfleet.plotting import SWEEP_FILE, final_score, read_evaluations, read_scores
from dreamfleet.statistics import mean_interval

_RANGE = re.compile(r"(log|uniform|int)\(([^,()]+),([^,()]+)\)")
_POLL_SECONDS = 2.0
_PARTS = 20
"""Times at which a run may be pruned: parts of its steps."""
_WARMUP = 4
"""Parts, and trials, before which none is pruned."""


class SweepError(DreamfleetError):
    """Some runs of a sweep have failed."""


class Range(NamedTuple):
    """Values between two bounds, for a search."""

    how: str
    low: float
    high: float

    def distribution(self, optuna: Any) -> Any:
        if self.how == "int":
            return optuna.distributions.IntDistribution(int(self.low), int(self.high))
        log = self.how == "log"
        return optuna.distributions.FloatDistribution(self.low, self.high, log=log)


Values = Range | tuple[str, ...]


def read_values(path: str, value: Any) -> Values:
    """What a setting is varied over: `log(1e-5,1e-3)`, `uniform(0,1)`, `int(1,8)`, or values with
    commas between them. A single value is the same in every run.

    Raises:
        ConfigError: The bounds are no numbers in this order.
    """
    if not isinstance(value, str):
        return (json.dumps(value),)
    if found := _RANGE.fullmatch(value.replace(" ", "")):
        with suppress(ValueError):
            how, low, high = found[1], float(found[2]), float(found[3])
            whole = how != "int" or (low.is_integer() and high.is_integer())
            if low < high and whole and (how != "log" or low > 0):
                return Range(how, low, high)
        raise ConfigError(
            f"{path}={value} is not a range: write log(LOW,HIGH) with numbers above 0, "
            "uniform(LOW,HIGH), or int(LOW,HIGH) with whole numbers."
        )
    return tuple(value.split(",")) if "(" not in value and "[" not in value else (value,)


class Run(NamedTuple):
    """One run of a sweep: the name of its directory, and what is its own."""

    name: str
    setting: Mapping[str, str]
    seed: int


@dataclass
class Sweep:
    """What is run, and where."""

    folder: Path
    words: Sequence[str]
    """Options of `dreamfleet train` that all runs have."""
    values: Mapping[str, Values]
    seeds: Sequence[int]
    trials: int = 20
    """Settings that a search tries, in all sessions together."""
    parallel: int = 1
    """Runs at the same time."""
    say: Callable[[str], None] = print
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _failed: list[str] = field(default_factory=list)
    _without_score: int = 0
    """Trials of this session; a search whose trials all fail has to end."""

    def command(self, run: Run) -> list[str]:
        """The words after `dreamfleet`."""
        changes = [f"{path}={value}" for path, value in run.setting.items()]
        words = [*self.words, "--seed", str(run.seed), "--logdir", str(self.folder / run.name)]
        return ["train", *words, *(["--set", *changes] if changes else [])]

    def example(self) -> Run:
        """A run with the first value of everything."""
        first = {
            path: f"{each.low:g}" if isinstance(each, Range) else each[0]
            for path, each in self.values.items()
        }
        return Run("example", first, self.seeds[0])

    def start(self) -> None:
        """Run what is missing: every combination of values, or, if there is a range, a search.

        Raises:
            ConfigError: The directory holds another sweep.
            MissingExtraError: A search needs Optuna.
            SweepError: Runs have failed; all others are complete.
        """
        check_place(self.folder)
        if any(isinstance(each, Range) for each in self.values.values()):
            study = self._study()
            work: list[Callable[[], object]] = [partial(self._search, study)] * self.parallel
        else:
            grid = [[(path, str(value)) for value in each] for path, each in self.values.items()]
            work = [
                partial(self._one, Run(_name(setting, seed), dict(setting), seed))
                for setting in itertools.product(*grid)
                for seed in self.seeds
            ]
        plan = {"train": list(self.words), "values": {k: str(v) for k, v in self.values.items()}}
        path = self.folder / SWEEP_FILE
        if not path.exists():
            atomic_write(path, json.dumps(plan, indent=2) + "\n")
        elif json.loads(path.read_text()) != plan:
            raise ConfigError(
                f"{self.folder} holds a sweep with other settings: choose another --logdir. Only "
                "seeds, trials and parallel may change."
            )
        with ThreadPoolExecutor(self.parallel) as pool:
            futures = [pool.submit(each) for each in work]
            try:
                for future in futures:
                    future.result()
            finally:  # Ctrl-C: runs save and end, and the same command goes on later
                self._stop.set()
                for future in futures:
                    future.cancel()
        if self._failed:
            raise SweepError(
                f"{len(self._failed)} runs have failed: read {self.folder / self._failed[0]}.log, "
                "correct it, and start the same sweep again."
            )

    def _one(
        self, run: Run, watch: Callable[[float, float], bool] | None = None
    ) -> tuple[str, float | None]:
        """Train, unless that is done; returns how it ended (empty if the sweep was stopped before
        that), and the score.

        Args:
            run: The run.
            watch: Called with the share of its steps and the newest score; true to prune it.
        """
        logdir = self.folder / run.name
        done = result_of(logdir)
        if done and done["state"] in ("complete", "pruned"):
            return done["state"], done["score"]
        state = "" if self._stop.is_set() else self._train(run, watch)
        if self._stop.is_set() and state != "complete":
            return "", None
        score = _score_of(logdir)
        result = {"state": state, "score": score, "seed": run.seed, "setting": dict(run.setting)}
        atomic_write(logdir / SWEEP_FILE, json.dumps(result) + "\n")
        self.say(f"{run.name}: {state}" + ("" if score is None else f", score {score:.4g}"))
        if state == "failed":
            self._failed.append(run.name)
        return state, score

    def _train(self, run: Run, watch: Callable[[float, float], bool] | None) -> str:
        """Complete, pruned or failed."""
        logdir, pruned = self.folder / run.name, False
        with (self.folder / f"{run.name}.log").open("ab") as log:
            process = subprocess.Popen(
                tied(["dreamfleet.cli", *self.command(run)]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdin is not None
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_POLL_SECONDS)
                break
            with suppress(DreamfleetError, OSError):  # there is nothing to judge yet
                if watch and (steps := read_config(logdir).steps):
                    scores = read_scores(logdir)
                    share = float(scores.at[-1]) / steps
                    pruned = watch(share, float(scores.score[-10:].mean()))
            if pruned or self._stop.is_set():
                process.terminate()  # it saves
                code = process.wait()
                break
        process.stdin.close()
        return "complete" if code == 0 else "pruned" if pruned else "failed"

    # --- searches --------------------------------------------------------------------------------

    def _study(self) -> Any:
        storages: Any = import_extra("optuna.storages.journal", "Ranges of a sweep", "sweep")
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder.mkdir(parents=True, exist_ok=True)
        backend = storages.JournalFileBackend(str(self.folder / "optuna.journal"))
        return optuna.create_study(
            study_name="sweep",
            direction="maximize",
            load_if_exists=True,
            storage=optuna.storages.JournalStorage(backend),
            sampler=optuna.samplers.TPESampler(constant_liar=self.parallel > 1),
            pruner=optuna.pruners.MedianPruner(_WARMUP, _WARMUP),
        )

    def _search(self, study: Any) -> None:
        """Try settings until there are enough."""
        while not self._stop.is_set() and (trial := self._next(study)) is not None:
            self._try(study, trial)

    def _next(self, study: Any) -> Any:
        """A trial that a session of this machine has left behind, or a new one."""
        optuna, host = _optuna(), socket.gethostname()
        states = optuna.trial.TrialState
        with self._lock:
            known = study.get_trials(deepcopy=False)
            left = [
                each
                for each in known
                if each.state == states.RUNNING
                and each.user_attrs.get("host") == host
                and not psutil.pid_exists(each.user_attrs["pid"])
            ]
            if left:
                trial = optuna.trial.Trial(study, left[0]._trial_id)
            elif sum(e.state != states.FAIL for e in known) + self._without_score >= self.trials:
                return None
            else:
                choice = optuna.distributions.CategoricalDistribution
                trial = study.ask(
                    {
                        path: v.distribution(optuna) if isinstance(v, Range) else choice(v)
                        for path, v in self.values.items()
                    }
                )
            trial.set_user_attr("host", host)
            trial.set_user_attr("pid", os.getpid())
        return trial

    def _try(self, study: Any, trial: Any) -> None:
        """All seeds of a setting."""
        states = _optuna().trial.TrialState
        setting = {path: str(value) for path, value in trial.params.items()}
        reported = 0

        def watch(share: float, score: float) -> bool:
            nonlocal reported
            for part in range(reported, int(share * _PARTS) + 1):  # trials are compared by part
                trial.report(score, part)
                reported = part + 1
            return bool(trial.should_prune())

        scores: list[float] = []
        for seed in self.seeds:
            run = Run(f"trial-{trial.number:04d}_seed-{seed}", setting, seed)
            state, score = self._one(run, None if scores else watch)
            if score is None or state != "complete":
                if state:
                    with self._lock:
                        self._without_score += state != "pruned"
                    study.tell(trial, state=states.PRUNED if state == "pruned" else states.FAIL)
                return
            scores.append(score)
        study.tell(trial, sum(scores) / len(scores))


def _optuna() -> Any:
    return import_extra("optuna", "Ranges of a sweep", "sweep")


def _score_of(logdir: Path) -> float | None:
    """What a run has reached: its last evaluation, or the mean of its last episodes."""
    with suppress(MetricsError, OSError):
        return float(read_evaluations(logdir).score[-1])
    with suppress(MetricsError, OSError):
        return final_score(read_scores(logdir))
    return None


def result_of(logdir: Path) -> dict[str, Any] | None:
    """How a run of a sweep has ended; None if it has not."""
    return read_json(logdir / SWEEP_FILE, dict[str, Any])


def table(folder: Path) -> Table:
    """The settings of a sweep with their mean scores, the best one first."""
    groups: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for each in sorted(folder.iterdir()):
        if result := result_of(each):
            groups.setdefault(tuple(sorted(result["setting"].items())), []).append(result)
    rows = []
    for setting, found in groups.items():
        scores = [each["score"] for each in found if each["score"] is not None]
        mean = mean_interval(scores) if scores else None
        ended = ", ".join(sorted({each["state"] for each in found}))
        label = ", ".join(f"{path}={value}" for path, value in setting) or "as given"
        words = (label, str(len(found)), str(mean or ""), ended)
        rows.append((mean.value if mean else -math.inf, words))
    made = Table("setting", "runs", "mean score [95 %]", "ended", box=None)
    for _, words in sorted(rows, reverse=True):
        made.add_row(*words)
    return made


def _name(setting: Sequence[tuple[str, str]], seed: int) -> str:
    words = [f"{path.split('.')[-1]}={value}" for path, value in setting]
    name = re.sub(r"[^\w=.,+-]", "_", ",".join([*words, f"seed={seed}"]))
    if len(name) > 100 or len({path.split(".")[-1] for path, _ in setting}) < len(setting):
        name = f"{name[:80]}-{hashlib.sha256(repr((setting, seed)).encode()).hexdigest()[:12]}"
    return name
