"""The fleet's benchmark runs; what it measures is for a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_quick_run_measures_the_fleet_and_its_peer(tmp_path: Path) -> None:
    """In a process of its own: the peer forks, which one with JAX's threads must not."""
    path = tmp_path / "rows.json"
    command = [str(Path(sys.executable).with_name("dreamfleet")), "bench", "fleet", "--quick"]
    done = subprocess.run(
        [*command, "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    fleet = json.loads(path.read_text())[0]
    assert fleet["value"] > 0
    assert fleet["ratio"] == fleet["value"] / fleet["peer_value"]
