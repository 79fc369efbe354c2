"""The fleet's benchmark runs; what it measures is for a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_quick_run_measures_the_fleet_and_its_peers_in_both_layouts(tmp_path: Path) -> None:
    """In a process of its own: the peer forks, which one with JAX's threads must not."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", "fleet", "--quick"]
    done = subprocess.run(
        [*command, "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in json.loads(path.read_text()) if row["unit"] == "steps/s"]
    assert [(row["name"], row["peer"]) for row in rows] == [
        ("2 environments in one process", "AsyncVectorEnv, one process"),
        ("2 environments in one process", "SyncVectorEnv, one process"),
        ("2 environments, a process each", "AsyncVectorEnv, 2 processes"),
        ("2 environments, a process each", "SyncVectorEnv, one process"),
    ]
    for row in rows:
        assert row["value"] > 0
        assert row["ratio"] == row["value"] / row["peer_value"]
