"""`dreamfleet invite LOGDIR`."""

from __future__ import annotations

import time
from pathlib import Path

from dreamfleet.cli.console import say
from dreamfleet.config import read_config
from dreamfleet.errors import ConfigError
from dreamfleet.formatting import clock
from dreamfleet.roles.invitations import invitations, join_line, ports_line, read_place
from dreamfleet.roles.invitations import invite as make_invitation
from dreamfleet.roles.invitations import revoke as revoke_invitation
from dreamfleet.transport import Keys


def invite(
    logdir: Path,
    /,
    name: str | None = None,
    revoke: str | None = None,
) -> None:
    """List the lines that let other machines join a run, make another one, or revoke one.

    It works during the run, and also between its end and its resume.

    Args:
        logdir: The run's directory.
        name: Make another line with this name and a key of its own.
        revoke: Make the line of this name invalid. Machines that have joined with it
            are disconnected within seconds.
    """
    config = read_config(logdir)
    place = read_place(logdir)
    if place is None:
        raise ConfigError(
            f"The run in {logdir} cannot be joined: start it with --bind 0.0.0.0, such as "
            f"'dreamfleet resume {logdir} --bind 0.0.0.0'."
        )
    if revoke is not None:
        revoke_invitation(logdir, revoke)
        say(f"Revoked {revoke}: machines that joined with it are disconnected.")
    if name is not None:
        # The directory may have been moved, and its key with it.
        own = logdir / "keys"
        keys = Keys.load(own) if own.exists() else config.server_keys
        if keys is None:
            raise ConfigError(f"The key of the run is missing: {own}. Copy it back.")
        say(join_line(place, make_invitation(logdir, name, keys)))
    if revoke is None and name is None:
        for each in invitations(logdir):
            age = clock(max(0.0, time.time() - each.made))
            if each.revoked:
                say(f"{each.name}  revoked, made {age} ago")
            else:
                say(f"{each.name}  made {age} ago\n  {join_line(place, each)}")
        say(ports_line(place))
