"""A server with a key serves no client without it."""

import pytest
import zmq

from dreamfleet.transport import Client, Disconnected, Keys, SecurityError, Server


def test_a_public_server_needs_keys_or_insecure() -> None:
    for host in ("*", "0.0.0.0"):
        with pytest.raises(SecurityError, match="open to every machine on the network: pass keys"):
            Server(f"tcp://{host}:{{auto}}")
    Server("tcp://*:{auto}", keys=Keys.generate()).close()
    Server("tcp://*:{auto}", insecure=True).close()


def serve(keys: Keys | None) -> Server:
    server = Server("tcp://127.0.0.1:{auto}", keys=keys)
    server.bind("ping", lambda: "pong")
    server.start(block=False)
    return server


@pytest.mark.parametrize(
    ("server_has", "client_has"), [("key", "none"), ("key", "other"), ("none", "key")]
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
