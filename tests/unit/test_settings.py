"""A setting is stated once: range, sentence and path come from the configuration class."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from msgspec import Meta

from dreamfleet.errors import ConfigError
from dreamfleet.settings import (
    SettingError,
    changed,
    describe,
    field_helps,
    pairs,
    read,
    settings,
    to_dict,
    validate,
)


@dataclass(frozen=True)
class Inner:
    horizon: Annotated[float, Meta(gt=1)] = 2.0
    """Steps that are looked
    ahead."""
    widths: tuple[Annotated[int, Meta(ge=1)], ...] = (1,)
    """Width of each layer."""

    def __post_init__(self) -> None:
        validate(self)

    @staticmethod
    def named() -> dict[str, Inner]:
        return {"wide": Inner(widths=(64, 64))}


@dataclass(frozen=True)
class Outer:
    folder: Path = Path("here")
    """Where it is."""
    inner: Inner = field(default_factory=Inner)
    """Another class."""
    plain: Optional = field(default_factory=lambda: Optional())
    """One without names."""
    count: Annotated[int, Meta(ge=0, le=5)] = 1
    """How many."""
    mode: Literal["slow", "fast"] = "slow"
    """How."""
    target: float | None = None
    """When it ends."""
    switch: bool = False
    """On or off."""
    options: dict[str, Any] = field(default_factory=dict)
    """Anything else."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class Optional:
    name: str = ""
    """A text."""


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"count": 6}, "count=6 is not valid: use a whole number, at least 0 and at most 5."),
        ({"count": True}, "count=True is not valid: use a whole number"),
        ({"count": 1.5}, "count=1.5 is not valid: use a whole number"),
        ({"mode": "quick"}, "mode=quick is not valid: use one of slow, fast."),
        ({"target": "high"}, "target=high is not valid: use a number or None."),
        ({"target": math.nan}, "target=nan is not valid: use a number"),
        ({"switch": 1}, "switch=1 is not valid: use true or false."),
        ({"options": 3}, "options=3 is not valid: use NAME=VALUE pairs."),
        ({"folder": 3}, "folder=3 is not valid: use a path."),
        ({"inner": 3}, "inner=3 is not valid: use one of wide."),
    ],
)
def test_a_value_out_of_range_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        Outer(**values)
    assert str(caught.value).startswith(sentence)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert str(again) == str(caught.value)


def test_values_are_normalised() -> None:
    made = Outer(folder="there", count=np.int64(3), target=4)  # type: ignore[arg-type]
    assert made == Outer(folder=Path("there"), count=3, target=4.0)
    assert isinstance(made.count, int)
    assert isinstance(made.target, float)
    assert Inner(widths=[2, 3]).widths == (2, 3)  # type: ignore[arg-type]


def test_settings_are_changed_by_their_path() -> None:
    made = changed(Outer(), {"inner": "wide", "inner.horizon": 7, "count": 2})
    assert made == Outer(count=2, inner=Inner(7.0, (64, 64)))
    assert changed(Outer(), {"inner": Inner(9.0)}).inner.horizon == 9.0
    for path, value, words in (
        ("inner.horizon", 0, "inner.horizon=0 is not valid: use a number, above 1."),
        ("inner.horizn", 3, "There is no setting 'inner.horizn': did you mean 'inner.horizon'?"),
        ("count.more", 3, "There is no setting 'count.more'"),
        ("zzz", 3, "There is no setting 'zzz': see docs/configuration.md."),
        ("inner", "thin", "inner=thin is not valid: use one of wide."),
        ("plain", "any", "plain=any is not valid: use the settings inside it."),
    ):
        with pytest.raises(ConfigError) as caught:
            changed(Outer(), {path: value})
        assert str(caught.value).startswith(words)


def test_a_configuration_can_be_written_down_and_read() -> None:
    made = Outer(target=2.0, inner=Inner(4.0, (3,)), folder=Path("there"))
    plain = to_dict(made)
    assert plain["inner"] == {"horizon": 4.0, "widths": [3]}
    assert changed(Outer(), plain) == made
    plain["hats"] = plain["inner"]["hats"] = 3
    del plain["count"]
    assert changed(Outer(), {**plain, "count": 1}, strict=False) == made
    with pytest.raises(ConfigError, match=r"^inner\.horizon=-1 is not valid"):
        changed(Outer(), {"inner": {"horizon": -1}}, strict=False)


def test_every_setting_has_its_path_and_help() -> None:
    found = {setting.path: setting for setting in settings(Outer())}
    assert list(found)[:4] == ["folder", "inner.horizon", "inner.widths", "plain.name"]
    assert found["inner.horizon"].help == "Steps that are looked ahead."
    assert field_helps(Outer)["inner"] == "Another class."
    assert describe(found["inner.widths"].type) == "a list, each entry a whole number, at least 1"


@pytest.mark.parametrize(
    ("words", "kind", "value"),
    [
        (["3"], int, 3),
        (["abc"], int, "abc"),
        (["1e-3"], Annotated[float, Meta(ge=0)], 1e-3),
        (["None"], float | None, None),
        (["2"], float | None, 2.0),
        (["false"], bool, False),
        (["2", "3"], tuple[int, ...], (2, 3)),
        (["[2,3]"], tuple[int, ...], (2, 3)),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        (["12"], str, "12"),
        (["a=[1,2]", "b=x"], dict[str, Any], {"a": (1, 2), "b": "x"}),
    ],
)
def test_what_is_typed_becomes_a_value(words: list[str], kind: Any, value: Any) -> None:
    assert read(words, kind) == value


def test_pairs() -> None:
    texts = ["a=1", "b.c=[2,3]", "d=true", "e=text", "f=x=y"]
    assert pairs(texts) == {"a": 1, "b.c": (2, 3), "d": True, "e": "text", "f": "x=y"}
    for wrong in ("a", "=1"):
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            pairs([wrong])
