"""Files that commands write where they are told to."""

from __future__ import annotations

from pathlib import Path

from dreamfleet.errors import ConfigError


def write(path: Path, content: str | bytes) -> None:
    """Write a file, in a directory that need not be there.

    Raises:
        ConfigError: It cannot be written there.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
