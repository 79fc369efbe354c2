"""What results/README.md says is what the files next to it say."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def suite() -> Any:
    spec = importlib.util.spec_from_file_location("results_suite", RESULTS / "suite.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_follows_from_the_runs(suite: Any) -> None:
    assert (RESULTS / "README.md").read_text() == suite.page()


def test_every_run_is_of_the_table_and_has_all_its_files(suite: Any) -> None:
    known = {entry.name(seed): entry for entry in suite.SUITE for seed in entry.seeds}
    for run in sorted((RESULTS / "runs").iterdir()):
        entry, account = known[run.name], suite.account(run)
        config = json.loads((run / "config.json").read_text())
        assert (config["task"], config["steps"]) == (entry.task, entry.steps)
        assert str(config["seed"]) == run.name.rpartition("_")[2]
        assert config["logdir"] == f"runs/{run.name}", "no path of a machine is kept"
        if account.get("finished"):
            evaluation = suite.read_evaluations(run)
            assert evaluation.at[-1] >= entry.steps
            assert account["cpu_minutes"] > 0


def test_all_runs_are_of_one_version(suite: Any) -> None:
    runs = [suite.account(run) for run in (RESULTS / "runs").iterdir()]
    assert len({account["version"] for account in runs if account}) == 1
