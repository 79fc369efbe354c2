"""What every configuration class can do.

A configuration class is a frozen dataclass. Each field states a setting once: its type holds the
range and the marks (what else is true of it, see `Mark`), its default is the setting's default,
and the text under it is its help. Checks, flags, files and the reference page are made from that.

    @dataclass(frozen=True)
    class Optimizer:
        warmup: Annotated[int, Meta(ge=0)] = 1000
        \"\"\"Updates over which the learning rate rises from zero.\"\"\"

        def __post_init__(self) -> None:
            validate(self)

Classes may hold each other. A setting has a path then, such as `loss.horizon`. A class that offers
whole instances by name (sizes of a model) has a static method `named` that returns them. Fields
with another name in paths are in its property `labels`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import importlib
import inspect
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import msgspec

from dreamfleet.errors import ConfigError, did_you_mean

Config = TypeVar("Config")
Type = TypeVar("Type")
Function = TypeVar("Function", bound=Callable[..., Any])
_cached = typing.cast(Callable[[Function], Function], cache)  # mypy takes types for unhashable


class Mark(enum.Enum):
    """What else is true of a setting, or of a whole class of settings."""

    INCIDENTAL = "it does not change which experiment a run is"
    FIXED = "it cannot be changed when a run is resumed"
    PER_HOST = "the hosts of a run may differ in it"
    PER_ROLE = "a role that is started by hand may have another value than the run"
    JOINED = "machines that join the run are told it"
    CODE = "it may name code (`package.module:name`), see `dreamfleet.trust`"
    LOCAL = "each machine chooses it, and never a file, because it decides which code runs there"


Incidental = Annotated[Type, Mark.INCIDENTAL]
Fixed = Annotated[Type, Mark.FIXED]
PerHost = Annotated[Type, Mark.PER_HOST]
PerRole = Annotated[Type, Mark.PER_ROLE, Mark.PER_HOST]
Joined = Annotated[Type, Mark.JOINED]
Code = Annotated[Type, Mark.CODE]
Local = Annotated[Type, Mark.LOCAL]


@dataclasses.dataclass(frozen=True)
class Section:
    """The part of the short help that shows a setting."""

    title: str


# The ranges that many settings have.
Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]
ZeroOrMore = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]

_EXACT = 2**53  # a float holds every integer below it
_MIN_SIMILARITY = 0.7  # of two names, from 0 to 1, of which one may be the other mistyped


def require(condition: bool, message: str) -> None:
    """Refuse settings that do not go together.

    Raises:
        ConfigError: The condition does not hold.
    """
    if not condition:
        raise ConfigError(message)


class SettingError(ConfigError):
    """A value that a setting cannot have."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a configuration, or one parameter of a command."""

    path: str
    type: Any
    """With its range."""
    value: Any
    """Of a command its default."""
    help: str
    marks: frozenset[object] = frozenset()
    """Its own, and those of the classes that it stands in."""
    positional: bool = False

    @property
    def flag(self) -> str:
        """What is typed: --train-ratio, or LOGDIR."""
        label = self.path.replace("_", "-")
        return label.upper() if self.positional else f"--{label}"

    @property
    def negation(self) -> str:
        """What switches it off: --replay.no-online."""
        group, dot, label = self.flag.removeprefix("--").rpartition(".")
        return f"--{group}{dot}no-{label}"

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value: --greedy, and --no-greedy."""
        return type_info(self.type).base is bool

    @property
    def takes_several(self) -> bool:
        """Whether it takes several words."""
        return type_info(self.type).base in (tuple, dict)

    @property
    def section(self) -> str:
        """The title of the short help that shows it; empty for none."""
        return next((mark.title for mark in self.marks if isinstance(mark, Section)), "")


class TypeInfo(NamedTuple):
    """A type without its marks: `tuple` of `tuple[int, ...]`, or `Union` of several types."""

    base: Any
    inner: tuple[Any, ...]
    """What stands in its brackets."""
    optional: bool
    ranges: tuple[msgspec.Meta, ...]


def type_info(kind: Any) -> TypeInfo:
    """What a type of a setting consists of."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        found = type_info(inner[0])
        ranges = tuple(each for each in inner[1:] if isinstance(each, msgspec.Meta))
        return found._replace(ranges=ranges + found.ranges)
    if origin not in (typing.Union, types.UnionType):
        return TypeInfo(origin or kind, inner, False, ())
    some = tuple(each for each in inner if each is not type(None))
    found = type_info(some[0]) if len(some) == 1 else TypeInfo(typing.Union, some, False, ())
    return found._replace(optional=len(some) < len(inner))


def validate(config: Any) -> None:
    """Check every field of a configuration against its type and range. For `__post_init__`.

    Values are normalised on the way: a list becomes a tuple, text a path, 1 becomes 1.0.

    Raises:
        SettingError: A value does not fit.
    """
    for name, kind in _fields(type(config)).items():
        object.__setattr__(config, name, convert(name, getattr(config, name), kind))


def convert(path: str, value: Any, kind: Any) -> Any:
    """The value as this type, which may hold a range. A class that offers instances by name takes
    their names too.

    Raises:
        SettingError: It does not fit.
    """
    base, given = type_info(kind).base, value
    value = _plain(value)
    if isinstance(value, PurePath):
        value = str(value)
    elif isinstance(value, (tuple, list)):
        value = [str(each) if isinstance(each, PurePath) else each for each in value]
    if base is int and isinstance(value, float) and abs(value) < _EXACT and value.is_integer():
        value = int(value)  # 1e6 stands for a million
    try:
        if dataclasses.is_dataclass(base):
            value = _instances(base).get(value, value) if isinstance(value, str) else value
            if not isinstance(value, typing.cast(type, base)):
                raise ValueError
            return value
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
        return msgspec.convert(value, kind, dec_hook=_decode)
    except (ValueError, msgspec.ValidationError):
        sentence = f"{path}={given} is not valid: use {describe(kind)}."
        raise SettingError(sentence) from None


def settings(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a configuration, also of those inside it, in order."""
    return (each for each in _walk(config, prefix) if not dataclasses.is_dataclass(each.value))


def switchable_groups(config: Any, prefix: str = "") -> Iterator[Setting]:
    """The classes inside a configuration that can be replaced by an instance with a name."""
    for each in _walk(config, prefix):
        if dataclasses.is_dataclass(each.value) and (names := _instances(type(each.value))):
            text = f"{each.help} One of {', '.join(names)}.".strip()
            yield Setting(each.path, str, None, text)


Own = ParamSpec("Own")
Fields = ParamSpec("Fields")
Result = TypeVar("Result", covariant=True)


class TakesSettings(Protocol[Own, Fields, Result]):
    """A function that takes the settings of a class by their names, beside its own arguments."""

    @overload
    def __call__(self, *args: Own.args, **kwargs: Own.kwargs) -> Result: ...
    @overload
    def __call__(self, *args: Fields.args, **kwargs: Fields.kwargs) -> Result: ...


def takes_settings(
    kind: Callable[Fields, object],
) -> Callable[[Callable[Own, Result]], TakesSettings[Own, Fields, Result]]:
    """Give a function's `**settings` the names, types and defaults of a configuration class, for
    editors, notebooks and `help`, without a second list of them."""

    def decorate(function: Callable[Own, Result]) -> TakesSettings[Own, Fields, Result]:
        signature, hints = inspect.signature(function), typing.get_type_hints(kind)
        *own, rest = signature.parameters.values()
        own += [
            each.replace(kind=each.KEYWORD_ONLY, annotation=hints[name])
            for name, each in inspect.signature(kind).parameters.items()
            if name not in signature.parameters
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*own, rest])
        return typing.cast(TakesSettings[Own, Fields, Result], function)

    return decorate


def is_under(path: str, paths: Iterable[str]) -> bool:
    """Whether a path is one of these, or stands inside one of them."""
    return any(f"{path}.".startswith(f"{each}.") for each in paths)


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their path, from mappings inside each other."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flattened(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def _walk(config: Any, prefix: str, outer: frozenset[object] = frozenset()) -> Iterator[Setting]:
    """Every field, and behind a class its own."""
    helps, labels = field_helps(type(config)), getattr(config, "labels", {})
    for name, kind in _fields(type(config)).items():
        value, path = getattr(config, name), f"{prefix}{labels.get(name, name)}"
        marks = outer | {*getattr(kind, "__metadata__", ())}
        yield Setting(path, kind, value, helps.get(name, ""), marks)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{path}.", marks)


@_cached
def field_helps(kind: type) -> Mapping[str, str]:
    """The text under each field of a class, which Python itself throws away."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        source = inspect.getsource(typing.cast(type, each))
        body = ast.parse(inspect.cleandoc(source)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def changed(
    config: Config, changes: Mapping[str, Any], prefix: str = "", *, strict: bool = True
) -> Config:
    """A configuration with some settings changed.

    Args:
        config: An instance of a configuration class.
        changes: Values by path: `{"loss.horizon": 100}`. A class inside takes its settings as a
            mapping, an instance, or the name of one (`{"model": "1m"}`).
        prefix: Where the configuration itself stands, for messages.
        strict: Whether a setting that does not exist is an error, or ignored.

    Raises:
        ConfigError: There is no such setting, or its value does not fit.
    """
    inside: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    fields, labels = _fields(type(config)), getattr(config, "labels", {})
    names = {label: name for name, label in labels.items()}
    for path, value in changes.items():
        label, _, rest = str(path).partition(".")
        name = names.get(label, label)
        is_group = name in fields and dataclasses.is_dataclass(getattr(config, name))
        if not strict and name not in fields:
            continue
        if name not in fields or (rest and not is_group):
            known = [*settings(config, prefix), *switchable_groups(config, prefix)]
            raise unknown_setting(f"{prefix}{path}", [each.path for each in known])
        if rest:
            inside.setdefault(name, {})[rest] = value
        elif is_group and isinstance(value, Mapping):
            inside[name] = {**value, **inside.get(name, {})}
        else:
            values[name] = convert(f"{prefix}{label}", value, fields[name])
    for name, inner in inside.items():
        start = values.get(name, getattr(config, name))
        group = f"{prefix}{labels.get(name, name)}."
        values[name] = changed(start, inner, group, strict=strict)
    result: Config = dataclasses.replace(typing.cast(Any, config), **values)
    return result


def unknown_setting(path: str, known: Iterable[str]) -> ConfigError:
    """The error that there is no such setting; it names the one that was meant."""
    close = closest_setting(path, known)
    hint = f"did you mean {close!r}?" if close else "see docs/configuration.md."
    if close and "." in close:
        hint += f" As an argument of a function: {close.replace('.', '__')}."
    return ConfigError(f"There is no setting {path!r}: {hint}")


WORDS_ELSEWHERE = {
    "task": "env env_id env_name environment gym_id",
    "env_options": "env_kwargs env_config",
    "envs": "n_envs num_envs workers num_workers",
    "steps": "total_timesteps timesteps total_steps max_steps num_steps total_frames",
    "logdir": "log_dir output_dir save_dir save_path exp_name run_name",
    "preset": "configs",
    "outputs": "wandb use_wandb track wandb_project_name tensorboard tensorboard_log",
    "seed": "random_seed",
    "target_score": "reward_threshold",
    "eval_episodes": "n_eval_episodes num_eval_episodes",
    "eval_every": "eval_freq eval_interval",
    "save_every": "save_freq checkpoint_freq checkpoint_every",
    "log_every": "log_freq log_interval",
    "from_checkpoint": "checkpoint load_path pretrained",
    "batch_length": "seq_len sequence_length",
    "train_ratio": "gradient_steps train_freq replay_ratio utd_ratio",
    "replay.capacity": "buffer_size replay_size replay.size",
    "dreamer.model": "policy_kwargs net_arch model_size size",
    "dreamer.optimizer.learning_rate": "lr",
    "dreamer.optimizer.clip": "max_grad_norm grad_clip agc",
    "dreamer.loss.horizon": "gamma discount",
    "dreamer.loss.return_lambda": "gae_lambda lam",
    "dreamer.loss.entropy_scale": "ent_coef entropy_coef actent",
    "dreamer.loss.imag_length": "imag_horizon",
    "dreamer.execution.train_platform": "device cuda gpu platform",
    "dreamer.execution.compute_dtype": "precision dtype",
}
"""Settings, and what Stable-Baselines3, CleanRL and the reference implementation call them."""


def closest_setting(name: str, known: Iterable[str]) -> str | None:
    """The path that was probably meant: by the word of another library, by the last part of a path,
    or despite a typing error; None if none is close."""
    paths = list(known)
    names = {path.rpartition(".")[2]: path for path in reversed(paths)}
    for path, words in WORDS_ELSEWHERE.items():
        names |= dict.fromkeys(words.split(), path) if path in paths else {}
    names |= {path: path for path in paths}
    name = name.lstrip("-").replace("-", "_")
    for word in (name, name.rpartition(".")[2]):
        for close in difflib.get_close_matches(word, names, 1, _MIN_SIMILARITY):
            return names[close]
    return None


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as what JSON can hold."""
    labels = getattr(config, "labels", {})
    return {
        labels.get(each.name, each.name): to_dict(value)
        if dataclasses.is_dataclass(value := getattr(config, each.name))
        else json.loads(json.dumps(value, default=str))
        for each in dataclasses.fields(config)
    }


def read(words: Sequence[str], kind: Any) -> Any:
    """What was typed, as a value of this type as far as it can be one; `convert` judges it.

    Args:
        words: One for most types, several for lists and NAME=VALUE pairs.
        kind: The type.
    """
    base, inner, optional, _ = type_info(kind)
    word = " ".join(words)
    if optional and word in ("None", "none", "null"):
        return None
    if base is dict and not word.startswith("{"):
        return pairs(words)
    if base is tuple and not word.startswith("["):
        return tuple(read([each], inner[0]) for each in words)
    if base is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    for number in (int, float) if base in (int, float) else ():
        with suppress(ValueError):
            return number(word)
    return _json(word) if base in (Any, tuple, dict) else word


def pairs(texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; values are JSON where they can be, and text otherwise.

    Raises:
        ConfigError: One is no pair.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"Write options as NAME=VALUE, not {text!r}.")
        found[name] = _json(value)
    return found


def describe(kind: Any) -> str:
    """What may be given, in words: "a whole number, at least 1"."""
    base, inner, optional, ranges = type_info(kind)
    if base is typing.Union:
        text = " or ".join(map(describe, inner))
    elif base is Literal:
        text = f"one of {', '.join(map(str, inner))}"
    elif base is tuple:
        many = "a list" if ... in inner or not inner else f"{len(inner)} values"
        text = f"{many}, each entry {describe(inner[0])}" if inner else many
    elif dataclasses.is_dataclass(base):
        names = ", ".join(_instances(base))
        text = f"one of {names}" if names else "the settings inside it"
    else:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        words |= {Path: "a path", dict: "NAME=VALUE pairs"}
        text = words.get(base, "any value")
        if base is dict and inner and inner[1] is not Any:
            text += f", each value {describe(inner[1])}"
    bounds = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [
        f"{word} {getattr(each, name):g}"
        for each in ranges
        for name, word in bounds.items()
        if getattr(each, name) is not None
    ]
    return text + (f", {' and '.join(limits)}" if limits else "") + " or None" * optional


@_cached
def _fields(kind: type) -> Mapping[str, Any]:
    """The type of each field of a class, with its range and marks."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(typing.cast(Any, kind))}


def _instances(kind: Any) -> Mapping[str, Any]:
    """The instances that a configuration class offers, by name; empty if it offers none."""
    named = getattr(kind, "named", None)
    found: Mapping[str, Any] = named() if callable(named) else {}
    return found


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's own, also inside of a mapping; paths stay paths."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value


def _decode(kind: type, value: Any) -> Any:
    """What msgspec does not know itself."""
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if kind is type(value):
        return value
    raise TypeError


# --- objects that a setting names as package.module:name -----------------------------------------


def load_object(path: str) -> object:
    """What `package.module:name` names; modules of the current directory are found as well.

    Raises:
        ConfigError: There is no such module or no such name in it, or it cannot be imported.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise ConfigError(f"{path!r} names no object: write package.module:name.")
    loaded = load_module(module, path)
    try:
        found: object = attrgetter(name)(loaded)
    except AttributeError:
        hint = did_you_mean(name, vars(loaded), "check the spelling.")
        raise ConfigError(f"The module {module!r} has no {name!r}: {hint}") from None
    return found


def load_module(module: str, path: str) -> types.ModuleType:
    """The module that is part of `path`; see `load_object`."""
    if module.endswith(".py") or "/" in module:
        file, name = PurePath(module.removesuffix(".py")), path.rpartition(":")[2]
        dotted = file.name if file.is_absolute() else ".".join(file.parts)
        raise ConfigError(f"{path!r} names a file: drop .py and write {dotted}:{name}.")
    # Installed commands, unlike `python file.py`, do not look into the current directory. It goes
    # last, so that nothing installed is shadowed.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that exists but imports one that does not has another problem.
        if not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{module} cannot be imported: {error}; install it.") from error
        raise ConfigError(
            f"There is no module {module!r}, which {path!r} names: install it, or start from the "
            "directory that holds it."
        ) from None
