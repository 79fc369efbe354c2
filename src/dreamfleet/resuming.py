"""What a run starts from: a preset, or the last settings of the run in its directory.

The latter stand in the `config.json` of the directory. Code that this file or a file of settings
names is imported only if the user names it again or trusts it (see `dreamfleet.trust`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import CONFIG_FILE, RunConfig, read_config
from dreamfleet.errors import ConfigError, MissingExtraError, did_you_mean, import_extra
from dreamfleet.offline import find_source, offline_logdir
from dreamfleet.presets import preset as find_preset
from dreamfleet.settings import Mark, convert, flattened, is_under
from dreamfleet.trust import CodeRef, Trust, admit, code_in

ReadRest = Callable[[str], Mapping[str, Any]]

_MAX_SHOWN = 4


def holds_run(logdir: Path) -> bool:
    """Whether a run was started in this directory."""
    return os.path.exists(logdir / CONFIG_FILE)  # noqa: PTH110 - no error without permission


def resolve(
    given: Mapping[str, Any],
    preset: str | None = None,
    *,
    file: Mapping[str, Any] | None = None,
    source: Path | None = None,
    trust: Trust = False,
    say: Callable[[str], None],
    read_rest: ReadRest = lambda _: {},
) -> RunConfig:
    """The configuration of a run: its last settings, or those of a preset, with changes.

    Args:
        given: What the user has given, by path. `env_options` are added to those it starts from.
        preset: The preset of a new run; None for the default one.
        file: Settings of a file, which those that are given replace.
        source: That file.
        trust: What the user trusts of the code that files name.
        say: Takes a sentence if the run has other settings than the preset.
        read_rest: See `with_changes`.

    Raises:
        ConfigError: A setting does not fit, or a file names code that the user has not named.
    """
    if "env_options" in given:
        mine = convert("env_options", given["env_options"], dict[str, Any])
        given = {**given, "env_options": mine}
    changes = {**(file or {}), **given}
    if file and "env_options" in file:
        theirs = convert("env_options", file["env_options"], dict[str, Any])
        changes["env_options"] = {**theirs, **given.get("env_options", {})}
    base = _new_run(preset, changes)
    place: dict[str, Any] = {name: changes[name] for name in ("task", "logdir") if name in changes}
    logdir = base.changed(place).logdir
    is_new, stated = not holds_run(logdir), {*given}
    if is_new and base.offline and not changes.get("eval_episodes"):
        stated.add("task")  # no environment is made
    config = with_changes(
        base if is_new else _as_it_was(logdir),
        changes,
        source=source or Path(*(base.offline[:1] if is_new else ()) or [logdir]),
        trust=trust,
        stated=stated,
        read_rest=read_rest,
    )
    if preset and not is_new and config.agent == base.agent:
        options = {**base.env_options, **changes.get("env_options", {})}
        wanted = base.changed({**changes, "env_options": options})
        if kept := [line.split()[0] for line in differences(wanted, config)]:
            say(f"The preset {preset} is for new runs: {logdir} keeps its own {shortened(kept)}.")
    return config


def _new_run(preset: str | None, changes: Mapping[str, Any]) -> RunConfig:
    """The settings of a new run. An offline run takes its task from its first source."""
    base = find_preset(preset or "default")
    sources = convert("offline", changes.get("offline", ()), tuple[str, ...])
    if not sources or changes.get("prefill"):
        return base
    theirs = find_source(sources[0]).blueprint.config
    return base.changed(
        {
            "task": theirs.task,
            "env_options": theirs.env_options,
            "logdir": offline_logdir(sources[0]),
            "eval_episodes": 0,
            "offline": sources,
        }
    )


def _as_it_was(logdir: Path) -> RunConfig:
    """The settings that a run goes on with."""
    before = read_config(logdir)
    changes: dict[str, Any] = {"profile": False}
    if not Path(before.keys).exists() and (logdir / "keys").exists():
        changes["keys"] = ""  # the directory was moved, and its key with it
    if steps_made(logdir):  # it has copied their steps, so they may be gone
        changes["prefill"] = tuple(path for path in before.prefill if Path(path).exists())
    return replace(before, **changes)


def with_changes(
    before: RunConfig,
    changes: Mapping[str, Any],
    *,
    source: Path,
    trust: Trust = False,
    stated: Collection[str] | None = None,
    may_state: Collection[str] | None = None,
    read_rest: ReadRest = lambda _: {},
) -> RunConfig:
    """Settings that were read from a file, some of them changed.

    Args:
        before: The settings.
        changes: Values by path. `env_options` are added to those before.
        source: The file, for messages.
        trust: What the user trusts of the code that files name.
        stated: Paths of the changes that the user has given; None for all of them.
        may_state: See `dreamfleet.trust.admit`.
        read_rest: Takes the name of the agent, whose code may be imported, and returns further
            settings that the user has given.

    Raises:
        ConfigError: A change does not fit, or a file names code that the user has not named.
    """
    given, mine = dict(changes), set(changes if stated is None else stated)
    gate = partial(admit, source, trust=trust, may_state=may_state)
    agent = str(given.get("agent", before.agent))
    gate(code_in([("agent", agent)]), stated=mine)
    given |= (rest := read_rest(agent))
    mine |= {*rest}
    options = given.get("env_options", {})
    config = before.changed({**given, "env_options": {**before.env_options, **options}})
    mine = {config.agent_type.name if path == "agent_config" else path for path in mine}
    of_file = flattened({path: value for path, value in given.items() if path not in mine})
    code, own = config.code_refs, {}
    plain = RunConfig(agent=config.agent)
    defaults = {each.path: each.value for each in plain.settings(mark=Mark.LOCAL)}
    for path, value in ((each.path, each.value) for each in config.settings(mark=Mark.LOCAL)):
        if value == defaults[path] or is_under(path, mine) or trust is True:
            continue
        if any(is_under(each, [path]) for each in of_file):
            code.append(CodeRef(path, str(value)))
        else:
            own[path] = defaults[path]  # the run may have been made on another machine
    gate(code, stated=mine)
    return config.changed(own) if own else config


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a file, as JSON or YAML; `settings_text` wrote it, or the user.

    Raises:
        ConfigError: It cannot be read, or holds no settings.
    """
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else _from_yaml(text)
    except OSError as error:
        hint = " Presets are chosen with --preset." if not path.suffix else ""
        raise ConfigError(f"{path} cannot be read: {error.strerror}.{hint}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{path} is not valid: {reason}.") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} is not valid: write a setting and its value in each line.")
    return values


def settings_text(config: RunConfig) -> str:
    """Every setting, as `read_settings` reads it: YAML, or JSON if PyYAML is not installed. The
    directory is left out if it follows from the task."""
    values = config.to_dict()
    if config.has_default_logdir:
        del values["logdir"]
    try:
        text: str = _yaml().safe_dump(values, sort_keys=False)
    except MissingExtraError:
        return json.dumps(values, indent=2)
    return text.rstrip("\n")


def _yaml() -> Any:
    hint = "pip install pyyaml, or write them as JSON."
    return import_extra("yaml", "Settings in YAML", "", hint=hint)


def _from_yaml(text: str) -> Any:
    yaml = _yaml()

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    # YAML 1.1 takes 1e-4 for text.
    number = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


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
        before = before.changed({})
    known = before.flat()
    values = flattened(json.loads((before.logdir / CONFIG_FILE).read_bytes()))
    return [
        f"{path}={_shown(value)} of {CONFIG_FILE} has no effect, because this version has no such "
        f"setting: {did_you_mean(path, known, 'see docs/configuration.md.')}"
        for path, value in values.items()
        if path not in known
    ]


def shortened(lines: list[str]) -> str:
    """Several changes in a sentence."""
    rest = len(lines) - _MAX_SHOWN
    return ", ".join(lines[:_MAX_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def steps_made(logdir: Path) -> int:
    """Steps of the newest checkpoint; 0 if there is none."""
    snapshot = Checkpoint(logdir / "ckpt" / "agent").load(parts=())
    return snapshot.step if snapshot else 0


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value)
