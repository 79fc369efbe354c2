"""Traced programs, kept between runs.

JAX keeps compiled programs and finds them again by their lowered form. Tracing Python code into
that form takes longer than fetching the compiled program, so it is kept as well: one file for each
hash of everything that shapes a program. A file begins with a digest of the rest, so that a damaged
one is noticed before it is read; it is ignored and written again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax import export

from dreamfleet.agents.dreamer.rssm import State

logger = logging.getLogger(__name__)
_PACKAGES = ("jax", "jaxlib", "equinox", "optax")
_DIGEST = 32

export.register_namedtuple_serialization(State, serialized_name="dreamfleet.agents.State")


class TraceCache:
    """Lowered programs in a folder; `settings` are what they depend on beside their arguments."""

    def __init__(self, folder: str, settings: object) -> None:
        self._folder = Path(folder).expanduser() / "traces"
        self._settings = settings

    def trace(
        self, name: str, function: jax.stages.Wrapped, leaves: Sequence[jax.Array], tree: Any
    ) -> Callable[..., Any]:
        """What calls the lowered `function` of these leaves, which `tree` gives a meaning.

        Results may consist of dicts, lists, tuples and latent states.
        """
        path = self._folder / f"{name}-{self._key(name, leaves, tree)}"
        found = _read(path)
        if found is not None:
            return export.deserialize(found).call
        # Platforms are named so that not JAX's default counts, but where the leaves are.
        exported = export.export(function, platforms=[_platform(leaves)])(*leaves)
        _write(path, exported.serialize())
        return exported.call

    def _key(self, name: str, leaves: Sequence[jax.Array], tree: Any) -> str:
        arguments = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves]
        flags = sorted(jax.config.values.items())
        versions = [metadata.version(package) for package in _PACKAGES]
        shaping = (name, self._settings, tree, arguments, _platform(leaves), flags, versions)
        return hashlib.blake2b(repr(shaping).encode() + _sources(), digest_size=16).hexdigest()


def _platform(leaves: Sequence[jax.Array]) -> str:
    return str(next(iter(leaves[0].devices())).platform)


@functools.cache
def _sources() -> bytes:
    """A digest of the code that is traced."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files)).digest()


def _read(path: Path) -> bytearray | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, payload = content[:_DIGEST], content[_DIGEST:]
    if hashlib.blake2b(payload, digest_size=_DIGEST).digest() != digest:
        logger.warning("Ignoring the damaged %s", path)
        return None
    return bytearray(payload)


def _write(path: Path, payload: bytearray) -> None:
    """The file appears complete or not at all; without room for it the next run traces again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.blake2b(payload, digest_size=_DIGEST).digest())
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("A traced program could not be kept: %s", error)
