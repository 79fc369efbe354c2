"""Resuming: a run keeps the settings that it was last with, and says which of them are changed.

They stand in the `config.json` of its directory. A file never chooses code that is imported: what
it names outside of this package, a person names again, or says that the run is to be trusted. The
same holds for folders of the agent, because compiled programs that lie there are executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dreamfleet.agents.registry import BUILT_IN
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import CONFIG_FILE, OUTPUTS, RunConfig, read_config, unknown_settings
from dreamfleet.envs import is_bundled
from dreamfleet.envs.registry import PROGRAM, only_there
from dreamfleet.errors import ConfigError, did_you_mean

_MOST_SHOWN = 4


def holds_run(logdir: Path) -> bool:
    """Whether a run was started in this directory."""
    return os.path.exists(logdir / CONFIG_FILE)  # noqa: PTH110 - no error where nobody may look


def resumed(
    logdir: Path, changes: Mapping[str, Any], *, trust: bool = False, parts: bool = True
) -> RunConfig:
    """The settings that the run in a directory was last with, some of them changed.

    Args:
        logdir: The run's directory.
        changes: Values by path. `env_options` are added to those of the run.
        trust: Import code outside of this package that the directory names.
        parts: Whether networks and losses count, which are imported when they are made.

    Raises:
        ConfigError: There is no run, it names code that `changes` do not name again, or a change
            does not fit.
    """
    before = read_config(logdir)
    given: dict[str, Any] = {"profile": False, **changes, "logdir": logdir}
    if not Path(before.keys).exists() and (logdir / "keys").exists():
        given.setdefault("keys", "")  # the directory was moved, and its key with it
    if steps_made(logdir):  # it has copied their steps, so they may be gone
        given.setdefault("prefill", [path for path in before.prefill if Path(path).exists()])
    return with_changes(before, given, trust=trust, source=logdir, parts=parts)


def with_changes(
    before: RunConfig,
    changes: Mapping[str, Any],
    *,
    trust: bool,
    source: Path,
    name: bool = True,
    parts: bool = True,
) -> RunConfig:
    """Settings that were read from a file, some of them changed."""
    given = dict(changes)
    if "env_options" in given:
        given["env_options"] = {**before.env_options, **given["env_options"]}
    if not trust:
        refuse_code(source, _parts(before), given, name)
    config = before.changed(given).resolved()
    if not trust:
        refuse_code(source, _networks(config) if parts else (), given, name)
        config = config.changed({**_folders_here(config, given), **_cluster_here(given)})
    return config


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """What is changed, a line for each setting: `batch_size 8 -> 16`."""
    old, new = before.flat(), after.flat()
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    # A run that makes its key itself is given none.
    own = {"logdir", *(["keys"] if not after.keys else [])}
    return [
        f"{path} {_shown(old.get(path))} -> {_shown(new.get(path))}"
        for path in paths
        if path not in own
    ]


def unknown(before: RunConfig, after: RunConfig) -> list[str]:
    """Settings of a run's file that this version does not have, a sentence each."""
    if before.agent == after.agent:  # else its code was not trusted
        before = before.resolved()
    known = before.flat()
    return [
        f"{path}={_shown(value)} of {CONFIG_FILE} has no effect, because this version has no such "
        f"setting: {did_you_mean(path, known, 'see docs/configuration.md.')}"
        for path, value in unknown_settings(before).items()
    ]


def shortened(lines: list[str]) -> str:
    """Several changes in a sentence."""
    rest = len(lines) - _MOST_SHOWN
    return ", ".join(lines[:_MOST_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def steps_made(logdir: Path) -> int:
    """Steps of the newest checkpoint; 0 if there is none."""
    snapshot = Checkpoint(logdir / "ckpt" / "agent").load(parts=())
    return snapshot.step if snapshot else 0


def _parts(config: RunConfig) -> Iterator[tuple[str, str]]:
    if not is_bundled(config.task):
        yield "task", config.task
    if config.agent not in BUILT_IN:
        yield "agent", config.agent
    if set(config.outputs) - set(OUTPUTS):
        yield "outputs", " ".join(config.outputs)


def _networks(config: RunConfig) -> Iterator[tuple[str, str]]:
    named = config.named_code
    for setting in config.settings() if named else ():
        several = setting.value if isinstance(setting.value, dict) else (setting.value,)
        yield from ((setting.path, value) for value in several if value in named)


def _folders_here(config: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The folders of this machine for those that only a file names."""
    agent = config.agent_type
    paths = {f"{agent.name}.{folder}" for folder in agent.folders}
    if "agent_config" in given:
        return {}
    # `dreamer.execution` may be given as a whole.
    named = {path for path in paths if any(f"{path}.".startswith(f"{each}.") for each in given)}
    defaults = RunConfig(agent=config.agent).settings()
    return {each.path: each.value for each in defaults if each.path in paths - named}


def _cluster_here(given: Mapping[str, Any]) -> dict[str, Any]:
    """The Ray cluster that this machine knows, and no packages, where only a file names them: both
    decide which code runs, and where."""
    defaults = RunConfig()
    names = ("ray_address", "ray_runtime_env")
    return {name: getattr(defaults, name) for name in names if name not in given}


def refuse_code(
    source: Path, code: Iterable[tuple[str, str]], given: Mapping[str, Any], name: bool = True
) -> None:
    """Refuse code that a file names and the person does not, by settings and values. Without `name`
    it has to be trusted: naming it again does not help."""
    # `dreamer.model` may be given as a whole.
    missing = [
        (path, value)
        for path, value in code
        if not any(f"{path}.".startswith(f"{each}.") for each in given)
    ]
    if not missing:
        return
    for path, value in missing:
        if path == "task" and value.startswith(PROGRAM):  # trust would not find it either
            raise ConfigError(only_there(value))
    values = " and ".join(value for _, value in missing)
    flags = " ".join(f"--{path.replace('_', '-')} {value}" for path, value in missing)
    fix = f"say {flags}, or --trust (trust=True in Python)" if name else "say --trust"
    raise ConfigError(
        f"{source} names {values}, which is not part of Dreamfleet, and a file does not choose "
        f"code that is imported: {fix}."
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value)
