"""Benchmarks run; what they measure is for a quiet machine."""

import json
import math
from pathlib import Path

import pytest

from dreamfleet.benchmarks import agent, replay
from dreamfleet.cli import main


@pytest.mark.parametrize("name", ["envs", "metrics", "checkpoint", "network"])
def test_a_quick_run_writes_its_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert main(["bench", name, "--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert len(rows) >= 2
    for row in rows:
        assert row.keys() == {"name", "value", "unit", "peer", "peer_value", "ratio", "note"}
        assert math.isfinite(row["value"])
        assert row["value"] > 0 or "not measured" in row["note"]


def test_nothing_is_compared_with_what_was_not_measured_in_the_same_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {"policy": [1.0] * 3, "while_training": [(1.0, 2.0)] * 3}
    figures |= dict.fromkeys(("train", "compile", "memory"), 1.0)
    monkeypatch.setattr(agent, "in_process", lambda *_: figures)
    rows = agent.run(quick=True) + replay._speed("vector", "memory", quick=True)
    assert {(row.peer, row.peer_value, row.ratio) for row in rows} == {(None, None, None)}
