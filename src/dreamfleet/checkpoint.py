"""Checkpoints that are complete or not there.

    DIRECTORY/000007-step-000000125000/
        manifest.json        step, time, score, checksums, and every value that is no array
        agent.safetensors    the arrays of one part, flat
        agent-1.safetensors  what host 1 has of it, if several hosts learn together
        ...

A checkpoint is written under a temporary name, fsynced and renamed, so a directory without a
leading dot is complete. It is only trusted if every byte matches the checksums; otherwise the next
older one is used. Nothing in it is code: arrays and JSON, no pickle.

Several hosts write a checkpoint together, each the arrays that it has. An array that is split over
hosts is written in slices, called `name@axis:start`. Reading puts all of it together, so it does
not matter how many hosts there were.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401 - makes numpy know bfloat16
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dreamfleet.errors import DreamfleetError
from dreamfleet.files import atomic_rename, atomic_write, fsync

log = logging.getLogger(__name__)

FlatState = Mapping[str, Any]
Gather = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
Which = Literal["latest", "best"]

_FORMAT, _OF_HOSTS = 1, 2
_MANIFEST = "manifest.json"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_PART = re.compile(r"[A-Za-z0-9_-]+")
_SLICE = re.compile(r"@(\d+):(\d+)$")
_READ_BYTES = 1 << 20
_TEMPORARY, _DISCARDED = ".writing-", ".discarded-"


class CheckpointError(DreamfleetError):
    """A checkpoint that cannot be written, or that is damaged."""


class MissingPartError(CheckpointError):
    """A complete checkpoint that does not hold what was asked for."""


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint holds."""

    path: Path
    step: int
    time: float
    """When it was saved, in seconds since 1970."""
    score: float | None
    pending: bool
    """Whether its score follows."""
    bytes: int
    parts: dict[str, dict[str, Any]]
    """Those that were read."""


class Checkpoint:
    """The checkpoints of one directory, written by one process.

    The newest ones are kept, the one with the highest score if any has a score, and the newest one
    that waits for its score.

    Args:
        directory: Where they lie; made when the first one is saved.
        keep: How many of the newest are kept.
    """

    def __init__(self, directory: Path | str, *, keep: int = 1) -> None:
        if keep < 1:
            raise CheckpointError(f"keep must be at least 1, got {keep}.")
        self.directory = Path(directory)
        self._keep = keep

    def save(
        self,
        parts: Mapping[str, FlatState],
        step: int,
        score: float | None = None,
        *,
        pending: bool = False,
        host: int = 0,
        gather: Gather = lambda said: [said],
    ) -> Path:
        """Write a checkpoint and remove the ones that are no longer kept.

        When this returns, the checkpoint survives a power cut. Several hosts that share the
        directory call this together, with the parts that they have.

        Args:
            parts: Flat dicts of arrays, numbers, strings, booleans and None, by name.
            step: The step counter of the run.
            score: How good it is, such as the mean score of an evaluation. None, or a score that
                is not finite, is never the best.
            pending: Its score follows (`rate`), and it is kept until then.
            host: Which of the hosts this is. The steps of all of them are added, and the rest is
                what host 0 says.
            gather: Takes what this host says, and returns what all have said.
        """
        serial = 0
        if host == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.clean_up()
            serial = max((_serial(path) for path in self.all()), default=0) + 1
            (self.directory / f"{_TEMPORARY}{serial:06d}").mkdir()
        said = gather({"serial": serial, "step": step})
        serial, step = said[0]["serial"], sum(each["step"] for each in said)
        final = self.directory / f"{serial:06d}-step-{step:012d}"
        writing = self.directory / f"{_TEMPORARY}{serial:06d}"
        suffix = f"-{host}" if host else ""
        written = gather(
            {name: _write_part(writing, name, state, suffix) for name, state in parts.items()}
        )
        if host == 0:
            found: dict[str, Any] = {name: dict(entry) for name, entry in written[0].items()}
            for others in written[1:]:
                for name, entry in others.items():
                    found[name].setdefault("others", []).append(dict(entry))
            body = {
                "format": _FORMAT if len(written) == 1 else _OF_HOSTS,
                "step": step,
                "time": time.time(),
                "score": _finite(score),
                "pending": pending,
                "parts": found,
            }
            _write_manifest(writing, body)
            atomic_rename(writing, final)
            self._remove_older()
        gather({})  # it is there, on all hosts
        return final

    def clean_up(self) -> None:
        """Remove what a writer that was killed has left. For the writer alone."""
        for path in [
            *self.directory.glob(f"{_TEMPORARY}*"),
            *self.directory.glob(f"{_DISCARDED}*"),
        ]:
            shutil.rmtree(path)

    def load(
        self, which: Which = "latest", *, parts: Collection[str] | None = None
    ) -> Snapshot | None:
        """Read a checkpoint; None if there never was one, or for the best none with a score.

        A damaged one is skipped with a warning. Another process may save at the same time.

        Args:
            which: The newest, or the one with the highest score.
            parts: Those to read; None for all.

        Raises:
            CheckpointError: There are checkpoints and every one is damaged. A run that silently
                started from scratch would look like one that resumed, so the user has to decide.
        """
        while paths := self._candidates(which):
            problems = []
            for path in paths:
                try:
                    return read_checkpoint(path, parts)
                except MissingPartError:
                    raise
                except CheckpointError as error:
                    problems.append(error)
                    if path.exists():
                        log.warning("%s This checkpoint is skipped.", error)
            # The writer may have replaced the one that was being read by a newer one.
            if self._candidates(which) == paths:
                raise CheckpointError(
                    f"Every checkpoint in {self.directory} is damaged: {problems[0]} Remove the "
                    "directory to start from scratch."
                )
        return None

    def pending(self) -> Path | None:
        """Path of the newest checkpoint that waits for its score."""
        return next((each.path for each in self._undamaged() if each.pending), None)

    def rate(self, path: Path, score: float | None) -> None:
        """Give a checkpoint its score; None if there is none to be had. Another process than the
        one that saves may do this."""
        body = _read_manifest(path)
        _write_manifest(path, {**body, "score": _finite(score), "pending": False})

    def latest(self) -> Path | None:
        """Path of the newest checkpoint, damaged or not."""
        return next(iter(self.all()), None)

    def saved_at(self) -> float | None:
        """When the newest undamaged checkpoint was saved; None if there is none."""
        return next((each.time for each in self._undamaged()), None)

    def best(self) -> Path | None:
        """Path of the checkpoint with the highest score, the newest of equal ones."""
        return next(iter(self._candidates("best")), None)

    def _candidates(self, which: Which) -> list[Path]:
        """The checkpoints to try, in order."""
        if which == "latest":
            return self.all()
        scores = {each.path: each.score for each in self._undamaged() if each.score is not None}
        return sorted(scores, key=scores.__getitem__, reverse=True)

    def _undamaged(self) -> Iterator[Snapshot]:
        """What checkpoints say about themselves, the newest first."""
        for path in self.all():
            with suppress(CheckpointError):
                yield read_checkpoint(path, ())

    def all(self) -> list[Path]:
        """Every checkpoint, damaged or not. Newest first: by serial number, because a run that went
        back has lower steps again."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=_serial, reverse=True)

    def _remove_older(self) -> None:
        # In this order: one that gets its score in between is found as the best if it is.
        kept = {*self.all()[: self._keep], self.pending(), self.best()}
        for path in self.all():
            if path not in kept:
                # Renamed first: half of a checkpoint must not keep the name of a complete one.
                discarded = self.directory / f"{_DISCARDED}{path.name}"
                path.rename(discarded)
                shutil.rmtree(discarded)


def read_checkpoint(path: Path | str, parts: Collection[str] | None = None) -> Snapshot:
    """Read one checkpoint, or some of its parts, checking every byte that is read.

    Raises:
        CheckpointError: It is damaged; the message names the file and what is wrong with it.
        MissingPartError: It does not hold one of the parts.
    """
    folder = Path(path)
    body = _read_manifest(folder)
    wanted = body["parts"] if parts is None else parts
    missing = sorted(set(wanted) - set(body["parts"]))
    if missing:
        raise MissingPartError(
            f"{folder} has no part {missing[0]!r}, only {', '.join(sorted(body['parts']))}."
        )
    try:
        read = {name: _read_part(folder, body["parts"][name]) for name in wanted}
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    size = sum(file["bytes"] for part in body["parts"].values() for file in _files(part))
    about = body["step"], body["time"], body["score"], bool(body.get("pending")), size
    return Snapshot(folder, *about, read)


def step_of(path: Path) -> int:
    """The step counter of a checkpoint, by its name."""
    return int(path.name.rpartition("-")[2])


def _files(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What hosts have written of a part."""
    return [part, *part.get("others", [])]


def _write_part(folder: Path, name: str, state: FlatState, suffix: str = "") -> dict[str, Any]:
    if not _PART.fullmatch(name):
        raise CheckpointError(f"{name!r} cannot name a part: use letters, digits, - and _.")
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        if value is None or isinstance(value, (bool, int, float, str)):
            # JSON has no NaN and no infinity.
            odd = isinstance(value, float) and not math.isfinite(value)
            values[key] = {"float": str(value)} if odd else value
            continue
        array = np.asarray(value)
        if array.dtype.kind in "OSUMm":
            raise CheckpointError(
                f"{name}/{key} is a {type(value).__name__}, which a checkpoint cannot hold: use "
                "arrays of numbers, numbers, strings, booleans or None."
            )
        arrays[key] = np.ascontiguousarray(array).reshape(array.shape)
    path = folder / f"{name}{suffix}.safetensors"
    try:
        save_file(arrays, path)
    except SafetensorError as error:  # which is no OSError, also if the disk is full
        raise CheckpointError(
            f"{path} cannot be written ({error}): free disk space, or use another logdir."
        ) from error
    fsync(path)
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "crc32": _checksum(path),
        "arrays": len(arrays),
        "values": values,
    }


def _read_part(folder: Path, part: Mapping[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for entry in _files(part):
        read |= _read_file(folder, entry)
    slices: dict[tuple[str, int], dict[int, Any]] = {}
    for key in [key for key in read if _SLICE.search(key)]:
        name, axis, start = _SLICE.split(key)[:3]
        slices.setdefault((name, int(axis)), {})[int(start)] = read.pop(key)
    for (name, axis), found in slices.items():
        read[name] = np.concatenate([found[start] for start in sorted(found)], axis)
    return read


def sliced(name: str, axis: int, start: int) -> str:
    """The name of the part of an array that starts there along an axis."""
    return f"{name}@{axis}:{start}"


def _read_file(folder: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / entry["file"]
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(f"{path} has {size} bytes instead of {entry['bytes']}.")
    result = {
        key: float(value["float"]) if isinstance(value, dict) else value
        for key, value in entry["values"].items()
    }
    if _checksum(path) != entry["crc32"]:
        raise CheckpointError(f"{path} does not match its checksum.")
    try:
        with safe_open(path, "numpy") as file:
            result |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return result


def _write_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    text = json.dumps(body, allow_nan=False)
    sealed = {"crc32": zlib.crc32(text.encode()), "body": text}
    atomic_write(folder / _MANIFEST, json.dumps(sealed))


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    try:
        sealed = json.loads(path.read_bytes())
        text, seal = sealed["body"], sealed["crc32"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(text, str) or zlib.crc32(text.encode()) != seal:
        raise CheckpointError(f"{path} does not match its checksum.")
    body: dict[str, Any] = json.loads(text)
    if body["format"] not in (_FORMAT, _OF_HOSTS):
        raise CheckpointError(
            f"{path} has format {body['format']}, this version reads {_OF_HOSTS}: use the version "
            "of Dreamfleet that wrote it."
        )
    return body


def _finite(score: float | None) -> float | None:
    return score if score is not None and math.isfinite(score) else None


def _serial(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _checksum(path: Path) -> int:
    # Against accidents, not attacks: a cryptographic hash would take several times as long as
    # everything else here together.
    result = 0
    with path.open("rb", buffering=0) as file:
        block = bytearray(_READ_BYTES)
        while size := file.readinto(block):
            result = zlib.crc32(memoryview(block)[:size], result)
    return result
