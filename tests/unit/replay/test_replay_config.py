"""Settings of the replay: JSON, ranges, and the selector that they describe."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
import pytest

from dreamfleet.errors import ConfigError
from dreamfleet.replay.config import Fractions, PriorityConfig, ReplayConfig


def test_defaults_are_those_of_the_reference() -> None:
    config = ReplayConfig()
    assert config.fractions == Fractions(uniform=1.0, priority=0.0, recency=0.0)
    assert config.priority == PriorityConfig(0.8, 0.5, None, True)
    assert config.recency_exponent == 1.0
    assert (config.chunk, config.online) == (1024, True)


def test_settings_survive_json() -> None:
    config = ReplayConfig(fractions=Fractions(0.5, 0.3, 0.2), priority=PriorityConfig(initial=2.0))
    for written in (config, ReplayConfig()):
        text = msgspec.json.encode(asdict(written))
        assert msgspec.json.decode(text, type=ReplayConfig) == written


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": 0},
        {"chunk": 0},
        {"max_bytes": 0},
        {"recency_exponent": -1.0},
        {"priority": {"exponent": -0.1}},
        {"priority": {"max_fraction": 1.1}},
        {"priority": {"initial": -1.0}},
        {"fractions": {"uniform": 1.5, "priority": -0.5}},
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, ReplayConfig)


def test_fractions_that_do_not_add_up_to_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"add up to 1\.3 .*: make them add up to 1"):
        Fractions(uniform=1.0, priority=0.3)
