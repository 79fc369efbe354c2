"""A replay that was killed resumes from the moment it was killed, not from its last save."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import small_run

from dreamfleet.config import RunConfig
from dreamfleet.fleet.factories import replay, stream
from dreamfleet.replay.storage import journal
from dreamfleet.roles.progress import limiter_for
from dreamfleet.roles.replay import ReplayService

ENVS = 4


def open_service(config: RunConfig) -> ReplayService:
    service = ReplayService(
        replay(config, "replay"),
        replay(config, "eval_replay"),
        partial(stream, config),
        limiter_for(config),
        config,
        threading.Event(),
    )
    service.attach({})
    return service


def sample(service: ReplayService) -> dict[str, Any]:
    """A batch, as a learner gets it."""
    service.lead.permit(service.lead.position()["samples"])
    return service.sample("train")


def steps(number: int) -> dict[str, Any]:
    return {
        "is_first": np.full(ENVS, number == 0),
        "is_last": np.zeros(ENVS, bool),
        "count": np.full(ENVS, number, np.int32),
    }


def play(service: ReplayService, first: int, last: int) -> None:
    for number in range(first, last):
        service.add_batch(steps(number), np.arange(ENVS), False, "actor", number)


def killed_and_moved(config: RunConfig, to: Path) -> RunConfig:
    """What a process killed right now leaves behind, elsewhere: this one still holds its files."""
    shutil.copytree(config.logdir, to)
    return small_run(to, train_ratio=config.train_ratio)


def test_counts_and_limiter_are_those_of_the_kill(tmp_path: Path) -> None:
    config = small_run(tmp_path / "1", train_ratio=2.0)
    service = open_service(config)
    play(service, 0, 10)
    for _ in range(4):
        sample(service)
    service.save()
    play(service, 10, 14)
    for _ in range(3):
        sample(service)
    before = service.lead.position()
    assert (before["steps"], before["samples"]) == (56, 14)
    again = open_service(killed_and_moved(config, tmp_path / "2"))
    assert again.lead.position() == before
    # A batch that is sent again is known, and not counted a second time.
    play(again, 10, 14)
    assert again.lead.position() == before
    again.close()
    assert open_service(small_run(tmp_path / "2", train_ratio=2.0)).lead.position() == before


def test_a_kill_before_the_first_save_loses_no_count(tmp_path: Path) -> None:
    config = small_run(tmp_path / "1", train_ratio=2.0)
    service = open_service(config)
    play(service, 0, 9)
    sample(service)
    again = open_service(killed_and_moved(config, tmp_path / "2"))
    assert again.lead.position() == service.lead.position()
    assert again.lead.position()["steps"] == 36


@pytest.mark.parametrize("counts", ["of the save", "of the power cut"])
def test_counts_limiter_and_batches_after_a_power_cut(
    tmp_path: Path, counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps behind the last sync are gone. Whichever counts had reached the disk, none goes back,
    and what is sent again is stored once."""
    config = small_run(tmp_path / "1", train_ratio=2.0)
    service = open_service(config)
    play(service, 0, 10)
    for _ in range(4):
        sample(service)
    service.save()
    saved, positions = service.lead.position(), "ckpt/replay/positions"
    shutil.copy(config.logdir / positions, tmp_path)
    play(service, 10, 12)
    sample(service)
    before = service.lead.position()
    moved = killed_and_moved(config, tmp_path / "2")
    if counts == "of the save":
        before = saved
        shutil.copy(tmp_path / "positions", moved.logdir / positions)
    monkeypatch.setattr(journal, "BOOT_ID", tmp_path / "boot")
    (tmp_path / "boot").write_text("another")
    again = open_service(moved)
    assert again.stats()["replay"]["steps"] == saved["steps"] == 40
    assert again.lead.position() == before
    limiter = again.lead._limiter
    assert limiter.avail == pytest.approx(again._positions.owed(limiter, 40))
    play(again, 8, 12)  # two of these four are stored, and the answers to all were lost
    assert again.stats()["replay"]["steps"] == 48
    assert again.lead.position()["steps"] == before["steps"] + 8


def test_a_replay_that_lost_its_files_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_run(tmp_path / "1", train_ratio=2.0)
    service = open_service(config)
    play(service, 0, 10)
    service.save()
    moved = killed_and_moved(config, tmp_path / "2")
    shutil.rmtree(moved.logdir / "replay")
    with caplog.at_level(logging.WARNING):
        again = open_service(moved)
    assert "holds 40 steps less" in caplog.text
    assert again.lead.position()["steps"] == 40, "the run has made them all the same"


def test_what_cannot_be_saved_is_let_go_of_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A serial run tries again in the same process, when there is room on its disk."""
    config = small_run(tmp_path, train_ratio=2.0)
    service = open_service(config)
    play(service, 0, 10)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(service._positions, "flush", full)
    with pytest.raises(OSError, match="No space left") as kept:  # which holds the frames
        service.close()
    assert open_service(config).lead.position()["steps"] == 40
    assert kept.value.errno == errno.ENOSPC
