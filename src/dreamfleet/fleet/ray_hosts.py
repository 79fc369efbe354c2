"""Several hosts that learn together, on the nodes of a Ray cluster, started by one command.

The process of the command is a supervisor whose workers are the hosts: each is what would be
typed on that node. They find each other in the run's directory, as ever.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dreamfleet.config import RunConfig
from dreamfleet.fleet.launchers import RestartPolicy, Worker
from dreamfleet.fleet.launchers.ray import RayLauncher, connect, fitting, nodes
from dreamfleet.fleet.supervisor import Say, Supervisor
from dreamfleet.roles.runtime import stop_event

Run = Callable[[RunConfig], object]


def run_hosts(run: Run, config: RunConfig, say: Say) -> None:
    """Run every host on a node, which has what `resources.agent` asks for, until the run is over.
    With `hosts=0` every such node is one. `run` is called there with the host's configuration."""
    logdir = config.logdir.absolute()
    asks = config.resources.agent.amounts()
    disconnect = connect(config, asks)
    try:
        count = config.hosts or len(fitting(asks, nodes())) or 1
        say(f"Starting {count} hosts on the Ray cluster; their output goes to {logdir / 'logs'}")
        run_as = replace(config, hosts=count, launcher="local", logdir=logdir)
        workers = [
            Worker(
                f"host-{index}",
                "agent",
                partial(_host, run, replace(run_as, host_index=index)),
                resources=config.resources.agent,
                restart=RestartPolicy("stop"),
                ends_run=index == 0,
                apart=True,
            )
            for index in range(count)
        ]
        with RayLauncher(logdir, config) as launcher:
            Supervisor(workers, launcher, say=say).run()
    finally:
        disconnect()


def _host(run: Run, config: RunConfig) -> None:
    """What the process of a host runs. One that ends before host 0, which evaluates, waits."""
    over = stop_event(on_stop=lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        run(config)
        if config.host_index:
            over.wait()
    except KeyboardInterrupt:
        if not over.is_set():  # another host was asked to stop
            raise
