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


def test_the_front_page_shows_what_the_runs_came_to(suite: Any) -> None:
    front = (RESULTS.parent / "README.md").read_text()
    assert suite.with_summary(front) == front


def test_a_run_that_was_begun_again_stays_listed(suite: Any, tmp_path: Path) -> None:
    target, root = tmp_path / "kept" / "catch_0", tmp_path / "root" / "catch_0"
    for folder in (target, root):
        folder.mkdir(parents=True)
    root.joinpath("scores.jsonl").write_text('{"step":9,"id":"0/a/9"}\n')
    suite.keep(root, target)
    root.joinpath("scores.jsonl").write_text('{"step":9,"id":"0/a/9"}\n{"step":12,"id":"0/a/12"}\n')
    suite.keep(root, target)
    assert not suite.lost(target), "a run that goes on is the same run"
    root.joinpath("scores.jsonl").write_text('{"step":7,"id":"0/b/7"}\n')
    suite.keep(root, target)
    (before,) = suite.lost(target)
    assert '"0/a/12"' in before.joinpath("scores.jsonl").read_text()
    assert suite.listed(before)["state"] == "lost"


def test_every_run_is_of_the_table_and_has_all_its_files(suite: Any) -> None:
    known = {entry.name(seed): entry for entry in suite.SUITE for seed in entry.seeds}
    for run in sorted((RESULTS / "runs").iterdir()):
        name = run.name.partition(".lost")[0]
        entry, account = known[name], suite.account(run)
        config = json.loads((run / "config.json").read_text())
        assert (config["task"], config["steps"]) == (entry.task, entry.steps)
        assert str(config["seed"]) == name.rpartition("_")[2]
        assert config["logdir"] == f"runs/{name}", "no path of a machine is kept"
        if account.get("finished"):
            evaluation = suite.read_evaluations(run)
            assert evaluation.at[-1] >= entry.steps
            assert account["cpu_minutes"] > 0


def test_all_runs_are_of_one_version(suite: Any) -> None:
    runs = [suite.account(run) for run in (RESULTS / "runs").iterdir()]
    assert len({account["version"][:7] for account in runs if account}) == 1
