"""Videos as files: MP4, encoded by the ffmpeg that comes with the extra `video`, or else GIF."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import install_command
from dreamfleet.metrics.errors import MetricsError, MissingOutputError
from dreamfleet.metrics.lettering import labelled, width_of
from dreamfleet.metrics.pictures import encode_gif

_SMALLEST = 256  # frames of agents are often 64 pixels wide: too small to look at
_LARGEST_FACTOR = 8  # for a label: a frame narrower than 16 pixels may have a cut one


class Mp4Writer:
    """Writes frames, (height, width, 1 or 3) and all of one size, to a file that plays everywhere.

    Small frames are enlarged by a whole factor. The file has its name only when it is whole.

    Raises:
        MissingOutputError: There is no encoder; the message holds the command that installs it.
    """

    def __init__(self, path: Path | str, *, fps: float = 20, title: str = "") -> None:
        self._path = Path(path)
        self._encoder = find_encoder()
        self._fps, self._title = fps, title
        self._process: subprocess.Popen[bytes] | None = None
        self._shape: tuple[int, ...] = ()
        self._part = self._path.with_name(f".{self._path.name}.part")

    def add(self, frame: NDArray[np.uint8]) -> None:
        if self._process is None:
            self._start(frame.shape)
        assert self._process is not None
        assert self._process.stdin is not None
        if frame.shape != self._shape:
            raise MetricsError(
                f"A frame of shape {frame.shape} follows one of {self._shape}: a video has one "
                "size."
            )
        try:
            self._process.stdin.write(self._even(frame).tobytes())
        except BrokenPipeError as error:
            _, errors = self._process.communicate()
            raise self._failure(errors) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the file, or leave none after an error. Without a frame there is none either."""
        process = self._process
        if process is None:
            return
        if error is not None:
            process.kill()
        _, errors = process.communicate()
        if error is not None:
            self._part.unlink(missing_ok=True)
        elif process.returncode:
            raise self._failure(errors)
        else:
            self._part.replace(self._path)

    def _start(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        rows, columns = self._even(np.zeros(shape, np.uint8)).shape[:2]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{columns}x{rows}"]
        command = [self._encoder, "-loglevel", "error", "-y", *source, "-r", f"{self._fps:g}"]
        command += ["-i", "-", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "20"]
        command += ["-metadata", f"title={self._title}", "-movflags", "+faststart"]
        # One thread: it runs beside the training and has little to do.
        command += ["-threads", "1", "-f", "mp4", str(self._part)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    def _even(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Enlarged, in colour, with even sides: most players know colours at half the resolution
        only."""
        large = enlarged(np.broadcast_to(frame, (*frame.shape[:2], 3)))
        odd = [(0, side % 2) for side in large.shape[:2]]
        return np.pad(large, [*odd, (0, 0)], mode="edge") if any(b for _, b in odd) else large

    def _failure(self, errors: bytes) -> MetricsError:
        words = errors.decode(errors="replace").strip().splitlines()
        return MetricsError(f"{self._path} cannot be written: {words[-1] if words else 'unknown'}")


def enlarged(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A frame, (height, width, channels), large enough to look at; large ones stay as they are."""
    factor = max(1, -(-_SMALLEST // max(frame.shape[:2])))
    return frame.repeat(factor, 0).repeat(factor, 1)


def write_mp4(
    path: Path | str, frames: Iterable[NDArray[np.uint8]], *, fps: float = 20, title: str = ""
) -> None:
    """Write a video that is there already, (time, height, width, 1 or 3)."""
    with Mp4Writer(path, fps=fps, title=title) as writer:
        for frame in frames:
            writer.add(frame)


def find_encoder() -> str:
    """Where ffmpeg is."""
    try:
        package: Any = importlib.import_module("imageio_ffmpeg")
        return str(package.get_ffmpeg_exe())
    except (ModuleNotFoundError, RuntimeError) as error:
        raise MissingOutputError(f"MP4 videos need ffmpeg: {install_command('video')}") from error


def write_video(path: Path, video: NDArray[np.uint8], *, fps: float = 20, label: str = "") -> Path:
    """Write a video, (time, height, width, 1 or 3), with a line of text above it: as MP4 where
    there is an encoder, and as GIF otherwise. The path's suffix is chosen here; returns the path.
    """
    shown = labelled(_wide_enough(video, label), label) if label else video
    try:
        write_mp4(made := path.with_suffix(".mp4"), shown, fps=fps, title=label)
    except MissingOutputError:
        made = path.with_suffix(".gif")
        made.parent.mkdir(parents=True, exist_ok=True)
        part = made.with_name(f".{made.name}.part")
        part.write_bytes(encode_gif(shown, fps))
        part.replace(made)
    return made


def _wide_enough(video: NDArray[np.uint8], label: str) -> NDArray[np.uint8]:
    """Enlarged, if it must be, so that the label fits: above 64 pixels 15 letters do. Not more than
    that, for what is enlarged here is kept as a whole, and as it is in a GIF."""
    factor = min(_LARGEST_FACTOR, -(-width_of(label) // video.shape[2]))
    return video.repeat(factor, 1).repeat(factor, 2) if factor > 1 else video
