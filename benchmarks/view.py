"""Cost of `dreamfleet view`: time to open, and what it takes from a run.

A headless Chromium has the page open on the same machine, so what a page takes from a run includes
the browser. A browser on another machine costs the server's share alone, which has its own row.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Row, compare, program, scratch
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError, import_extra
from dreamfleet.fleet.record import RunStatus, write_record
from dreamfleet.metrics import read_jsonl

_KEYS = 12
_RATE = "actor/steps_per_second"
_OPEN = (0, 1, 5)  # pages at once


def run(quick: bool = False) -> Iterator[Row]:
    """The server, and pages in a browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise ConfigError("This benchmark needs Chromium: install it.")
    playwright: Any = import_extra("playwright.sync_api", "Browsers in tests", "dev")
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        driver = stack.enter_context(playwright.sync_playwright())
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.callback(browser.close)
        count, rows = (5, 100) if quick else (100, 10_000)
        yield from _opening(folder / "many", browser, count, rows)
        yield from _training(folder / "training", browser, 1 if quick else 5, quick=quick)


@contextmanager
def _served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    words = ("view", str(folder), "--port", "0")
    with program("dreamfleet.cli", *words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.terminate()


def _opening(folder: Path, browser: Any, count: int, rows: int) -> Iterator[Row]:
    """From the command to a table and curves in the browser."""
    _made_up(folder / "run-0", rows)
    for number in range(1, count):
        shutil.copytree(folder / "run-0", folder / f"run-{number}")
        _configure(folder / f"run-{number}", seed=number)
    about = f"{count} runs with {rows:,} rows of {_KEYS} metrics each"
    start = time.monotonic()
    with _served(folder) as (address, _):
        yield Row("start of the server", time.monotonic() - start, "s", note=about)
        times = []
        for _ in range(3):
            page = browser.new_page()
            start = time.monotonic()
            page.goto(address)
            page.wait_for_selector(".runs tr:has(td a)")  # the table has rows of its own for space
            page.wait_for_selector(".chart canvas")
            times.append(time.monotonic() - start)
            page.close()
        for name, value in (("the first time", times[0]), ("again", min(times[1:]))):
            yield Row(f"table and curves, {name}", value, "s", note=about)


def _training(folder: Path, browser: Any, periods: int, quick: bool) -> Iterator[Row]:
    """Steps per second of one run with no, one and five open pages in turn."""
    seconds = 3.0 if quick else 20.0
    options = {
        "--task": "bundled:dummy",
        "--agent": "random",
        "--steps": "0",
        "--eval-episodes": "0",
        "--log-every": "1",
        "--train-ratio": "1",
        "--report-every": "0",
        "--logdir": str(folder / "run"),
    }
    words = [word for option in options.items() for word in option]
    folder.mkdir(parents=True)
    with (
        program("dreamfleet.cli", "train", *words, stdout=subprocess.DEVNULL) as process,
        _served(folder) as (address, server),
    ):
        try:
            metrics = folder / "run" / "metrics.jsonl"
            while not (metrics.exists() and _rates(metrics)):
                time.sleep(0.5)
            rates: dict[int, list[float]] = {count: [] for count in _OPEN}
            shares: dict[int, list[float]] = {count: [] for count in _OPEN}
            site = address.partition("/?")[0]
            for _ in range(periods):
                for count in _OPEN:
                    pages = [browser.new_page() for _ in range(count)]
                    for page in pages:
                        page.goto(address)
                        page.goto(f"{site}/run?run=run")
                        page.wait_for_selector(".chart canvas")
                    before, used = len(_rates(metrics)), _cpu(server)
                    time.sleep(seconds)
                    rates[count] += _rates(metrics)[before + 1 :]
                    shares[count].append((_cpu(server) - used) / seconds)
                    for page in pages:
                        page.close()
            alone, *others = (statistics.median(rates[count]) for count in _OPEN)
            note = "random agent, 8 environments; browser and server on the same machine"
            for count, rate in zip(_OPEN[1:], others, strict=True):
                name = f"steps/s, open pages: {count}"
                yield compare(name, rate, "steps/s", "no page", alone, note=note)
                share = 100 * statistics.mean(shares[count])
                yield Row(f"the server's share, open pages: {count}", share, "% of a core")
        finally:
            process.terminate()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _rates(path: Path) -> list[float]:
    return [float(row[_RATE]) for row in read_jsonl(path) if row.get(_RATE)]


def _made_up(logdir: Path, rows: int) -> None:
    logdir.mkdir(parents=True)
    _configure(logdir, seed=0)
    write_record(logdir, RunStatus(1, 1.0, "bench", 1000.0, (), "ended"))
    (logdir / "metrics.jsonl").write_text("".join(_metrics(10 * n) for n in range(rows)))
    (logdir / "scores.jsonl").write_text("".join(_score(10 * n) for n in range(rows)))


def _configure(logdir: Path, seed: int) -> None:
    (logdir / "config.json").write_text(RunConfig(logdir=logdir, seed=seed).to_json())


def _metrics(step: int) -> str:
    values = {f"train/loss/reconstruction/{n}": 1 + math.sin(step + n) for n in range(_KEYS)}
    return json.dumps({"step": step, **values}) + "\n"


def _score(step: int) -> str:
    row = {"step": step, "episode/score": step % 500, "episode/length": 9, "time": step / 10}
    return json.dumps(row) + "\n"
