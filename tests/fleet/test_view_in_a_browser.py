"""`dreamfleet view` in a real browser, next to a run that trains.

One test for all of it: a run, a server and a browser cost seconds to start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from browser_parts import chromium
from dream_parts import small_run
from view_parts import made_up_run, made_up_sweep, save_random_agent

from dreamfleet.fleet.record import read_record, supervisor_process

EVIL = "<script>window.evil=1</script>"  # a folder and a run in it
EVIL_TEXT = "<script>window.evil=1</script><img src=x onerror=window.evil=1>${window.evil=1}`"
PATIENCE = 180_000.0
"""Milliseconds; the machine may be busy."""


def test_runs_are_watched_in_a_browser(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with (
        chromium() as browser,
        some_runs(folder),
        served(folder) as address,
        entered(browser, address) as page,
    ):
        without_the_token_there_is_nothing_and_with_it_only_what_is_in_runs(address)
        the_table_filters_and_draws_any_metric(page)
        a_hostile_run_is_text_on_every_page(page)
        go(page)
        a_live_run_grows_and_a_killed_process_is_seen(page, folder)
        go(page)
        a_checkpoint_is_evaluated(page)
        go(page, "dream?run=dreamer")
        a_dream_follows_the_keys(page)
        it_keeps_up_with_a_run_that_goes_on(page, folder / "dreamer")
        it_fits_a_phone_in_light_and_dark(page)
        go(page)
        a_run_is_saved_stopped_and_resumed(page, folder)


def test_a_page_of_a_server_that_was_started_again_says_what_to_do(tmp_path: Path) -> None:
    """The new server has another token, so the page cannot reconnect."""
    made_up_run(tmp_path / "runs" / "a")
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        with served(tmp_path / "runs") as address:
            page.goto(address)
            page.wait_for_selector(_ROW)
        port = address.partition("/?token=")[0].rpartition(":")[2]
        with served(tmp_path / "runs", port) as again:
            page.wait_for_selector("text=Open the address that 'dreamfleet view' printed")
            page.goto(again)
            page.wait_for_selector(_ROW)


def test_a_run_is_stopped_and_resumed_from_its_page(tmp_path: Path) -> None:
    logdir = tmp_path / "runs" / "live"
    with (
        chromium() as browser,
        trained(logdir, "bundled:corridor"),
        served(logdir) as address,
        entered(browser, address) as page,
        ended(logdir),
    ):
        page.wait_for_selector(".dot.running")
        wait(page, "() => document.querySelector('.chart.score')")
        assert not page.get_by_role("button", name="Resume").is_visible()
        stop_run(page)
        before = read_record(logdir)
        page.get_by_role("button", name="Resume").click()
        page.wait_for_selector(".dot.running")
        after = read_record(logdir)
        assert (after.state, after.pid == before.pid) == ("running", False)
        last = page.evaluate(_REACHES, ".chart.score")
        wait(page, f"([least]) => ({_REACHES})('.chart.score') > least", last)
        follow(page, "Logs")
        page.wait_for_selector("main :text('Resuming')")
        follow(page, "Overview")
        stop_run(page)


def test_a_sweep_is_seen_in_a_browser(tmp_path: Path) -> None:
    made_up_sweep(tmp_path / "runs" / "sweep")
    with (
        chromium() as browser,
        served(tmp_path / "runs") as address,
        entered(browser, address) as page,
    ):
        follow(page, "sweep runs/sweep")
        wait(page, "() => document.querySelectorAll('.runs .dot').length === 2")
        wait(page, f"() => ({_LINES})('.chart') === 2")
        follow(page, "curves by setting")
        seeds = """() => [...document.querySelectorAll('.chart.tall')].some(element => {
            const chart = getElement(Number(element.id.slice(1))).chart;
            const names = chart ? chart.getOption().series.map(each => each.name) : [];
            return names.filter(name => name.includes('2 seeds')).length === 2; })"""
        wait(page, seeds)
        page.wait_for_selector("[aria-checked=true]:has-text('95 % interval')")


@contextmanager
def ended(logdir: Path) -> Iterator[None]:
    """The run, also one that was resumed from its page, does not outlive the block."""
    try:
        yield
    finally:
        record = read_record(logdir)
        if record is not None and (found := supervisor_process(record)) is not None:
            found.terminate()
            found.wait(120)


def stop_run(page: Any) -> None:
    page.get_by_role("button", name="Stop").click()
    page.locator(".q-dialog").get_by_role("button", name="Stop").click()
    page.wait_for_selector(".dot.ended")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "dreamfleet.cli", *words]


@contextmanager
def process(log: Path, *words: str, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command, which is ended as Ctrl-C does, and killed if that does not help."""
    found = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with log.open("w") as out:
        started = subprocess.Popen(
            command(*words),
            stdout=stdout or out,
            stderr=out,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))},
        )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGINT)
        try:
            started.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()


@contextmanager
def some_runs(runs: Path) -> Iterator[None]:
    """A run that trains, and five that have ended; one of them is broken, one hostile, and one has
    a world model."""
    small_run(runs / "dreamer", "bundled:catch", 40, size=(16, 16), balls=2)
    save_random_agent(made_up_run(runs / "seed-0", seed=0, task="gym:Pendulum-v1"), step=300)
    made_up_run(runs / "seed-1", seed=1, task="gym:Pendulum-v1", episodes=40)
    (made_up_run(runs / "broken") / "config.json").write_text("{")
    evil = made_up_run(runs / EVIL, task=EVIL_TEXT, host=EVIL_TEXT)
    (evil / "logs").mkdir()
    (evil / "logs" / "agent.log").write_text(f"2026-01-01 00:00:00,000 ERROR x: {EVIL_TEXT}\n")
    with (evil / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, EVIL_TEXT: 1.0, "learner/state": EVIL_TEXT}) + "\n")
    (evil / "media" / "key").mkdir(parents=True)
    (evil / "media" / "key" / "000000000001.png").symlink_to("/etc/passwd")
    with trained(runs / "live", "view_parts:SlowDummy"):
        yield


@contextmanager
def trained(logdir: Path, task: str) -> Iterator[None]:
    """A run that trains without an end."""
    options = {
        "--task": task,
        "--agent": "random",
        "--envs": "4",
        "--envs-per-process": "2",
        "--steps": "0",
        "--eval-episodes": "0",
        "--batch-size": "2",
        "--batch-length": "4",
        "--report-length": "4",
        "--train-ratio": "0.1",
        "--log-every": "0.5",
        "--save-every": "3600",
        "--logdir": str(logdir),
    }
    words = [word for option in options.items() for word in option]
    logdir.parent.mkdir(exist_ok=True)
    with process(logdir.parent.parent / "train.log", "train", *words):
        wait_for_file(logdir / "config.json")
        yield


@contextmanager
def served(folder: Path, port: str = "0") -> Iterator[str]:
    """The address of a server."""
    with process(
        folder.parent / "view.log", "view", str(folder), "--port", port, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()


@contextmanager
def entered(browser: Any, address: str) -> Iterator[Any]:
    """A page that has entered with the token, and has had no error when the block is over."""
    with ExitStack() as stack:
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        stack.callback(context.close)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        problems: list[str] = []
        hosts: set[str] = set()
        page.on(
            "console", lambda message: message.type == "error" and problems.append(message.text)
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(address)
        connected(page)
        yield page
        assert problems == []
        assert hosts <= {address.split("/")[2], ""}
        assert page.evaluate("window.evil") is None


def go(page: Any, path: str = "") -> None:
    page.goto(page.url.partition("?")[0].rpartition("/")[0] + f"/{path}")
    connected(page)


def follow(page: Any, link: str) -> None:
    with page.expect_navigation():
        page.get_by_role("link", name=link, exact=True).click()
    connected(page)


def connected(page: Any) -> None:
    """What is typed or clicked before the page has its socket is lost."""
    wait(page, "() => window.did_handshake")


_ROW = ".runs tr:has(td a)"
_REACHES = """selector => {
const element = document.querySelector(selector);
const chart = element && getElement(Number(element.id.slice(1))).chart;
const series = chart ? chart.getOption().series : [];
return Math.max(0, ...series.flatMap(each => each.data.map(point => point[0])));
}"""
"""The last step that a chart shows."""


_LINES = """selector => {
const element = document.querySelector(selector);
const chart = element && getElement(Number(element.id.slice(1))).chart;
return chart ? chart.getOption().series[0].data.length : 0;
}"""
"""The lines of a plot of parallel coordinates."""


_POINTS = """(selector, name) => {
const element = document.querySelector(selector);
const chart = element && getElement(Number(element.id.slice(1))).chart;
const found = chart ? chart.getOption().series.filter(each => each.name === name) : [];
return found.reduce((count, each) => count + each.data.length, 0);
}"""
"""How many points of this name a chart has."""


_CHECKED = ".q-checkbox[aria-checked=true]"


def wait(page: Any, condition: str, *arguments: Any) -> None:
    page.wait_for_function(condition, arg=list(arguments), timeout=PATIENCE, polling=100)


def status_of(url: str, cookie: str = "") -> int:
    request = urllib.request.Request(url, headers={"cookie": cookie} if cookie else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def without_the_token_there_is_nothing_and_with_it_only_what_is_in_runs(
    address: str,
) -> None:
    site, _, token = address.partition("/?token=")
    port = site.rpartition(":")[2]
    cookie = f"dreamfleet-{port}={token}"
    media = f"{site}/media?run={urllib.request.quote(EVIL)}&kind="  # type: ignore[attr-defined]
    assert status_of(f"{site}/", cookie) == 200
    for path in ("/", "/run?run=live", "/logs?run=live", "/media", "/_nicegui_ws/socket.io/?EIO=4"):
        assert status_of(site + path) == 403
    for rest in (
        "key&name=000000000001.png",  # a link
        "..&name=config.json",
        "%2e%2e&name=000000000001.png",
        "key%2f..%2f..&name=1.png",
        "key&name=..%2f..%2fconfig.json",
        "%00&name=1.png",
    ):
        assert status_of(media + rest, cookie) == 404
    for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc%2fpasswd"):
        assert status_of(site + path, cookie) == 404


def the_table_filters_and_draws_any_metric(page: Any) -> None:
    rows = page.locator(_ROW)
    page.wait_for_selector("text=live")
    assert rows.count() == 6
    assert rows.filter(has_text="broken").first.locator(".dot.broken").count() == 1
    page.get_by_label("filter").fill("pendulum ended")
    wait(page, "([row]) => document.querySelectorAll(row).length === 2", _ROW)
    page.get_by_label("filter").fill("")
    wait(page, "([row]) => document.querySelectorAll(row).length === 6", _ROW)
    for name in ("seed-0", "seed-1"):
        box = rows.filter(has_text=name).locator(".q-checkbox")
        if box.get_attribute("aria-checked") != "true":
            box.click()
        rows.filter(has_text=name).locator(_CHECKED).wait_for(timeout=PATIENCE)
    page.get_by_text("Choose metrics").click()
    page.get_by_label("search").fill("train/loss/value")
    metric = page.locator(".metrics tr:has-text('train/loss/value')")
    metric.locator(".q-checkbox").click()
    metric.locator(_CHECKED).wait_for(timeout=PATIENCE)
    joined = """([count]) => [...document.querySelectorAll('.chart.tall')].filter(element => {
        const chart = getElement(Number(element.id.slice(1))).chart;
        return chart && chart.getOption().series.some(each => each.name.includes('2 seeds'));
        }).length === count"""
    wait(page, joined, 2)
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    text = Path(download.value.path()).read_text()
    assert text.startswith("metric,task,setting,seeds,steps,mean,low,high")
    assert "train/loss/value,gym:Pendulum-v1" in text
    page.get_by_role("button", name="Differences").click()
    page.wait_for_selector(".q-dialog td:text-is('seed')")
    # Markup would have run here, and the test of every page says that none did.
    assert rows.filter(has_text="window.evil").count() == 1
    wait(page, "() => location.search.includes('metric=train')")
    page.reload()  # the address holds what is chosen
    connected(page)
    wait(page, joined, 2)


def a_hostile_run_is_text_on_every_page(page: Any) -> None:
    site = page.url.partition("/?")[0]
    for path in ("run", "curves", "fleet", "logs", "checkpoints", "configuration", "videos"):
        page.goto(f"{site}/{path}?run={urllib.request.quote(EVIL)}")  # type: ignore[attr-defined]
        page.wait_for_selector(".pages a.here")
        if path in ("curves", "logs"):
            page.wait_for_selector("main :text('window.evil') >> visible=true")


def a_live_run_grows_and_a_killed_process_is_seen(page: Any, folder: Path) -> None:
    follow(page, "live")
    page.wait_for_selector(".dot.running")
    wait(page, "() => document.querySelector('.chart.score')")
    grown = f"([least]) => ({_REACHES})('.chart.score') > least"
    wait(page, grown, 0)
    wait(page, grown, page.evaluate(_REACHES, ".chart.score"))
    page.get_by_label("tags").fill("first, good")
    page.get_by_label("tags").press("Enter")
    wait_for_file(folder / "live" / "annotations.json")
    follow(page, "Fleet")
    row = "tr:has(td:text-matches('^env-'))"
    page.wait_for_selector(f"{row} .dot.running")
    page.wait_for_selector(".chart.low canvas")
    record = read_record(folder / "live")
    victim = next(worker for worker in record.workers if worker.role == "env")
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    page.wait_for_selector(f"{row} .dot.restarting")  # though it is back at once
    page.wait_for_selector("[role=alert]:has-text('env-')")
    page.wait_for_selector("text=1 failure")
    page.wait_for_selector(f"{row} .dot.restarting", state="detached")
    page.locator(f"{row} .dot.running").nth(1).wait_for()  # both processes
    follow(page, "Curves")
    page.get_by_label("search").fill("replayed steps")
    page.wait_for_selector(".metrics :text('learner/replay_ratio')")
    go(page)
    page.wait_for_selector(".runs td:text-is('first, good')")


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE / 1000
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def a_dream_follows_the_keys(page: Any) -> None:
    def at(number: int) -> tuple[str, str]:
        """The frames of dream and reality, once the dream is at this step."""
        page.wait_for_selector(f"text=/step {number} ·/")
        dream, real = (page.get_by_alt_text(f"{each} frame") for each in ("imagined", "real"))
        return dream.get_attribute("src"), real.get_attribute("src")

    frames = [at(0)]
    for number, key in enumerate(("ArrowLeft", "ArrowRight", "3"), 1):
        page.keyboard.press(key)
        frames.append(at(number))
    assert len({real for _, real in frames}) == 4  # the ball falls
    page.keyboard.press("Backspace")
    assert at(2) == frames[2]
    page.keyboard.press("ArrowLeft")  # another action than before: the dream branches off
    assert at(3)[1] != frames[3][1]
    page.get_by_text("branch 1").click()
    # Both branches are at step 3: only the frame says when the page shows the other one.
    wait(
        page,
        "([frame]) => document.querySelector('[alt=\"real frame\"]').src === frame",
        frames[3][1],
    )
    assert at(3) == frames[3]
    page.get_by_role("button", name="Policy").click()
    page.keyboard.press("Space")
    page.wait_for_selector("text=/step ([6-9]|\\d\\d+) ·/")
    page.keyboard.press("Space")
    page.get_by_label("to the start").click()
    assert at(0) == frames[0]


def it_keeps_up_with_a_run_that_goes_on(page: Any, logdir: Path) -> None:
    """Its checkpoint is removed, another one is there, and the replay has dropped the episode."""
    [old] = (logdir / "ckpt" / "agent").iterdir()
    old.rename(old.with_name(old.name.replace("000070", "000090")))
    page.get_by_label("checkpoint").click()
    page.get_by_role("option").nth(1).wait_for()  # the old one is still in memory
    page.keyboard.press("Escape")
    page.get_by_label("start from").click()
    page.get_by_role("option").get_by_text("steps, score").first.click()
    for chunk in (logdir / "replay").glob("*"):
        chunk.unlink()
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_selector("text=The run has removed this episode meanwhile")


def it_fits_a_phone_in_light_and_dark(page: Any) -> None:
    before = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 800})
    paths = ("", "run?run=live", "fleet?run=live", "curves?run=live", "dream?run=live")
    for number, path in enumerate(paths):
        dark = number % 2 == 0
        page.emulate_media(color_scheme="dark" if dark else "light")
        go(page, path)
        page.wait_for_selector("main .card")
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        shade = sum(int(each) for each in color.strip("rgb()").split(",")[:3])
        assert (shade < 200) == dark
        wait(page, "() => document.documentElement.scrollWidth <= innerWidth")
        if path:  # the page's own name is in sight
            box = page.locator(".pages a.here").bounding_box()
            assert box["x"] + box["width"] <= 390
    # An axis tells numbers apart that hardly differ.
    assert page.evaluate("[dreamfleet.short(1.00001), dreamfleet.short(1.00001, 3)]") == [
        "1",
        "1.00001",
    ]
    page.set_viewport_size(before)


def a_checkpoint_is_evaluated(page: Any) -> None:
    follow(page, "seed-0")
    follow(page, "Checkpoints")
    page.wait_for_selector(".runs :text('-step-')")
    page.locator(".acts").get_by_role("button", name="Evaluate").click()
    page.wait_for_selector(".jobs:has-text('evaluation · step')")
    page.wait_for_selector(".jobs:has-text('mean return')")
    page.wait_for_selector("td:text-is('asked')")  # it is kept
    follow(page, "Overview")
    wait(page, f"() => ({_POINTS})('.chart.score', 'evaluation') === 1")


def a_run_is_saved_stopped_and_resumed(page: Any, folder: Path) -> None:
    follow(page, "live")
    page.wait_for_selector(".dot.running")
    page.get_by_role("button", name="Save now").click()
    follow(page, "Checkpoints")
    page.wait_for_selector(".runs :text('-step-')")
    follow(page, "Overview")
    stop_run(page)
    record = read_record(folder / "live")
    assert record.state == "ended"
    # Its environment is not part of the package, and the server does not trust it.
    page.get_by_role("button", name="Resume").click()
    page.wait_for_selector(".jobs:has-text('resume · failed'):has-text('not part of Dreamfleet')")
    follow(page, "Logs")
    page.wait_for_selector("main :text('not part of Dreamfleet')")
