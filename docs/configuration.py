"""The configuration reference, made from the configuration itself: `make docs`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dreamfleet.agents.dreamer.config import PUBLISHED_SIZES, SIZES, size_preset
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

In a file (`--config run.yaml`) the parts of a path stand inside each other, and flags beside it
replace what it says. `--print-config` prints such a file with every setting of the run, and trains
nothing. YAML needs PyYAML (`pip install pyyaml`); a file that ends in `.json` does not. Code of
your own that a file names (a task, an agent, networks) is named again as a flag, or `--trust` is
added.

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
        f"| `{each.path}` | {describe(each.type)} | {_shown(each.value)} | {each.help} |"
        for each in settings
    ]
    return "\n".join(rows) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if str(value) != "" else "empty"


def _presets() -> str:
    """What each preset changes."""
    rows = [
        "`--preset NAME`, or `--preset NAME,size50m` for another size of its model. Presets have "
        "the defaults above, or what `published` has, and settings of their own.\n",
        "| preset | its own settings |",
        "|---|---|",
    ]
    sizes = [f"size{size}" for size in PUBLISHED_SIZES]
    for name in PRESETS:
        if name not in sizes:
            rows.append(f"| `{name}` | {_own(name) or 'none'} |")
        elif name == sizes[0]:
            names = ", ".join(f"`{size}`" for size in sizes)
            rows.append(f"| {names} | as `published`, with the model of that size |")
    return "\n".join(rows) + "\n"


def _own(name: str) -> str:
    """The settings in which a preset differs from the one that it is closest to."""
    model = PRESETS[name].agent_config.model
    size = next((size for size in SIZES if size_preset(size) == model), None)

    def values(config: RunConfig) -> dict[str, Any]:
        found = {each.path: each.value for each in config.settings() if each.path != "logdir"}
        if size is None:
            return found
        # A model that has a name is one setting.
        found = {path: v for path, v in found.items() if not path.startswith("dreamer.model.")}
        return {**found, "dreamer.model": size if config.agent_config.model == model else ""}

    mine, found = values(PRESETS[name]), {}
    for base in ("default", "published"):
        theirs = values(PRESETS[base])
        changes = [f"`{k}` {_shown(v)}" for k, v in mine.items() if v != theirs[k]]
        found[base] = ("as `published`, with " if base == "published" else "") + ", ".join(changes)
    return found["default"] if name == "published" else min(found.values(), key=len)


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
