"""Where the roles of a run listen, and the key that lets them in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from dreamfleet.config import RunConfig
from dreamfleet.transport import Keys, resolve
from dreamfleet.transport.address import parse

_ADDRESSES = ("actor_addr", "replay_addr", "logger_addr")


@contextmanager
def settled(args: RunConfig) -> Iterator[RunConfig]:
    """The run with every `{auto}` replaced and, if it uses tcp, with a key of its own.

    Servers remove their socket files when they end; those of killed ones are removed here.
    """
    asked = {name: _asked(getattr(args, name), args) for name in _ADDRESSES}
    found = {name: resolve(address) for name, address in asked.items()}
    made = [parse(found[name]) for name in _ADDRESSES if "{auto}" in asked[name]]
    run = replace(args, **found)  # type: ignore[arg-type]
    try:
        yield _with_keys(run)
    finally:
        for address in made:
            if address.kind == "ipc":
                address.path.unlink(missing_ok=True)
                with suppress(OSError):
                    address.path.parent.rmdir()


def _asked(address: str, args: RunConfig) -> str:
    """What nobody chose stays inside the process if all roles do."""
    serial = args.launcher == "serial" and address == "ipc://{auto}"
    return "inproc://{auto}" if serial else address


def _with_keys(args: RunConfig) -> RunConfig:
    tcp = any(parse(getattr(args, name)).kind == "tcp" for name in _ADDRESSES)
    if args.keys or not tcp:
        return args
    path = args.logdir / "keys"
    if not path.exists():
        args.logdir.mkdir(parents=True, exist_ok=True)
        Keys.generate().save(path)
    return replace(args, keys=str(path))
