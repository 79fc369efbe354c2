"""Audit of a run that is over: every stored step, and whether all counts agree.

The environments are `chaos.env:Audit`, whose observations say where they come from. So the replay's
files tell which steps are missing, stored twice, stored behind others that they do not follow, or
with an action that was not the one taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chaos.env import Audit
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.metrics import read_jsonl
from dreamfleet.replay import Replay
from dreamfleet.roles.progress import limiter_for


@dataclass(frozen=True)
class Findings:
    """What an audit has found, in steps."""

    rows: int = 0
    environments: int = 0
    lives: int = 0
    """Instances of environments."""
    cut_short: int = 0
    """Episodes that are shorter than the longest, and after which there is another one."""
    finished: int = 0
    """Episodes that are as long as the longest."""
    damaged: int = 0
    """Steps whose checksum does not fit."""
    doubled: int = 0
    lost: int = 0
    """Steps that are missing between others of their episode."""
    lost_ends: int = 0
    """Steps at the end of an episode that were answered and are not stored. A killed agent loses
    those that the replay had not acknowledged."""
    spliced: int = 0
    """Steps that are stored behind one that they do not follow."""
    wrong_actions: int = 0
    """Steps that are stored with another action than the environment took."""

    @property
    def faults(self) -> dict[str, int]:
        """What must not be, if there is any."""
        names = ("damaged", "doubled", "lost", "lost_ends", "spliced", "wrong_actions")
        return {name: count for name in names if (count := getattr(self, name))}


def audit(directories: Iterable[Path]) -> Findings:
    """Audit all steps of a run.

    Args:
        directories: Of its replay, such as `run/replay`; several if it has shards. They are not in
            use, and no step was evicted.
    """
    parts = [_read(directory) for directory in directories]
    chains, offset = [], 0
    for part in parts:
        chains.append(part["chain"] + offset)
        offset += int(part["chain"].max(initial=-1)) + 1
    steps = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return audit_steps({**steps, "chain": np.concatenate(chains)})


def _read(directory: Path) -> dict[str, NDArray[Any]]:
    """All steps of a replay in the order in which it acknowledged them, and the chain of each."""
    with Replay(1, 1 << 23, directory) as replay:
        table = replay._table
        if table is None:
            empty = {"record": np.zeros((0, len(Audit.FIELDS)), np.float32)}
            flags = {key: np.zeros(0, np.int64) for key in ("is_first", "is_last", "action")}
            return {**empty, **flags, "chain": np.zeros(0, np.int64)}
        numbers = np.arange(table.low, table.high)
        slots, indices = table.starts(numbers)
        pieces = table.store.pieces(slots, indices, 1)
        stored = table.store.gather(pieces, len(numbers), 1)
        steps = {
            key: np.array(stored[key])[:, 0] for key in ("record", "is_first", "is_last", "action")
        }
        chains = np.zeros(table.store.slots, np.int64)
        for chain, head in enumerate(table.head_slot.tolist()):
            chains[list(table.store.preceding(head))] = chain
        return {**steps, "chain": chains[slots]}


def audit_steps(steps: dict[str, NDArray[Any]]) -> Findings:
    """Audit steps in the order in which they were stored.

    Args:
        steps: `record`, `is_first`, `is_last`, `action`, and the `chain` of each: steps of a chain
            are stored one behind the other.
    """
    record = steps["record"].astype(np.int64)
    order = np.argsort(steps["chain"], kind="stable")
    record, chain = record[order], steps["chain"][order]
    first, action = (steps[key][order] for key in ("is_first", "action"))
    environment, life, episode, step, taken, before, _ = record.T
    damaged = sum(Audit.checksum(row[:-1]) != row[-1] for row in record.tolist())

    follows = chain[1:] == chain[:-1]  # the row before it in the same chain
    own = (environment[1:] == environment[:-1]) & follows
    same = (life[1:] == life[:-1]) & (episode[1:] == episode[:-1]) & own
    goes_on = same & (step[1:] == step[:-1] + 1) & ~first[1:].astype(bool)
    # The ids of a machine that has left may be another's, which begins an episode.
    begins = follows & (step[1:] == 0) & first[1:].astype(bool)
    spliced = np.sum(follows & ~(goes_on | begins))
    spliced += np.sum(first.astype(bool) != (step == 0))

    # What is stored of each episode, and how long it was as the next one tells.
    keys = np.stack([environment, life, episode], 1)
    episodes, where = np.unique(keys, axis=0, return_inverse=True)
    where = where.reshape(-1)
    rows = np.unique(np.stack([where, step], 1), axis=0)
    length = np.zeros(len(episodes), np.int64)
    np.maximum.at(length, where, step + 1)
    stored = {tuple(key): n for key, n in zip(episodes.tolist(), length.tolist(), strict=True)}
    answered = {
        (env, own_life, number - 1): count
        for (env, own_life, number), count in zip(keys.tolist(), before.tolist(), strict=True)
        if number > 0
    }
    return Findings(
        rows=len(record),
        environments=len(np.unique(environment)),
        lives=len(np.unique(keys[:, :2], axis=0)),
        cut_short=sum(count < max(answered.values()) for count in answered.values()),
        finished=int(np.sum(length == length.max(initial=0))),
        damaged=damaged,
        doubled=len(record) - len(rows),
        lost=int(length.sum()) - len(rows),
        lost_ends=sum(max(0, count - stored.get(key, 0)) for key, count in answered.items()),
        spliced=int(spliced),
        wrong_actions=int(np.sum(goes_on & (taken[1:] != action[:-1]))),
    )


_RATIO = 0.02  # of the samples that were due, by which they may be off


@dataclass(frozen=True)
class Accounts:
    """The counts of a run that has ended."""

    findings: Findings
    """Of the training steps."""
    evaluation: Findings | None
    """Of the evaluation steps, if there are any."""
    steps: dict[str, int]
    """The run's step as each role counted it."""
    went_back: int
    """Entries of the logger with a smaller step than one before."""
    samples: int
    """Sequences that were handed out for training."""
    due: float
    """Sequences that `train_ratio` asks for."""
    slack: float
    """By how much both may differ."""
    updates: int
    scores: int
    """Episodes that the logger has written."""

    def problems(self, unacknowledged: int) -> list[str]:
        """One sentence per broken promise. Killed agents may have lost this many steps."""
        found = dict(self.findings.faults)
        taken = found.pop("lost_ends", 0)
        problems = [f"{count} stored steps are {name}." for name, count in found.items()]
        if taken > unacknowledged:
            problems.append(
                f"{taken} answered steps are not stored; killed agents explain {unacknowledged}."
            )
        if self.evaluation and (bad := self.evaluation.faults.keys() - {"lost_ends"}):
            problems.append(f"Evaluation steps are {' and '.join(sorted(bad))}.")
        if len({self.findings.rows, *self.steps.values()}) > 1:
            said = ", ".join(f"{who} {count:,}" for who, count in self.steps.items())
            problems.append(f"{self.findings.rows:,} steps are stored, and counted are {said}.")
        if self.went_back:
            problems.append(f"The logger's steps went back {self.went_back} times.")
        if self.scores != self.findings.finished:
            problems.append(
                f"{self.findings.finished:,} episodes are stored from their first to their last "
                f"step, and {self.scores:,} scores were written."
            )
        if abs(self.samples - self.due) > self.slack:
            problems.append(
                f"{self.samples:,} sequences were handed out for training, and {self.due:,.0f} "
                f"were due, give or take {self.slack:,.0f}."
            )
        return problems


def accounts_of(config: RunConfig, restarts: int) -> Accounts:
    """The accounts of a run that has ended, whose replay was restarted this often."""
    found = audit(_directories(config, "replay"))
    evaluated = [path for path in _directories(config, "eval_replay") if path.exists()]
    snapshot = Checkpoint(config.logdir / "ckpt" / "agent").load()
    parts: dict[str, Any] = snapshot.parts if snapshot else {"replay": {}, "run": {}}
    position = {name: int(parts["replay"].get(name, 0)) for name in ("steps", "samples")}
    rows = read_jsonl(config.logdir / "metrics.jsonl")
    # A round of evaluation is logged at the step at which it began.
    logged = [int(row["step"]) for row in rows if "eval/step" not in row]
    scores = config.logdir / "scores.jsonl"
    limiter = limiter_for(config)
    due = max(0.0, limiter.ratio * (found.rows - limiter.minsize))
    # What the limiter tolerates, and a batch per restart.
    slack = (limiter.tolerance + 8) * max(limiter.ratio, 1) + limiter.tolerance
    return Accounts(
        findings=found,
        evaluation=audit(evaluated) if evaluated else None,
        steps={
            "by the agent's checkpoint": snapshot.step if snapshot else 0,
            "by the replay": position["steps"],
            "by the logger": logged[-1] if logged else 0,
        },
        went_back=sum(later < earlier for earlier, later in pairwise(logged)),
        samples=position["samples"],
        due=due,
        slack=slack + 2 * config.batch_size * (1 + restarts) + _RATIO * due,
        updates=int(parts["run"].get("updates", 0)),
        scores=sum(1 for _ in read_jsonl(scores)) if scores.exists() else 0,
    )


def _directories(config: RunConfig, name: str) -> list[Path]:
    shards = range(config.replay_shards)
    return [config.logdir / (f"{name}-{shard}" if shard else name) for shard in shards]


def left_files(logdir: Path, temporary: Path) -> list[str]:
    """Temporary files, half-written files and addresses that a run has left behind."""
    inside = [path for path in logdir.rglob("*") if path.name.startswith(".")]
    inside += [path for path in logdir.glob("addresses/*") if path not in inside]
    outside = [path.name for path in temporary.iterdir() if path.name != "ray"]  # Ray's own logs
    return sorted(str(path.relative_to(logdir)) for path in inside) + sorted(outside)
