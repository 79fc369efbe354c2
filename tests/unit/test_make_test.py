"""`make test` gives the same after `make train`, and says what it has not tested."""

import os
import subprocess
import sys
from pathlib import Path

from dreamfleet.config import CONFIG_FILE, RunConfig

ROOT = Path(__file__).parents[2]


def run_tests(where: Path, *tests: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = ["--rootdir", ROOT, "-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, *(ROOT / test for test in tests)],
        env={**os.environ, "PYTEST_DEBUG_TEMPROOT": str(where.parent), **environment},
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_in_the_working_directory_changes_nothing(tmp_path: Path) -> None:
    run = RunConfig(batch_size=7, steps=11, logdir=tmp_path / "runs" / "gym-CartPole-v1")
    run.logdir.mkdir(parents=True)
    (run.logdir / CONFIG_FILE).write_text(run.to_json())
    before = sorted(tmp_path.rglob("*"))
    # Tests that train or configure the default task in the default directory.
    arguments = "tests/unit/cli/test_arguments.py::test_flags_are_settings"
    done = run_tests(tmp_path, arguments, "tests/unit/test_config.py")
    assert done.returncode == 0, done.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_not_tested_is_said_with_the_command_that_installs_it(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "tests/faults/test_network_namespaces.py", PATH="")
    assert done.returncode == 0, done.stdout
    _, _, end = done.stdout.partition("not tested here")
    assert "apt install iproute2 util-linux\n  " in end
    assert "  a fleet on four machines survives its network\n" in end
