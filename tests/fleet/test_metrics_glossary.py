"""The glossary knows every number that a real run logs, and nothing that none does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from documents import glossary
from fleet_parts import logged, rows

# What a run of a small task has no occasion for, and what is no number.
ELSEWHERE = (
    "episode/log", "eval/log", "gradient_norm", "openloop", "/save",
    "learner/memory", "learner/start", "episode/video",
    "loss/mask", "empty_masks", "eval/step", "eval/episodes", "eval/cut_short", "eval/failed",
    "actor-", "machines/", "replay-",
)  # fmt: skip
EPISODES = 50
"""What is not logged within so many episodes of training and of evaluation is never logged."""


def unexplained(keys: set[str]) -> list[str]:
    patterns = glossary()
    return [key for key in sorted(keys) if not any(re.fullmatch(p, key) for p in patterns)]


def never_logged(keys: set[str]) -> list[str]:
    return [
        pattern
        for pattern in glossary()
        if not any(re.fullmatch(pattern, key) for key in keys)
        and not any(re.escape(word) in pattern for word in ELSEWHERE)
    ]


def finished(logdir: Path) -> float:
    """Episodes that have ended: of training or of evaluation, whichever are fewer."""
    counts = {"episodes/finished": 0.0, "eval_episodes/finished": 0.0}
    for row in rows(logdir / "metrics.jsonl"):
        counts |= {key: row[key] for key in counts if key in row}
    return min(counts.values())


def test_the_glossary_knows_what_a_run_logs(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("dreamfleet")), "train", "--preset", "debug"]
    command += ["--logdir", str(tmp_path), "--steps", "0", "--train-ratio", "8", "--log-every"]
    command += ["0.2", "--eval-envs", "1", "--report-every", "0.05"]
    command += ["--dreamer.execution.cache-dir", os.environ["DREAMFLEET_TESTS_CACHE"]]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    said = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if not never_logged(logged(tmp_path)) or finished(tmp_path) >= EPISODES:
                break
        process.send_signal(signal.SIGINT)
        said.append(process.communicate()[0])
        assert process.returncode == 130, "".join(said)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    keys = logged(tmp_path)
    assert unexplained(keys) == [], "explain these in docs/metrics.md"
    assert never_logged(keys) == [], "these are explained in docs/metrics.md, and never logged"
