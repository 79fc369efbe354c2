"""One environment is filmed now and then."""

from __future__ import annotations

import numpy as np

from dreamfleet.roles.camera import Camera


def frames(camera: Camera, ids: list[int], *, first: bool) -> list[int]:
    obs = {
        "image": np.repeat(np.array(ids, np.uint8) + 100, 48).reshape(-1, 4, 4, 3),
        "vector": np.zeros((len(ids), 3)),
        "is_first": np.full(len(ids), first),
    }
    sent = camera.frames(np.array(ids), obs)
    assert set(sent) <= {"image"}
    return sent["image"][:, 0, 0, 0].tolist() if sent else []


def test_a_film_begins_with_an_episode_and_holds_one_environment_only() -> None:
    camera = Camera(3600.0)
    assert frames(camera, [2, 0], first=False) == []  # its beginning was missed
    assert frames(camera, [1, 0, 2], first=True) == [100]
    assert frames(camera, [1, 2], first=False) == []
    assert frames(camera, [0], first=False) == [100]
    assert frames(camera, [0], first=True) == []  # the next film is due in an hour
    assert frames(camera, [0], first=False) == []


def test_no_film_is_made_where_reports_are_off() -> None:
    assert frames(Camera(0.0), [0], first=True) == []
