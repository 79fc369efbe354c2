"""The configuration reference, made from the configuration itself: `make docs`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dreamfleet.agents.dreamer.config import SIZES, size_preset
from dreamfleet.config import RunConfig
from dreamfleet.files import atomic_write
from dreamfleet.presets import PRESETS
from dreamfleet.settings import Setting, describe

_INTRODUCTION = """\
# Configuration

This page is made from the code by `make docs`, and a test keeps it current.

Settings are those of `dreamfleet.RunConfig`. On the command line each has a flag with its path:
`replay.capacity` is `--replay.capacity 100000`, and `dreamer.loss.entropy_scale` is
`--dreamer.loss.entropy-scale 0.001`. A switch needs no value (`--remote-envs`); `no-` before its
name turns it off (`--replay.no-online`). A model is chosen by its size: `--dreamer.model 1m`.
From Python the same is `RunConfig().changed({"dreamer.model": "1m", "replay.capacity": 100_000})`.

What is not given is taken from the preset, or from the run if it exists. The configuration is saved
as `config.json` in the run's directory. A setting that does not exist, is out of its range or
contradicts another is refused at the start, with the fix.
"""


def reference() -> str:
    """The page."""
    config = RunConfig()
    parts = [_INTRODUCTION, "## The run\n"]
    agent = config.agent_type
    words = dict(_descriptions(config, "")) | dict(_descriptions(config.agent_config, agent.name))
    groups: dict[str, list[Setting]] = {}
    for setting in config.settings():
        groups.setdefault(setting.path.rpartition(".")[0], []).append(setting)
    for path, members in groups.items():
        if path:
            parts += [f"## `{path}`\n", f"{words[path]}\n"]
        parts.append(_table(members))
    parts += ["## Presets\n", _presets(), "## Sizes of the model\n", _sizes()]
    return "\n".join(parts)


def main() -> None:
    """Write the page to the file that is named on the command line."""
    atomic_write(Path(sys.argv[1]), reference())


def _descriptions(config: Any, path: str) -> Iterator[tuple[str, str]]:
    """What each class inside a configuration says about itself."""
    if path:
        yield path, (inspect.getdoc(type(config)) or "").split("\n\n")[0].replace("\n", " ")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and field.name != "agent_config":
            yield from _descriptions(value, f"{path}.{field.name}".lstrip("."))


def _table(settings: Sequence[Setting]) -> str:
    rows = ["| setting | value | default | |", "|---|---|---|---|"]
    rows += [
        f"| `{each.path}` | {describe(each.kind)} | {_shown(each.value)} | {each.sentence} |"
        for each in settings
    ]
    return "\n".join(rows) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if str(value) != "" else "empty"


def _presets() -> str:
    """What each preset changes."""
    rows = ["`--preset NAME`; only what differs from the defaults above is shown.\n"]
    rows += ["| setting | " + " | ".join(f"`{name}`" for name in PRESETS) + " |"]
    rows += ["|---" * (1 + len(PRESETS)) + "|"]
    plain = _values(RunConfig())
    settings = {name: _values(config) for name, config in PRESETS.items()}
    for path, value in plain.items():
        values = [settings[name][path] for name in PRESETS]
        if any(each != value for each in values):
            cells = [_shown(each) if each != value else "" for each in values]
            rows.append(f"| `{path}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _values(config: RunConfig) -> dict[str, Any]:
    return {setting.path: setting.value for setting in config.settings()}


def _sizes() -> str:
    names = [field.name for field in dataclasses.fields(size_preset("1m"))]
    shown = [n for n in names if len({str(getattr(size_preset(s), n)) for s in SIZES}) > 1]
    rows = ["`--dreamer.model NAME`; those with a number of parameters are published.\n"]
    rows += ["| size | " + " | ".join(f"`{name}`" for name in shown) + " |"]
    rows += ["|---" * (1 + len(shown)) + "|"]
    for size in SIZES:
        cells = [str(getattr(size_preset(size), name)) for name in shown]
        rows.append(f"| `{size}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
