"""Images and videos as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from dreamfleet.metrics import MediaOutput

IMAGE = np.zeros((4, 6, 3), np.uint8)
VIDEO = np.zeros((3, 4, 6, 1), np.uint8)


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("0*"))


def test_images_and_videos_become_files_and_nothing_else_does(tmp_path: Path) -> None:
    output = MediaOutput(tmp_path / "media")
    output.write(7, {"loss": 1.0, "note": "text", "weights": np.zeros(5)})
    assert not (tmp_path / "media").exists()
    output.write(7, {"report/open loop/image": VIDEO, "map": IMAGE})
    output.flush()
    output.close()
    assert files(tmp_path / "media") == [
        "map/000000000007.png",
        "report-open-loop-image/000000000007.mp4",
    ]
    assert (tmp_path / "media/map/000000000007.png").read_bytes().startswith(b"\x89PNG")


def test_the_newest_files_of_each_key_are_kept(tmp_path: Path) -> None:
    output = MediaOutput(tmp_path, keep=2)
    for step in (1, 20, 300):
        output.write(step, {"map": IMAGE, "other": IMAGE} if step == 1 else {"map": IMAGE})
    assert files(tmp_path) == [
        "map/000000000020.png",
        "map/000000000300.png",
        "other/000000000001.png",
    ]


def test_no_key_leads_out_of_the_directory(tmp_path: Path) -> None:
    MediaOutput(tmp_path / "media").write(1, {"../../evil": IMAGE, "/etc/evil": IMAGE, "..": IMAGE})
    assert len(files(tmp_path / "media")) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["media"]


def test_float_images_are_shown(tmp_path: Path) -> None:
    """0 is black and 1 is white; what lies outside is cut, and NaN is black."""
    image = np.array([[-1, 0, 0.5], [1, 7, np.nan]], np.float32)[..., None]
    MediaOutput(tmp_path).write(1, {"map": image, "play": np.zeros((2, 4, 4, 3), np.float64)})
    assert files(tmp_path) == ["map/000000000001.png", "play/000000000001.mp4"]
    shown = np.asarray(Image.open(tmp_path / "map/000000000001.png"))
    assert shown.tolist() == [[0, 0, 128], [255, 255, 0]]
