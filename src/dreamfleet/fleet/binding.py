"""What the setting `bind` means: where to listen, and what other machines are told to type."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from typing import NamedTuple

import psutil

from dreamfleet.errors import ConfigError

JOIN_PORT = 5550
"""Where machines join, if nothing else is asked for; the other servers follow it."""
_PORTS_TRIED = 200
_EVERYWHERE = ("0.0.0.0", "*", "::")
_NOWHERE = "192.0.2.1"  # an address for examples, which is never in use


class Binding(NamedTuple):
    """Where to listen (a number, or 0.0.0.0 for all), what other machines type, and the port, which
    is 0 if any will do."""

    listen: str
    shown: str
    port: int


Addresses = Mapping[str, Collection[str]]
"""The addresses of each network interface."""


def parse_bind(text: str, here: Addresses | None = None) -> Binding:
    """Where to listen, as the setting `bind` says: 0.0.0.0, a name or an address of this machine,
    or an interface, each also with :PORT. Anything else is a `ConfigError`."""
    host, port = _split(text)
    interfaces = _interfaces() if here is None else here
    if host in _EVERYWHERE:
        return Binding("::" if host == "::" else "0.0.0.0", _main_address(interfaces), port)
    if host in interfaces:
        own = sorted(interfaces[host], key=lambda each: ":" in each)
        if not own:
            raise ConfigError(
                f"bind={text}: the interface {host} has no address: bring it up, or choose another."
            )
        return Binding(own[0], own[0], port)
    numbers = _numbers(host)
    known = {address for own in interfaces.values() for address in own}
    mine = [number for number in numbers if number in known or _loopback(number)]
    if not mine:
        has = ", ".join(f"{name} ({', '.join(own)})" for name, own in interfaces.items() if own)
        raise ConfigError(
            f"bind={text}: {host} is no address of this machine. Write 0.0.0.0 for all of its "
            f"networks, or one of them: {has}."
        )
    far = [number for number in mine if not _loopback(number)]
    if not far and host not in mine and host != "localhost":
        raise ConfigError(
            f"bind={text}: {host} resolves to {mine[0]} on this machine, which no other machine "
            f"can reach. Write 0.0.0.0, or an address of this machine's."
        )
    return Binding((far or mine)[0], host, port)


def choose_port(
    listen: str, wanted: int, taken: Collection[int] = (), *, only: bool = False, count: int = 1
) -> int:
    """A free port: the wanted one, or else the next, unless there is no other than `only` that one.
    Of several, which follow each other, it is the first."""
    for port in range(wanted, min(wanted + (1 if only else _PORTS_TRIED), 65536)):
        several = range(port, min(port + count, 65536))
        if len(several) == count and all(p not in taken and _free(listen, p) for p in several):
            return port
    raise ConfigError(
        f"Port {wanted} of {listen} is in use: end the program that listens there, or choose "
        "another one with --bind HOST:PORT."
        if only
        else f"There is no free port from {wanted} to {wanted + _PORTS_TRIED - 1} at {listen}."
    )


def _split(text: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if text.strip().count(":") > 1 and not text.strip().startswith("["):
        host, colon, port = text.strip(), "", ""  # a number of IPv6 without a port
    if not colon:
        return text.strip().strip("[]"), 0
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65535 and host):
        raise ConfigError(f"bind={text} needs a port from 1 to 65534 after its last colon.")
    return host.strip("[]"), int(port)


def _interfaces() -> dict[str, list[str]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [
            each.address
            for each in own
            # Those of a link alone need to be told the link.
            if each.family in families and not each.address.lower().startswith("fe80")
        ]
        for name, own in psutil.net_if_addrs().items()
    }


def _numbers(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def _main_address(interfaces: Addresses) -> str:
    """The address by which most others reach this machine: that of its way out, or else any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_NOWHERE, 9))  # which sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            pass
    all_of_them = [address for own in interfaces.values() for address in own]
    far = [address for address in all_of_them if not _loopback(address)]
    return (far or ["127.0.0.1"])[0]


def _loopback(number: str) -> bool:
    return ipaddress.ip_address(number.partition("%")[0]).is_loopback


def _free(listen: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.socket(family) as probe:
        # As libzmq does: a port that was in use a moment ago is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen, port))
        except OSError:
            return False
    return True
