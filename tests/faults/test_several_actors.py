"""A fleet with two actors, of which one and then the agent are killed in the middle of a run.

As in the tests of other kills, environments tell in every observation who they are, their episode
and their step, and actions follow from the step.
"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

from fleet_parts import (
    CountingAgent,
    Paced,
    check_counts,
    check_order,
    left_behind,
    parts,
    processes_by_title,
    rows,
    small_run,
    stored_streams,
)

from dreamfleet.parallel import combined


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


def test_an_actor_and_then_the_agent_are_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    common = {"actors": 2, "on_failure": "restart", "log_every": 0.2, "train_ratio": 0.2}
    # What an episode scores, once that is allowed, is the end of the first run.
    config = small_run(tmp_path, steps=0, target_score=2.0, save_every=0.2, **common)
    fleet = parts(config, make_agent=CountingAgent, make_env_train=partial(Paced, tmp_path))
    killer = Killer(tmp_path, "actor-1", "agent")
    combined(**fleet, args=config, say=killer)
    assert killer.restarts == ["actor-1", "agent"], "\n".join(killer.lines)
    assert left_behind() == []
    found = stored_streams(tmp_path / "replay")
    total = check_counts(tmp_path, found).step
    assert sorted(found) == [0, 1, 2, 3]
    for stream in found.values():
        # Each environment lost the actor that it calls once. The environments of the actor that
        # was not killed with the agent waited for the learner, and went on.
        check_order(stream, cuts=1)
    assert found[1]["updates"].max() > 0

    more = small_run(tmp_path, steps=total + 300, save_every=0, **common)
    fleet = parts(more, make_agent=CountingAgent, make_env_train=partial(Paced, tmp_path))
    combined(**fleet, args=more)
    assert check_counts(tmp_path, stored_streams(tmp_path / "replay")).step >= more.steps
    assert left_behind() == []
