"""The glossary knows every number that a real run logs, and nothing that none does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import glossary

# What this short run of a small task has no occasion for, and what is no number.
ELSEWHERE = (
    "episode/log", "eval/log", "gradient_norm", "openloop", "/save", "/report", "eval_episodes",
    "learner/env_steps_per_second", "learner/replay_ratio", "learner/state", "learner/start",
    "actor/policy/", "actor/server", "actor/logger_client",
    "episode/video",
)  # fmt: skip


@pytest.mark.timeout(300)  # compiles the agent
def test_the_glossary_knows_what_a_run_logs(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("dreamfleet")), "train", "--preset", "debug"]
    command += ["--logdir", str(tmp_path), "--steps", "200", "--train-ratio", "8", "--log-every"]
    command += ["0.2", "--eval-envs", "1", "--eval-episodes", "0", "--report-every", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    logged = {key for line in lines for key in json.loads(line)}
    assert {"train/loss/policy", "report/loss", "episode/score", "replay/items"} <= logged
    patterns = glossary()
    unknown = [key for key in sorted(logged) if not any(re.fullmatch(p, key) for p in patterns)]
    assert unknown == [], "explain these in docs/metrics.md"
    idle = [
        pattern
        for pattern in patterns
        if not any(re.fullmatch(pattern, key) for key in logged)
        and not any(re.escape(word) in pattern for word in ELSEWHERE)
    ]
    assert idle == [], "these are explained in docs/metrics.md, and nobody logs them"
