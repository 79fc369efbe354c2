"""A serial run of Dreamer follows from its seed."""

import os
from dataclasses import replace
from pathlib import Path

from fleet_parts import rows, small_run
from serial_parts import differences, play


def test_dreamer_learns_the_same_again(tmp_path: Path) -> None:
    config = small_run(
        tmp_path / "one", launcher="serial", task="bundled:corridor", env_options={}, seed=5,
        steps=160, eval_envs=1, train_ratio=4.0, log_every=0.3, report_every=0.0,
    )  # fmt: skip
    config = config.changed(
        {
            "agent": "dreamer",
            "dreamer.model": "debug",
            "dreamer.loss.imag_length": 3,
            "dreamer.execution.cache_dir": os.environ["DREAMFLEET_TESTS_CACHE"],
        }
    )
    play(config)
    play(replace(config, logdir=tmp_path / "two"))
    assert list(differences(tmp_path / "one", tmp_path / "two")) == []
    updates = [row.get("learner/updates", 0) for row in rows(tmp_path / "two" / "metrics.jsonl")]
    assert max(updates) > 50
