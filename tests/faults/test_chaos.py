"""`dreamfleet chaos`, as short as it gets: every promise holds while a fleet is disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_every_promise_holds_under_faults(tmp_path: Path) -> None:
    # This seed kills two processes at once and another one, cuts connections, loses the reply to
    # steps that were stored, fills the disk and sends hostile requests.
    options = {"--minutes": 10, "--faults": 6, "--rest": 0.1, "--seed": 163917, "--agent": "random"}
    words = [str(word) for pair in options.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "dreamfleet.cli", "chaos", *words, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"] == []
    kinds = {"kill": 2, "cut": 1, "lose": 1, "fill": 1, "attack": 1}
    assert report["kinds"] == kinds
    assert report["calls_lost"] == {"replay add_batch reply": 1}
    assert report["calls"]["direct"] > report["calls"]["made"] / 2
    assert report["hostile_requests"] > 20
    assert {"agent", "replay", "env", "network", "disk"} <= report["recovery_seconds"].keys()
    assert report["rows"]["audited"] > 100
    assert set(report["counts"].values()) == {report["rows"]["audited"]}
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert "Every promise has held." in (tmp_path / "report.txt").read_text()
    assert not (tmp_path / "run").exists()
