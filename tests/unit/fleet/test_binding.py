"""What people write as `bind`, and what it means."""

from __future__ import annotations

import socket

import pytest

from dreamfleet.errors import ConfigError
from dreamfleet.fleet.binding import Binding, choose_port, parse_bind

HERE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5", "fd00::5"], "wlan0": []}


@pytest.mark.parametrize(
    ("text", "binding"),
    [
        ("127.0.0.1", Binding("127.0.0.1", "127.0.0.1", 0)),
        ("10.0.0.5:7000", Binding("10.0.0.5", "10.0.0.5", 7000)),
        ("eth0", Binding("10.0.0.5", "10.0.0.5", 0)),
        ("eth0:7000", Binding("10.0.0.5", "10.0.0.5", 7000)),
        ("localhost", Binding("127.0.0.1", "localhost", 0)),
        ("fd00::5", Binding("fd00::5", "fd00::5", 0)),
        ("[fd00::5]:7000", Binding("fd00::5", "fd00::5", 7000)),
    ],
)
def test_names_numbers_and_interfaces(text: str, binding: Binding) -> None:
    assert parse_bind(text, HERE) == binding


def test_every_network_is_shown_as_one_that_others_reach() -> None:
    found = parse_bind("0.0.0.0:7000")
    assert found.listen == "0.0.0.0"
    assert found.port == 7000
    assert found.shown not in ("0.0.0.0", "")
    socket.inet_pton(socket.AF_INET6 if ":" in found.shown else socket.AF_INET, found.shown)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10.0.0.6", r"no address of this machine.*0\.0\.0\.0.*eth0 \(10\.0\.0\.5"),
        ("no-such-host.invalid", "no address of this machine"),
        ("wlan0", "has no address"),
        ("10.0.0.5:seventy", "needs a port"),
        ("10.0.0.5:70000", "needs a port"),
    ],
)
def test_what_is_not_here_is_refused_with_what_is(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_bind(text, HERE)


def test_a_name_that_only_this_machine_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=r"127\.0\.1\.1 on this machine, which no other machine"):
        parse_bind("gpu-box", HERE)


def test_the_next_free_port_is_taken_unless_one_was_asked_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert choose_port("127.0.0.1", port) > port
        assert choose_port("127.0.0.1", port - 1, count=2) > port
        with pytest.raises(ConfigError, match=f"Port {port} of 127.0.0.1 is in use"):
            choose_port("127.0.0.1", port, only=True)
