"""A server with a key serves no client without it."""

from pathlib import Path

import pytest
import zmq

from dreamfleet.transport import Client, Disconnected, Keys, SecurityError, Server


def test_a_key_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "key")
    assert Keys.load(tmp_path / "key") == keys
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    Keys.generate().save(tmp_path / "key")
    assert Keys.load(tmp_path / "key") != keys


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    Keys.generate().save(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(SecurityError, match="chmod 600"):
        Keys.load(tmp_path / "key")


@pytest.mark.parametrize("text", ["", "abc", "zz" * 32, "00" * 31])
def test_what_is_not_a_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(SecurityError):
        Keys.load(tmp_path / "key")
    with pytest.raises(SecurityError, match="Cannot read"):
        Keys.load(tmp_path / "missing")


def test_a_key_does_not_show_in_logs() -> None:
    keys = Keys.generate()
    assert keys.secret.hex() not in repr(keys)
    assert repr(keys.secret) not in repr(keys)


@pytest.mark.parametrize("host", ["*", "0.0.0.0"])
def test_a_public_server_without_keys_is_refused(host: str) -> None:
    with pytest.raises(SecurityError, match="open to every machine on the network: pass keys"):
        Server(f"tcp://{host}:{{auto}}")


def test_a_public_server_needs_keys_or_insecure() -> None:
    Server("tcp://*:{auto}", keys=Keys.generate()).close()
    Server("tcp://*:{auto}", insecure=True).close()


def serve(keys: Keys | None) -> Server:
    server = Server("tcp://127.0.0.1:{auto}", keys=keys)
    server.bind("ping", lambda: "pong")
    server.start(block=False)
    return server


@pytest.mark.parametrize(
    ("server_has", "client_has"),
    [("key", "none"), ("key", "other"), ("none", "key")],
)
def test_without_the_right_key_a_client_gets_nothing(server_has: str, client_has: str) -> None:
    choice = {"key": Keys.generate(), "other": Keys.generate(), "none": None}
    server = serve(choice[server_has])
    try:
        with Client(server.address, keys=choice[client_has], patience=0.5) as stranger:
            with pytest.raises(Disconnected, match="handshake failed"):
                stranger.connect(0.5)
            with pytest.raises(Disconnected):
                stranger.ping().result(20)
        assert server.stats()["requests"] == 0
        with Client(server.address, keys=choice[server_has]) as friend:
            assert friend.ping().result(20) == "pong"
    finally:
        server.close()


def test_knowing_the_servers_public_key_is_not_enough() -> None:
    """Public keys are public: what opens the door is the secret behind the client's."""
    keys = Keys.generate()
    server = serve(keys)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.linger = 0
        socket.curve_serverkey = keys._server[0]
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        socket.connect(server.address)
        assert monitor.poll(20_000)
        monitor.close()
        with Client(server.address, keys=keys) as friend:
            assert friend.ping().result(20) == "pong"
        assert server.stats()["refused"] >= 1
    finally:
        socket.close()
        context.term()
        server.close()


def test_strangers_cannot_disturb_the_others() -> None:
    keys = Keys.generate()
    server = serve(keys)
    strangers = [Client(server.address, keys=Keys.generate()) for _ in range(20)]
    try:
        with Client(server.address, keys=keys) as friend:
            for _ in range(200):
                assert friend.ping().result(20) == "pong"
            asked = [stranger.ping() for stranger in strangers]
            for _ in range(200):
                assert friend.ping().result(20) == "pong"
            assert not any(future.done() for future in asked), "answered without a key"
    finally:
        for stranger in strangers:
            stranger.close(flush=0)
        server.close()
