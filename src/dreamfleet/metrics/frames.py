"""Frames as files: PNG and GIF by Pillow, MP4 by the ffmpeg of the extra `video`.

A frame is uint8, (height, width, 1 or 3). Pillow is imported where a file is made, because the
processes of environments and agents import this package too.
"""

from __future__ import annotations

import functools
import io
import math
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import MetricsError, MissingExtraError, import_extra, install_command
from dreamfleet.files import atomic_rename, atomic_write

if TYPE_CHECKING:
    from PIL import Image, ImageFont

_SMALLEST = 256  # pixels; the images of agents are often 64 wide, too small to look at
_SMALLEST_TEXT, _LARGEST_TEXT = 10, 24  # pixels
_MARGIN = 3  # pixels around a label
_LARGEST_FACTOR = 8  # to make room for a label; that of a frame below 24 pixels may be cut


def as_frames(value: Any) -> NDArray[np.uint8]:
    """An image or a video as uint8. Floats are 0 for black and 1 for white, and cut there."""
    array = np.asarray(value)
    if array.dtype == np.uint8:
        return array
    return (np.nan_to_num(array.astype(np.float32)).clip(0, 1) * 255).round().astype(np.uint8)


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """An image as PNG."""
    file = io.BytesIO()
    _image(image).save(file, "PNG")
    return file.getvalue()


def encode_gif(video: Iterable[NDArray[np.uint8]], fps: float = 20) -> bytes:
    """Frames of one size as an animated GIF that loops."""
    first, *rest = map(_image, video)
    file = io.BytesIO()
    # Not below 20 ms, which browsers play at a tenth of the speed.
    duration = max(20, round(1000 / fps))
    first.save(file, "GIF", save_all=True, append_images=rest, duration=duration, loop=0)
    return file.getvalue()


def contact_sheet(frames: Sequence[NDArray[np.uint8]], gap: int = 2) -> NDArray[np.uint8]:
    """Frames of one size side by side, row by row, as one RGB image."""
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    height, width = frames[0].shape[:2]
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), 128, np.uint8)
    for number, frame in enumerate(frames):
        row, column = divmod(number, columns)
        top, left = gap + row * (height + gap), gap + column * (width + gap)
        sheet[top : top + height, left : left + width] = frame
    return sheet


def enlarged(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A frame that is large enough to look at, by a whole factor. Large ones stay as they are."""
    return _repeated(frame, -(-_SMALLEST // max(frame.shape[:2])))


def labelled(frame: NDArray[np.uint8], text: str) -> NDArray[np.uint8]:
    """A frame with a line of text above it. What does not fit is cut off.

    The height depends on the frame's width alone, so the text of a video may change.
    """
    strip = _strip(text, frame.shape[1])
    return np.concatenate([np.broadcast_to(strip, (*strip.shape[:2], frame.shape[2])), frame])


def write_video(path: Path, video: NDArray[np.uint8], *, label: str) -> Path:
    """Write a video as MP4 where there is an encoder, and as GIF otherwise.

    Args:
        path: Without a suffix, which is chosen here.
        video: (time, height, width, 1 or 3).
        label: A line of text above the frames, which are enlarged until it fits.

    Returns:
        The path with its suffix.
    """
    # One frame at a time: with a label a long video would take several times its memory.
    factor = _factor_for(label, video[0].shape[1])
    shown = (labelled(_repeated(frame, factor), label) for frame in video)
    try:
        write_mp4(made := path.with_suffix(".mp4"), shown, title=label)
    except MissingExtraError:
        atomic_write(made := path.with_suffix(".gif"), encode_gif(shown))
    return made


def write_mp4(
    path: Path | str, frames: Iterable[NDArray[np.uint8]], *, fps: float = 20, title: str = ""
) -> None:
    """Write frames of one size as MP4."""
    with Mp4Writer(path, fps=fps, title=title) as writer:
        for frame in frames:
            writer.add(frame)


class Mp4Writer:
    """Writes frames of one size to a file that plays everywhere.

    Small frames are enlarged by a whole factor. The file has its name only when it is complete.

    Raises:
        MissingExtraError: There is no encoder; the message holds the command that installs it.
    """

    def __init__(self, path: Path | str, *, fps: float = 20, title: str = "") -> None:
        self._path = Path(path)
        self._part = self._path.with_name(f".{self._path.name}.part")
        self._encoder, self._fps, self._title = find_encoder(), fps, title
        self._process: subprocess.Popen[bytes] | None = None
        self._shape: tuple[int, ...] = ()

    def add(self, frame: NDArray[np.uint8]) -> None:
        """Append a frame."""
        shown, self._shape = _even(frame), self._shape or frame.shape
        if frame.shape != self._shape:
            raise MetricsError(
                f"A frame of shape {frame.shape} follows one of {self._shape}: a video has one "
                "size."
            )
        self._process = process = self._process or self._start(*shown.shape[:2])
        assert process.stdin is not None
        try:
            process.stdin.write(shown.tobytes())
        except BrokenPipeError as error:
            raise self._failure(process.communicate()[1]) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Complete the file. After an error, or without a frame, there is none."""
        if (process := self._process) is None:
            return
        if any(error):
            process.kill()
        _, errors = process.communicate()
        if any(error):
            self._part.unlink(missing_ok=True)
        elif process.returncode:
            raise self._failure(errors)
        else:
            atomic_rename(self._part, self._path)

    def _start(self, rows: int, columns: int) -> subprocess.Popen[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{columns}x{rows}"]
        command = [self._encoder, "-loglevel", "error", "-y", *source, "-r", f"{self._fps:g}"]
        # Files are hardly larger than with the default preset, which takes two to three times the
        # time. One thread: the training needs the others.
        quickly = ["-preset", "veryfast", "-threads", "1"]
        command += ["-i", "-", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "20", *quickly]
        command += ["-metadata", f"title={self._title}", "-movflags", "+faststart"]
        command += ["-f", "mp4", str(self._part)]
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=null, stderr=pipe)

    def _failure(self, errors: bytes) -> MetricsError:
        words = errors.decode(errors="replace").strip().splitlines()
        return MetricsError(f"{self._path} cannot be written: {words[-1] if words else 'unknown'}")


def find_encoder() -> str:
    """The path of ffmpeg."""
    package: Any = import_extra("imageio_ffmpeg", "MP4 videos", "video")
    try:
        return str(package.get_ffmpeg_exe())
    except RuntimeError as error:
        raise MissingExtraError(f"MP4 videos need ffmpeg: {install_command('video')}") from error


def _image(frame: NDArray[np.uint8]) -> Image.Image:
    from PIL import Image

    return Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)


def _repeated(frame: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    return frame.repeat(factor, 0).repeat(factor, 1) if factor > 1 else frame


def _even(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Enlarged, in colour, with even sides, because players expect colours at half the
    resolution."""
    large = enlarged(np.broadcast_to(frame, (*frame.shape[:2], 3)))
    odd = [(0, side % 2) for side in large.shape[:2]]
    return np.pad(large, [*odd, (0, 0)], mode="edge") if any(b for _, b in odd) else large


def _factor_for(label: str, width: int) -> int:
    """How much a frame of this width has to be enlarged so that the label fits above it."""
    needed = math.ceil(_font(_SMALLEST_TEXT).getlength(label)) + 2 * _MARGIN
    return min(_LARGEST_FACTOR, -(-needed // width))


@functools.lru_cache(maxsize=8)
def _strip(text: str, width: int) -> NDArray[np.uint8]:
    """A line of light text on black, (height, width, 1)."""
    from PIL import Image, ImageDraw

    room = max(_SMALLEST_TEXT, min(_LARGEST_TEXT, width // 24))
    # About half its size is the mean width of a letter. The text of a video may change, and its
    # size must not change with each digit, so it is not measured.
    size = max(_SMALLEST_TEXT, min(room, int(1.9 * (width - 2 * _MARGIN) / max(1, len(text)))))
    strip = Image.new("L", (width, room + 2 * _MARGIN))
    middle = (_MARGIN, strip.height // 2)
    ImageDraw.Draw(strip).text(middle, text, fill=230, font=_font(size), anchor="lm")
    return np.asarray(strip)[..., None]


@functools.lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font
