"""The browser that tests look through, where there is one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium of the machine, or else the one that playwright has installed."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        program = program or playwright.chromium.executable_path
        if not Path(program).exists():
            command = f"{sys.executable} -m playwright install --with-deps chromium"
            pytest.skip(f"Chromium is not installed: {command}")
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()
