"""What a viewer plays: a dream, its branches and the truth, in a process of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from dream_parts import small_run
from PIL import Image

from dreamfleet import Dream, DreamfleetError
from dreamfleet.dream.session import FRESH, MAX_BRANCHES, Session
from dreamfleet.view.dream_host import IDLE_SECONDS, DreamClosedError, DreamHost

DEADLINE = 120


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logdir = tmp_path_factory.mktemp("catch")
    small_run(logdir, "bundled:catch", 40, size=(16, 16), balls=2)
    return logdir


@pytest.fixture(scope="module")
def loaded(run: Path) -> Dream:
    return Dream.load(run)


@pytest.fixture
def session(loaded: Dream) -> Session:
    session = Session(loaded)
    session.describe()
    return session


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


def act(session: Session, action: int) -> Any:
    return session.step("you", [action])


def test_the_same_actions_beside_the_dream(session: Session) -> None:
    about = session.describe()
    starts = [(number, title.partition(" steps")[0]) for number, title, _ in about["starts"]]
    assert starts == [(FRESH, "a fresh episode"), (1, "15"), (2, "15"), (0, "10")]
    assert about["controls"] == [{"name": "action", "low": 0, "high": 3, "choices": 3}]
    scene = session.start(1, 6, 0)
    assert scene["names"] == ["left", "stay", "right"]
    stored = loaded_episode(session).read()
    np.testing.assert_array_equal(pixels(scene["truth"]["frame"]), stored["image"][5])
    np.testing.assert_array_equal(pixels(scene["frame"]), session.dream.now.obs["image"])
    for number in range(6, 9):
        scene = session.step("recorded")
        assert scene["truth"]["source"] == "environment"
        np.testing.assert_array_equal(pixels(scene["truth"]["frame"]), stored["image"][number])
    imagined = session.dream.now.obs["image"].astype(float)
    off = np.abs(imagined - stored["image"][8]).mean() / 255
    assert scene["truth"]["difference"] == pytest.approx(off)
    lines = scene["curves"]["lines"]
    assert scene["curves"]["at"].tolist() == [0, 1, 2, 3]
    assert list(lines) == ["Reward", "Continuation", "Value", "Error of the dream"]
    assert np.isfinite(lines["Error of the dream"]["error"]).all()
    assert lines["Value"]["dream"][-1] == pytest.approx(scene["value"])
    assert lines["Reward"]["reality"].tolist() == stored["reward"][5:9].tolist()


def loaded_episode(session: Session) -> Any:
    return session.dream.episodes()[1]


def test_another_action_after_going_back_branches_off(session: Session) -> None:
    session.start(1, 6, 0)
    first = [act(session, action) for action in (0, 0, 2, 2)]
    back = session.go(2)
    assert (back["number"], back["length"], back["branches"]) == (2, 4, 1)
    assert back["frame"] == first[1]["frame"]
    assert back["truth"]["frame"] == first[1]["truth"]["frame"]
    same = act(session, 2)  # what it did before
    assert (same["number"], same["length"], same["branches"]) == (3, 4, 1)
    session.go(2)
    other = act(session, 0)
    assert (other["number"], other["length"], other["branch"], other["branches"]) == (3, 3, 1, 2)
    assert other["truth"]["frame"] != same["truth"]["frame"]
    there = session.go(4, 0)
    assert (there["number"], there["branch"]) == (4, 0)
    assert there["truth"]["frame"] == first[3]["truth"]["frame"]
    assert session.start(1, 6, 0)["branches"] == 1
    for number in range(MAX_BRANCHES + 3):
        session.go(0)
        scene = act(session, number % 3)
    assert scene["branches"] == MAX_BRANCHES


def test_without_an_environment_the_recording_is_the_truth(loaded: Dream) -> None:
    assert loaded.blueprint is not None
    config = replace(loaded.blueprint.config, task="evil_envs:Env")
    dream = loaded.branch()
    dream.blueprint = replace(loaded.blueprint, config=config)
    session = Session(dream)
    about = session.describe()
    assert [number for number, *_ in about["starts"]] == [1, 2, 0]
    assert "not part of Dreamfleet" in about["note"]
    with pytest.raises(DreamfleetError, match="no environment for a fresh episode"):
        session.start(FRESH, 1, 0)
    session.start(1, 13, 0)
    stored = dream.episodes()[1].read()
    scene = session.step("recorded")
    assert scene["truth"]["source"] == "recording"
    np.testing.assert_array_equal(pixels(scene["truth"]["frame"]), stored["image"][13])
    other = (int(stored["action"][13]) + 1) % 3
    assert act(session, other)["truth"] is None
    session.go(1)
    scene = session.step("recorded")
    assert scene["truth"]["last"]
    assert scene["recorded"] == 0
    with pytest.raises(DreamfleetError, match="The recording is over"):
        session.step("recorded")
    assert session.step("policy")["truth"] is None


def test_nothing_is_compared_once_the_real_episode_has_ended(session: Session) -> None:
    session.start(1, 13, 0)
    scenes = [act(session, 1) for _ in range(4)]
    ends = [each["truth"] and each["truth"]["last"] for each in scenes]
    assert ends == [False, True, None, None]
    assert scenes[2]["note"] == "The real episode ended at step 2."
    lines = scenes[-1]["curves"]["lines"]
    for true in (lines["Error of the dream"]["error"], lines["Reward"]["reality"]):
        assert np.isfinite(true).tolist() == [True, True, True, False, False]
    back = session.go(2)
    assert back["truth"]["frame"] == scenes[1]["truth"]["frame"]
    assert session.go(4)["truth"] is None


def test_a_dream_that_is_over_does_not_go_on(session: Session) -> None:
    session.start(FRESH, 1, 0)
    scene = act(session, 1)
    assert not scene["over"]
    now = session.dream.now
    session.dream._line[-1] = replace(now, continuation=0.4)
    assert session.show()["over"]
    with pytest.raises(DreamfleetError, match="The dream is over"):
        session.step("policy")
    assert not session.go(0)["over"]
    assert session.step("policy")["number"] == 1


def test_an_environment_of_ones_own_is_made_with_trust(
    loaded: Dream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from dreamfleet.envs.bundled import Catch\n\ndef make(**options): return Catch(**options)"
    )
    (tmp_path / "own_catch.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    dream = loaded.branch()
    config = replace(loaded.blueprint.config, task="own_catch:make")
    dream.blueprint = replace(loaded.blueprint, config=config)
    session = Session(dream, trust=True)
    assert session.describe()["starts"][0][0] == FRESH
    assert session.start(FRESH, 1, 0)["truth"]["source"] == "environment"
    assert session.step("policy")["truth"]["source"] == "environment"
    session.close()
    config = replace(config, task="__main__:Catch")
    dream.blueprint = replace(loaded.blueprint, config=config)
    assert "defined in the program that trained" in Session(dream, trust=True).describe()["note"]


def test_an_episode_is_predicted_from_its_recorded_actions(session: Session) -> None:
    stored = loaded_episode(session).read()
    session.start(1, 6, 0)
    scene = session.predict()
    assert (scene["number"], scene["recorded"]) == (len(stored["image"]) - 6, 0)
    lines = scene["curves"]["lines"]
    assert np.isfinite(lines["Error of the dream"]["error"]).all()
    assert lines["Reward"]["reality"].tolist() == stored["reward"][5:].tolist()
    one_by_one = session.start(1, 6, 0)
    while one_by_one["recorded"]:
        one_by_one = session.step("recorded")
    assert one_by_one["frame"] == scene["frame"]
    assert session.predict()["frame"] == scene["frame"]  # nothing is left


def test_viewers_share_one_worker_up_to_a_number(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the worker ends no viewer's page."""
    monkeypatch.setattr("dreamfleet.view.dream_host.MAX_VIEWERS", 2)
    host = DreamHost()
    try:
        for name in "ab":
            assert host.open(name, run)["task"] == "bundled:catch"
        pid = host.process.pid
        with pytest.raises(DreamfleetError, match="2 dreams are open"):
            host.open("c", run)
        for name in "ab":
            host.call(name, "start", 1, 6, 0)
        first = host.call("a", "step", "you", [0])
        host.call("a", "step", "you", [0])
        assert host.call("b", "show")["number"] == 0
        assert host.call("b", "step", "you", [0])["frame"] == first["frame"]
        with pytest.raises(DreamfleetError, match="outside of its space"):
            host.call("b", "step", "you", [7])
        with pytest.raises(DreamfleetError, match="no method 'close'"):  # none for pages
            host.call("b", "close")
        assert host.open("b", run)["step"] == 70  # replaces its own dream
        host.close("a")
        assert host.open("c", run)["step"] == 70
        assert host.process.pid == pid
        os.kill(pid, 9)
        host.process.wait(DEADLINE)
        with pytest.raises(DreamClosedError, match="opens the dream again"):
            host.call("b", "show")
        assert host.open("b", run)["step"] == 70
    finally:
        host.stop()
    assert host.process is None


def test_the_worker_ends_with_the_last_dream_and_its_folder_with_the_server(run: Path) -> None:
    host = DreamHost()
    try:
        for name in "ab":
            host.open(name, run)
        process = host.process
        host.close("a")
        host.close_idle()
        assert host.call("b", "describe")["step"] == 70
        host._called["b"] -= IDLE_SECONDS + 1
        host.close_idle()
        assert process.poll() is not None
        with pytest.raises(DreamClosedError, match="idle for too long"):
            host.call("b", "show")
        assert host.open("b", run)["step"] == 70
    finally:
        host.stop()


SERVER = """
import sys, tempfile
from pathlib import Path
from dreamfleet.view.dream_host import DreamHost

tempfile.tempdir = sys.argv[2]
host = DreamHost()
host.open("a", Path(sys.argv[1]))
print(host.process.pid, flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_server_that_is_killed(run: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(run), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        worker = psutil.Process(int(server.stdout.readline()))
        [folder] = tmp_path.iterdir()
        server.kill()
        assert psutil.wait_procs([worker], timeout=DEADLINE)[1] == []
    deadline = time.monotonic() + DEADLINE
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_checkpoint_that_is_a_link_is_not_followed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dreamfleet.view.dream_host.MAX_VIEWERS", 1)
    linked = run.parent / "linked"
    linked.symlink_to(run)
    host = DreamHost()
    for name in "ab":  # a failure takes no viewer's place
        with pytest.raises(DreamfleetError, match="links are not followed"):
            host.open(name, linked / "ckpt")
    assert host.process is None
