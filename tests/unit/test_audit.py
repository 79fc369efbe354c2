"""The audit finds what was lost, doubled, spliced or damaged, and nothing where nothing was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.audit import Findings, audit, audit_steps
from chaos.env import TASK

from dreamfleet.envs import make_env
from dreamfleet.replay import Replay

LENGTH = 5


def play(seed: int, episodes: int, cut: int = -1) -> list[dict[str, Any]]:
    """The steps of one life as they are stored; one episode ends after two steps."""
    env = make_env(TASK, seed=seed, length=LENGTH)
    rows: list[dict[str, Any]] = []
    for episode in range(episodes):
        obs = env.step({"action": np.int32(0), "reset": np.array(True)})
        for step in range(LENGTH + 1):
            action = {"action": np.int32((seed + step) % 5)}
            rows.append({**obs, **action})
            if obs["is_last"] or (episode == cut and step == 2):
                rows[-1]["is_last"] = np.array(True)
                break
            obs = env.step({**action, "reset": np.array(False)})
    return rows


def found(*lives: list[dict[str, Any]]) -> Findings:
    rows = [row for life in lives for row in life]
    keys = ("record", "is_first", "is_last", "action")
    steps = {key: np.stack([row[key] for row in rows]) for key in keys}
    chain = [int(row["record"][0]) for row in rows]
    return audit_steps({**steps, "chain": np.array(chain)})


def test_what_was_made_is_in_order() -> None:
    findings = found(play(0, 4, cut=1), play(0, 2), play(1, 3))
    assert findings.faults == {}
    assert (findings.environments, findings.lives, findings.cut_short) == (2, 3, 1)
    assert findings.rows == 3 * 6 + 3 + 2 * 6 + 3 * 6


def remove(*which: int) -> Callable[[list[Any]], list[Any]]:
    return lambda rows: [row for n, row in enumerate(rows) if n not in which]


def changed(which: int, **change: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda rows: [{**row, **change} if n == which else row for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (remove(8), {"lost": 1, "spliced": 1}),
        (remove(10, 11), {"lost_ends": 1}),  # the last row has no answer
        (remove(*range(6, 12)), {"lost_ends": LENGTH}),
        (lambda rows: rows[:9] + rows[8:], {"doubled": 1, "spliced": 1}),
        (lambda rows: [*rows[:8], rows[9], rows[8], *rows[10:]], {"spliced": 3}),
        (lambda rows: rows[:8] + play(7, 1)[2:4] + rows[8:], {"lost": 2, "spliced": 2}),
        (changed(8, action=np.int32(4)), {"wrong_actions": 1}),
        (changed(8, is_first=np.array(True)), {"spliced": 2}),
        (changed(8, record=np.ones(7, np.float32)), {"damaged": 1}),
    ],
)
def test_faults_are_found(change: Callable[[list[Any]], list[Any]], faults: dict[str, int]) -> None:
    rows = change(play(0, 3))
    for row in rows:  # all in one chain
        row["record"] = row["record"].copy()
    keys = ("record", "is_first", "is_last", "action")
    steps = {key: np.stack([row[key] for row in rows]) for key in keys}
    findings = audit_steps({**steps, "chain": np.zeros(len(rows), np.int64)}).faults
    assert findings.items() >= faults.items()
    assert set(findings) == set(faults) or "damaged" in faults


def test_a_replays_directory_is_read(tmp_path: Path) -> None:
    for shard in range(2):
        with Replay(3, 1000, tmp_path / str(shard), chunk=8) as replay:
            lives = [play(2 * shard + env, 4) for env in range(2)]
            for pair in zip(*lives, strict=True):
                rows = {key: np.stack([row[key] for row in pair]) for key in pair[0]}
                replay.add_batch(rows, [2 * shard, 2 * shard + 1])
    findings = audit([tmp_path / "0", tmp_path / "1"])
    assert findings.faults == {}
    assert (findings.rows, findings.environments) == (4 * 4 * 6, 4)
