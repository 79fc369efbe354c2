"""What `make bench ARGS=scale` measures, and the page that is made from it."""

import json
import math
import re
import resource
import runpy
from pathlib import Path

import pytest
from documents import ROOT

from benchmarks.__main__ import main
from benchmarks.scale import CONNECTIONS, actor_batch, allow_connections
from dreamfleet.errors import ConfigError

_MADE = runpy.run_path(str(ROOT / "docs" / "scaling.py"))
TABLES, fill, read_values = (_MADE[name] for name in ("TABLES", "fill", "read_values"))


def test_a_quick_run_measures_every_role_and_real_connections(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert main(["scale", "--quick", "--json", str(path)]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    for row in rows.values():
        assert row.keys() == {"name", "value", "unit", "peer", "peer_value", "ratio", "note"}
        assert math.isfinite(row["value"])
    for role in ("env", "agent", "replay", "logger"):
        assert rows[f"vector/fleet, a process each/{role}"]["unit"] == "us/step"
    for call in ("learner update", "replay insert", "replay sample", "logger"):
        assert rows[f"vector/{call}/cpu"]["unit"].startswith("us/")
    row = rows["curve/random/vector/2"]
    assert row["unit"] == "steps/s"
    assert row["value"] > 0
    assert re.search(r"agent \d+ us, .*clients \d+ us", row["note"])
    assert rows["actors=2"]["peer"] == "actors=1"
    for name in ("inserts", "samples"):
        assert rows[f"replay_shards=2, {name}"]["peer"] == f"replay_shards=1, {name}"
    assert 100 < rows["bytes/random/vector/to the actor"]["value"] < 400
    assert rows["replay/index"]["unit"] == "bytes/step"


def test_the_curve_goes_to_a_thousand_connections() -> None:
    assert CONNECTIONS == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert [actor_batch(n) for n in (1, 2, 8, 1024)] == [1, 1, 4, 256]


def test_a_limit_of_open_files_is_told_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"1,024 connections need 2,248 open files, .* 1,024: "):
        allow_connections(1024, (512, 1024))


def test_a_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    allow_connections(1024, (1024, 4096))
    allow_connections(10, (1024, 4096))
    allow_connections(1024, (-1, -1))  # no limit
    assert asked == [(2248, 4096)]


def test_the_pages_are_made_from_what_was_measured() -> None:
    docs = ROOT / "docs"
    pages = [(docs / name).read_text() for name in ("scaling.md", "performance.md")]
    assert all(f"<!-- {name} -->" in "".join(pages) for name in TABLES)
    for page in pages:
        assert fill(page, read_values(docs / "scaling.json")) == page


def test_a_figure_that_changes_changes_the_page() -> None:
    values = read_values(ROOT / "docs" / "scaling.json")
    page = "a <!-- network -->\nold\n<!-- end --> b <!-- other --> c"
    values["bytes/random/vector/to the actor"] = 123_456.0
    made = fill(page, values)
    assert "123,456" in made
    assert "old" not in made
    assert made.startswith("a ")
    assert made.endswith("b <!-- other --> c")


def test_what_one_core_carries_follows_from_what_a_step_or_a_batch_costs() -> None:
    values = read_values(ROOT / "docs" / "scaling.json")
    values |= {
        "vector/fleet, a process each/logger": 33.0,
        "image/fleet, a process each/logger": 50,
    }
    for kind in ("vector", "image"):
        values |= {f"{kind}/replay sample/cpu": 900, f"{kind}/replay update/cpu": 1100}
    made = TABLES["limits"](values)
    assert "| logger, fleet of eight, a process each | 30,000 steps | 20,000 steps |" in made
    assert "| replay, batches sampled and updated | 500 batches | 500 batches |" in made


def test_rows_of_the_page_have_the_form_of_all_benchmarks() -> None:
    rows = json.loads((ROOT / "docs" / "scaling.json").read_text())
    for row in rows:
        assert row.keys() == {"name", "value", "unit", "peer", "peer_value", "ratio", "note"}
    assert len({row["name"] for row in rows}) == len(rows)
