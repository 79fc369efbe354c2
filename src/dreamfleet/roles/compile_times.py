"""How long compiling took the last time, so that a person knows how long it takes now."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path

from dreamfleet.config import RunConfig
from dreamfleet.files import atomic_write
from dreamfleet.settings import to_dict

_UNKNOWN = "the first time takes 20 s with a small model and minutes with a large one"
_LEAST_SECONDS = 1.0
_MOST_ENTRIES = 500


class CompileTimes:
    """Seconds by settings, in a file of the user's cache. One that cannot be used is as empty.

    Args:
        folder: Where the file is; None for the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dreamfleet"
        self._path = (folder or base) / "compile_seconds.json"

    def estimate(self, args: RunConfig) -> str:
        """How long it will take, in words."""
        seconds = self._read().get(_key(args))
        if seconds is None:
            return _UNKNOWN
        return f"with these settings it took {seconds:.0f} s the last time"

    def add(self, args: RunConfig, seconds: float) -> None:
        """It took so long. Agents that compile nothing are not noted."""
        if seconds < _LEAST_SECONDS:
            return
        times = self._read()
        times.pop(_key(args), None)
        times = dict([*times.items()][-_MOST_ENTRIES:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            atomic_write(self._path, json.dumps({**times, _key(args): round(seconds, 1)}))
        except OSError:
            return  # an estimate less

    def _read(self) -> dict[str, float]:
        try:
            found = json.loads(self._path.read_text())
            return {str(key): float(value) for key, value in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def _key(args: RunConfig) -> str:
    """What programs are compiled for."""
    agent = to_dict(args.settings_of(args.agent_type))
    sizes = (args.batch_size, args.batch_length, args.report_window, args.policy_batch)
    what = json.dumps([args.task, args.env_options, args.agent, agent, sizes], default=str)
    return blake2b(what.encode(), digest_size=12).hexdigest()
