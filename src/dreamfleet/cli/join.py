"""`dreamfleet join URL`."""

from __future__ import annotations

import logging
from pathlib import Path

from dreamfleet.cli.console import say
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.joining import Offer
from dreamfleet.fleet.joining import join as join_run
from dreamfleet.roles.invitations import find_url
from dreamfleet.settings import Count, CountOrZero, ZeroOrMore


def join(
    url: str,
    /,
    envs: CountOrZero | None = None,
    eval_envs: CountOrZero = 0,
    envs_per_process: Count | None = None,
    task: str | None = None,
    trust: bool = False,
    logdir: Path | None = None,
    patience: ZeroOrMore = 3600.0,
) -> None:
    """Join a run on another machine with environments of this one.

    The run prints the line to type when it is started with --bind. Everything else comes from the
    run. Ctrl-C leaves; when the run is over, this command ends.

    Args:
        url: dreamfleet://HOST:PORT/#KEY, in quotes; a file that holds it; or the directory of the
            run, where this machine sees it.
        envs: Environments that collect training data; one if not given, none with --eval-envs.
        eval_envs: Environments for evaluation.
        envs_per_process: Environments that share a process; as in the run if not given.
        task: The run's task, if it is package.module:factory: code that another machine names is
            only imported if you name it too.
        trust: Import the code that the run names.
        logdir: Where the logs of the environments are kept; a directory that is removed at the end
            if not given.
        patience: Seconds to wait for a run that does not answer any more, until it is resumed.
    """
    count = (0 if eval_envs else 1) if envs is None else envs
    if not count + eval_envs:
        raise ConfigError("A machine joins with one environment at least: --envs 1.")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    offer = Offer(count, eval_envs, envs_per_process, task, trust)
    join_run(find_url(url), offer, logdir=logdir, patience=patience, say=say)
