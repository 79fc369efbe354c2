"""`make chaos`, as short as it gets: every promise holds while a fleet is disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_every_promise_holds_under_faults(tmp_path: Path) -> None:
    # This seed kills two processes at once and another one, cuts connections, loses the replies of
    # the replay, fills the disk and sends hostile requests.
    options = {"--minutes": 10, "--faults": 6, "--rest": 0.1, "--seed": 79872, "--agent": "random"}
    words = [str(word) for pair in options.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "chaos", *words, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"] == []
    assert report["kinds"] == {"kill": 2, "cut": 1, "lose": 1, "fill": 1, "attack": 1}
    assert report["hostile_requests"] > 20
    assert {"agent", "network", "disk"} <= report["recovery_seconds"].keys()
    findings, steps = report["accounts"]["findings"], report["accounts"]["steps"]
    assert findings["rows"] > 100
    assert set(steps.values()) == {findings["rows"]}
    assert "Every promise has held." in (tmp_path / "report.txt").read_text()
    assert not (tmp_path / "run").exists()
    # Without the right to trace processes nothing can be cut; else it is what users talk over.
    refused = [each for each in report["events"] if "cannot be cut here" in each["detail"]]
    assert refused or report["connections_cut"]["SOCK_SEQPACKET"] > 0
