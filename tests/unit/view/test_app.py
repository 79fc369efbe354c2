"""The server of pages, as a process beside a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from view_parts import made_up_run

from dreamfleet.cli.view import page_beside


def test_the_page_beside_a_run_ends_with_it_and_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with page_beside(made_up_run(tmp_path / "a")):
        assert "Page: http://127.0.0.1:" in capfd.readouterr().out
    assert capfd.readouterr().err == ""
