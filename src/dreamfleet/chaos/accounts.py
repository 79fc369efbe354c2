"""What a run has left behind when it is over: every stored step, and whether all counts agree."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dreamfleet.audit import Findings, audit
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.metrics import read_jsonl
from dreamfleet.roles.replay import limiter_for

_RATIO = 0.02  # of the samples that were due, by which they may be off


@dataclass(frozen=True)
class Accounts:
    """The counts of a run that has ended."""

    findings: Findings
    """Of the training steps."""
    evaluation: Findings | None
    """Of the evaluation steps, if there are any."""
    steps: dict[str, int]
    """The run's step as each of those says who count it."""
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
        """What is not as it should be, a sentence each.

        Args:
            unacknowledged: Steps that killed agents may have taken along: the replay had not
                acknowledged them.
        """
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


def settle(config: RunConfig, restarts: int) -> Accounts:
    """Read the accounts of a run that has ended.

    Args:
        config: The run.
        restarts: How often its replay was started again.
    """
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
    # What the limiter tolerates, and what a restart forgives: a batch that was let through whole.
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
    """Files that nobody needs any more: temporary ones, half-written ones, addresses."""
    inside = [path for path in logdir.rglob("*") if path.name.startswith(".")]
    inside += [path for path in logdir.glob("addresses/*") if path not in inside]
    outside = [path.name for path in temporary.iterdir() if path.name != "ray"]  # Ray's own logs
    return sorted(str(path.relative_to(logdir)) for path in inside) + sorted(outside)
