import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transport_processes import ServerProcess, server_process

from dreamfleet.transport import (
    AddressError,
    Client,
    Disconnected,
    Keys,
    SecurityError,
    Server,
    resolve,
)
from dreamfleet.transport.address import clean_up, parse, prepare


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        ("localhost:5555", "tcp://localhost:5555"),
        ("[::1]:5555", "tcp://[::1]:5555"),
        ("tcp://[fe80::1]:80", "tcp://[fe80::1]:80"),
        ("*:5555", "tcp://*:5555"),
        ("ipc:///tmp/x/y", "ipc:///tmp/x/y"),
    ],
)
def test_addresses_a_person_may_write(text: str, meaning: str) -> None:
    assert parse(text).text == meaning


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "tcp://",
        "tcp://host",
        "http://host:80",
        ":80",
        "ipc://",
        "inproc://a",
        "tcp://two words:80",
    ],
)
def test_what_is_not_an_address_is_shown_what_one_looks_like(text: str) -> None:
    with pytest.raises(AddressError, match=r"is not an address; write ipc:///"):
        parse(text)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", ""])
def test_a_port_must_be_one(port: str) -> None:
    with pytest.raises(AddressError, match=r"from 1 to 65535|is not an address"):
        parse(f"tcp://localhost:{port}")


def test_a_path_that_is_too_long_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r"too long a path .* or ipc://\{auto\}"):
        parse(f"ipc://{tmp_path}/{'x' * 120}")


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("*:1", False),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("example.org:1", False),
        ("ipc:///tmp/x/y", True),
    ],
)
def test_what_is_reachable_from_outside(text: str, loopback: bool) -> None:
    assert parse(text).loopback == loopback


def test_auto_finds_something_free() -> None:
    assert resolve("ipc://{auto}") != resolve("ipc://{auto}")
    address = resolve("127.0.0.1:{auto}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(address.rpartition(":")[2])))
    assert resolve("tcp://127.0.0.1:77") == "tcp://127.0.0.1:77"


def test_auto_in_a_directory(tmp_path: Path) -> None:
    path = Path(resolve(f"ipc://{tmp_path}/run-{{auto}}").removeprefix("ipc://"))
    assert path.parent == tmp_path
    assert path.name.startswith("run-")


def test_a_resolved_address_can_be_served_and_called() -> None:
    for text in ("ipc://{auto}", "127.0.0.1:{auto}"):
        address = resolve(text)
        server = Server(address)
        server.bind("ping", lambda: "pong")
        with server, Client(address) as client:
            assert server.address == address
            assert client.ping().result(20) == "pong"


def test_socket_files_live_in_private_directories(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    with Server(f"ipc://{directory}/socket") as server:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert server.address == f"ipc://{directory}/socket"
    assert not (directory / "socket").exists()
    with Server("ipc://{auto}") as server:
        path = Path(server.address.removeprefix("ipc://"))
        assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o770])
def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(SecurityError, match="chmod 700"):
        Server(f"ipc://{directory}/socket")


def test_a_socket_file_left_by_a_killed_server_is_no_obstacle(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    path = directory / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    server = Server(f"ipc://{path}")
    server.bind("ping", lambda: "pong")
    with server, Client(server.address) as client:
        assert client.ping().result(20) == "pong"


def test_an_address_to_listen_at_is_no_address_to_connect_to() -> None:
    words = "is not an address to connect to: write the host name or IP address"
    with pytest.raises(AddressError, match=words):
        Client("tcp://*:5555")
    with (
        Client(lambda: "tcp://*:5555", patience=0.2) as client,
        pytest.raises(Disconnected, match=words),
    ):
        client.ping().result(20)


def test_a_server_that_listens_everywhere_is_found_by_name() -> None:
    server = Server("tcp://*:{auto}", keys=(keys := Keys.generate()))
    server.bind("ping", lambda: "pong")
    with server, Client(server.address.replace("*", "127.0.0.1"), keys=keys) as client:
        assert client.ping().result(20) == "pong"


# --- names ---------------------------------------------------------------------------------------


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names stand for, instead of what this machine says."""
    known: dict[str, list[str]] = {}

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (number, port, 0, 0))
            if ":" in number
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, port))
            for number in known[host]
        ]

    monkeypatch.setattr("dreamfleet.transport.address.socket.getaddrinfo", getaddrinfo)
    return known


def ping_server(address: str, keys: Keys | None = None) -> Server:
    try:
        server = Server(address, keys=keys)
    except AddressError as error:
        if "[::1]" in address:
            pytest.skip(f"this machine has no IPv6: {error}")
        raise
    server.bind("ping", lambda: "pong")
    return server


@pytest.mark.parametrize("listens", ["127.0.0.1", "127.0.0.2", "[::1]"])
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_server_is_found_at_any_number_of_its_name(
    names: dict[str, list[str]], listens: str, encrypted: bool
) -> None:
    names["machine"] = ["::1", "127.0.0.1", "127.0.0.2"]
    keys = Keys.generate() if encrypted else None
    with ping_server(f"tcp://{listens}:{{auto}}", keys) as server:
        port = server.address.rpartition(":")[2]
        with Client(f"tcp://machine:{port}", keys=keys) as client:
            assert client.ping().result(120) == "pong"


def test_a_name_is_asked_for_again_when_its_server_is_gone(names: dict[str, list[str]]) -> None:
    names["machine"] = ["127.0.0.1"]
    with ping_server("tcp://127.0.0.1:{auto}") as server:
        port = server.address.rpartition(":")[2]
        client = Client(f"tcp://machine:{port}")
        assert client.ping().result(120) == "pong"
    names["machine"] = ["127.0.0.2"]
    with client, ping_server(f"tcp://127.0.0.2:{port}"):
        assert client.ping().result(120) == "pong"


def test_a_name_that_is_unknown_yet_is_waited_for(names: dict[str, list[str]]) -> None:
    with ping_server("tcp://127.0.0.1:{auto}") as server:
        port = server.address.rpartition(":")[2]
        with (
            Client(f"tcp://machine:{port}", patience=0.1) as client,
            pytest.raises(Disconnected, match="the name of its machine is not known"),
        ):
            client.ping().result(120)
        with Client(f"tcp://machine:{port}") as client:
            future = client.ping()
            assert not future.done()
            names["machine"] = ["127.0.0.1"]
            assert future.result(120) == "pong"


def test_an_address_that_cannot_be_bound_says_why() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"Replay cannot bind tcp://127.0.0.1:{port}"):
            Server(f"127.0.0.1:{port}", "Replay")


# --- what killed processes leave behind ----------------------------------------------------------


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory, of this process and of those that it starts."""
    with tempfile.TemporaryDirectory() as name:  # the path of a socket file has to be short
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def folder(address: str) -> Path:
    return Path(address.removeprefix("ipc://")).parent


def listener(directory: Path, backlog: int | None) -> socket.socket:
    """A socket that holds no lock, and listens if there is a backlog."""
    directory.mkdir(mode=0o700)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(directory / "socket"))
    if backlog is not None:
        made.listen(backlog)
    return made


def test_next_server_removes_what_killed_ones_have_left_and_nothing_else(temporary: Path) -> None:
    killed = [ServerProcess("ipc://{auto}") for _ in range(2)]
    assert len({folder(each.address) for each in killed}) == 2
    # Of a process that is alive in another container, this one sees an id that no process has.
    resolving = "import dreamfleet.transport as t; print(t.resolve('ipc://{auto}'))"
    done = subprocess.run([sys.executable, "-c", resolving], capture_output=True, check=True)
    server = Server(done.stdout.decode().strip())
    server.bind("ping", lambda: "pong")
    name = "dreamfleet-0000001-{:08x}-000000000000"
    dead, old, full, kept, opened, target = (temporary / name.format(n) for n in range(6))
    with listener(dead, None), listener(old, 1), listener(full, 0), listener(opened, None):
        waiting = socket.socket(socket.AF_UNIX)  # so that no further one is taken in
        waiting.connect(str(full / "socket"))
        opened.chmod(0o755)
        kept.mkdir(mode=0o700)
        (kept / "notes").write_text("of a person")
        elsewhere = temporary / "elsewhere"
        listener(elsewhere, None).close()
        target.symlink_to(elsewhere)
        prepare(starting := parse("ipc://{auto}"))  # does not listen yet
        for each in killed:
            each.kill()
        left = {each.name for each in temporary.iterdir()}
        with server, server_process() as alive, Client(server.address) as client:
            assert client.ping().result(120) == "pong"
            gone = {folder(each.address).name for each in killed} | {dead.name}
            made = {folder(alive.address).name}
            assert {each.name for each in temporary.iterdir()} == left - gone | made
        waiting.close()
        clean_up(starting, None)
    assert (elsewhere / "socket").is_socket()
    assert (kept / "notes").read_text() == "of a person"


def test_a_directory_that_is_removed_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may take it for a dead one's for a moment."""
    taken: list[Path] = []
    real = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_SH and not taken:
            taken.extend(temporary.iterdir())
            taken[0].rmdir()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    server = Server("ipc://{auto}")
    server.bind("ping", lambda: "pong")
    with server, Client(server.address) as client:
        assert client.ping().result(120) == "pong"
        assert taken == [folder(server.address)]
    assert list(temporary.iterdir()) == []


def test_a_temporary_directory_with_too_long_a_path_is_named(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 60)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(AddressError, match=f"set TMPDIR to a shorter path than {long}"):
        parse("ipc://{auto}")


def test_a_process_that_ends_without_closing_its_server_leaves_no_file() -> None:
    program = """
from dreamfleet.transport import Server
server = Server("ipc://{auto}")
raise KeyboardInterrupt
"""
    with tempfile.TemporaryDirectory(prefix="df-") as folder:  # the path of a socket file is short
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.PIPE,
            check=False,
            timeout=120,
        )
        assert b"KeyboardInterrupt" in done.stderr
        assert list(Path(folder).iterdir()) == []
