"""A fleet with two actors, of which one and then the agent are killed in the middle of a run.

As in the tests of other kills, environments tell in every observation who they are, their episode
and their step, and actions follow from the step.
"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

from fleet_parts import (
    CountingAgent,
    Paced,
    left_behind,
    parts,
    processes_by_title,
    rows,
    small_run,
    stored_streams,
)

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.parallel import combined

LENGTH = 25


class Killer:
    """Takes the lines of a run, and acts on them while the supervisor waits for it: kills one
    process after the other when both actors act, and lets the run reach its target once parameters
    of updates have reached the actor of the other process."""

    def __init__(self, folder: Path, *titles: str) -> None:
        self._folder, self._titles = folder, list(titles)
        self._seen = 0
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if not line.startswith("step ") or not self._both_act():
            return
        if self._titles:
            if victim := processes_by_title().get(self._titles[0]):
                victim.send_signal(signal.SIGKILL)
                del self._titles[0]
                self._seen = len(rows(self._folder / "metrics.jsonl")) + 3
        elif max(versions(self._folder)) > 1:
            (self._folder / "go").touch()

    def _both_act(self) -> bool:
        """Whether both have answered environments since the last kill."""
        new = rows(self._folder / "metrics.jsonl")[self._seen :]
        rates = [f"{name}/steps_per_second" for name in ("actor", "actor-1")]
        return all(sum(row.get(rate, 0.0) > 0 for row in new) > 1 for rate in rates)

    @property
    def restarts(self) -> list[str]:
        return [line.split()[0] for line in self.lines if "is started again" in line]


def versions(logdir: Path) -> list[float]:
    """Of the parameters that the actor of the other process had, one after the other."""
    name = "actor-1/policy/version"
    return [row[name] for row in rows(logdir / "metrics.jsonl") if name in row]


def counted(logdir: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """What is stored, and the run's step, on which all roles agree."""
    found = stored_streams(logdir / "replay")
    total = sum(len(stream["action"]) for stream in found.values())
    snapshot = Checkpoint(logdir / "ckpt" / "agent").load()
    assert snapshot.step == snapshot.parts["replay"]["steps"] == total
    logged = [row["step"] for row in rows(logdir / "metrics.jsonl")]
    assert logged == sorted(logged)
    assert logged[-1] == total
    return found, total


def test_an_actor_and_then_the_agent_are_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    common = {"actors": 2, "on_failure": "restart", "log_every": 0.2, "train_ratio": 0.2}
    # What an episode scores, once that is allowed, is the end of the first run.
    config = small_run(tmp_path, steps=0, target_score=2.0, save_every=0.2, **common)
    fleet = parts(config, make_agent=CountingAgent, make_env_train=partial(Paced, tmp_path))
    killer = Killer(tmp_path, "actor-1", "agent")
    combined(**fleet, args=config, say=killer)
    assert killer.restarts == ["actor-1", "agent"], "\n".join(killer.lines)
    assert left_behind() == []
    found, total = counted(tmp_path)
    assert sorted(found) == [0, 1, 2, 3]
    for stream in found.values():
        episode, step = stream["vector"][:, 1].astype(int), stream["vector"][:, 2].astype(int)
        assert stream["is_first"].tolist() == (step == 0).tolist()
        assert stream["action"].tolist() == (step % 5).tolist()
        starts = [0, *(n for n in range(1, len(step)) if step[n] != step[n - 1] + 1)]
        assert all(step[n] == 0 for n in starts), "no episode begins in its middle"
        assert (episode[starts[1:]] > episode[[n - 1 for n in starts[1:]]]).all()
        # Each environment lost the actor that it calls once. The environments of the actor that
        # was not killed with the agent waited for the learner, and went on.
        assert sum(step[n - 1] != LENGTH for n in starts[1:]) <= 1
    assert found[1]["updates"].max() > 0

    more = small_run(tmp_path, steps=total + 300, save_every=0, **common)
    fleet = parts(more, make_agent=CountingAgent, make_env_train=partial(Paced, tmp_path))
    combined(**fleet, args=more)
    assert counted(tmp_path)[1] >= more.steps
    assert left_behind() == []
