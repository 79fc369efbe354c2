"""Benchmarks run; what they measure is for a quiet machine."""

import json
import math
from pathlib import Path

import pytest

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
