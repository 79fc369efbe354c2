"""What is refused before a run is started, with the numbers that speak against it."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import psutil

from dreamfleet.blueprint import read_config
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.offline import check_prefill
from dreamfleet.fleet.overview import role_names
from dreamfleet.roles.replay import limiter_for

_PROCESS_BYTES = 40_000_000  # an interpreter with numpy and the transport, before its environment
_FILES_PER_PROCESS = 4
_FILES_BESIDE = 100


def preflight(config: RunConfig, make_env: Callable[[int], Any]) -> None:
    """Make an environment, and refuse a run that this machine or the replay cannot hold.

    Raises:
        ConfigError: Something does not fit; the message holds the numbers and the fix.
        DreamfleetError: The environment cannot be made.
    """
    check_directory(config)
    check_replay(config)
    check_files(config)
    check_prefill(config)
    if not config.offline:
        check_memory(config, _bytes_of_an_environment(make_env))


def check_directory(config: RunConfig) -> None:
    """A directory belongs to one run: another task or agent could not go on with what is there."""
    if not (config.logdir / "config.json").is_file():
        return
    there = read_config(config.logdir)
    for name, theirs, ours in (
        ("task", there.task, config.task),
        ("agent", there.agent, config.agent),
        ("dreamer.model", there.dreamer.model, config.dreamer.model),
    ):
        if theirs != ours and (name != "dreamer.model" or config.agent == "dreamer"):
            # Whole models would be a paragraph.
            told = f"{theirs}, not {ours}" if name != "dreamer.model" else "another size"
            raise ConfigError(
                f"{config.logdir} holds a run with {name} {told}: choose another --logdir, or the "
                "settings of that run."
            )


def check_replay(config: RunConfig) -> None:
    """Training begins when the replay holds a batch; one that never can would wait for ever."""
    needed = int(limiter_for(config).minsize)
    if needed > config.replay_capacity:
        raise ConfigError(
            f"A batch of batch_size={config.batch_size} sequences of {config.window} steps, with "
            f"envs={config.envs}, is drawn from {needed:,} steps at least, and "
            f"replay_capacity={config.replay_capacity:,} never holds as many: raise the capacity, "
            "or make the batch smaller."
        )


def check_memory(config: RunConfig, env_bytes: float, available: int | None = None) -> None:
    """Environments that do not fit would be ended by the machine one after the other.

    What further environments of one process take is not known and not counted.
    """
    processes = sum(name.startswith("env-") for name in role_names(config))
    each = _PROCESS_BYTES + env_bytes
    free = psutil.virtual_memory().available if available is None else available
    if processes * each > free:
        raise ConfigError(
            f"{config.all_envs} environments in {processes} processes of about {each / 1e6:.0f} MB "
            f"need {processes * each / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free: "
            "use fewer envs, or more envs_per_process."
        )


def check_files(config: RunConfig, limit: int | None = None) -> None:
    """Every process is a few sockets and pipes of those it talks with."""
    processes = len(role_names(config))
    needed = _FILES_PER_PROCESS * processes + _FILES_BESIDE
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if 0 <= allowed < needed:
        raise ConfigError(
            f"{processes} processes need about {needed} open files, and this shell allows "
            f"{allowed}: run 'ulimit -n {2 * needed}' first, or use more envs_per_process."
        )


def _bytes_of_an_environment(make_env: Callable[[int], Any]) -> float:
    """Memory that an environment takes, with the code that it loads.

    Made once only: somebody's environment may be slow to start, or a thing there is one of.
    """
    me = psutil.Process()
    before = me.memory_info().rss
    env = make_env(0)
    after = me.memory_info().rss
    env.close()
    return max(0.0, float(after - before))
