"""Who may ask: host, origin and token, of requests and of websockets."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import pytest

from dreamfleet.view.guard import Guard

TOKEN = "a-token"
COOKIE = f"dreamfleet-80={TOKEN}"


def ask(
    path: str = "/", query: str = "", kind: str = "http", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and body of an answer. 200 is what the app behind the guard answers."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})

    async def receive() -> Any:
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "127.0.0.1:80", **headers}
    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(key.encode(), value.encode()) for key, value in given.items()],
    }
    asyncio.run(Guard(app, TOKEN, "127.0.0.1", 80)(scope, receive, send))
    if sent[0]["type"] == "websocket.close":
        return sent[0]["code"], {}, b""
    found = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], found, sent[-1]["body"]


def test_nothing_without_the_token() -> None:
    for headers in ({}, {"cookie": "dreamfleet-80=another"}, {"cookie": "dreamfleet-81=a-token"}):
        for path in ("/", "/run", "/_nicegui/3/static/x.js", "/media", "/_nicegui_ws/socket.io/"):
            status, _, body = ask(path, **headers)
            assert (status, b"inside" in body) == (403, False)
        assert ask("/_nicegui_ws/socket.io/", kind="websocket", **headers)[0] == 1008
        assert ask(method="POST", **headers)[0] == 403


def test_the_cookie_opens() -> None:
    status, headers, body = ask(cookie=COOKIE)
    assert (status, body) == (200, b"inside")
    assert "default-src 'self'" in headers["content-security-policy"]
    assert ask(cookie=f"other=1; {COOKIE}")[0] == 200


def test_the_token_in_the_address_becomes_a_cookie() -> None:
    status, headers, _ = ask("/run", "token=a-token&run=a%2Fb")
    assert status == 303
    assert headers["location"] == "/run?run=a%2Fb"
    assert headers["referrer-policy"] == "no-referrer"
    cookie = headers["set-cookie"]
    assert cookie.startswith(COOKIE)
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert ask("/", "token=wrong")[0] == 403
    assert ask("/", "token=wrong", cookie=COOKIE)[0] == 403


def test_the_way_in_leads_nowhere_else() -> None:
    for path in ("//evil.example/", "/\\evil.example", "///evil.example"):
        _, headers, _ = ask(path, "token=a-token")
        assert headers["location"].startswith("/evil.example")


def test_a_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or False)
    assert ask(cookie=COOKIE)[0] == 403
    assert ask("/", "token=a-token")[0] == 403
    assert compared == [(b"a-token", b"a-token")] * 2


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("localhost:9000", 200),
        ("10.0.0.7:80", 200),
        ("evil.example", 400),
        ("evil.example:80", 400),
        ("127.0.0.1.evil.example", 400),
        ("", 400),
        ("localhost@evil.example", 400),
    ],
)
def test_a_name_of_another_site_is_refused(host: str, status: int) -> None:
    """DNS rebinding: the browser asks this machine, and sends the other site's name."""
    assert ask(host=host, cookie=COOKIE)[0] == status


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:81", "http://localhost:80"]
)
def test_another_sites_page_cannot_ask(kind: str, origin: str) -> None:
    """A browser sends the cookie with a websocket that another site's page opens."""
    refused = 403 if kind == "http" else 1008
    assert ask(kind=kind, origin=origin, cookie=COOKIE)[0] == refused


def test_its_own_page_can() -> None:
    assert ask(method="POST", origin="http://127.0.0.1:80", cookie=COOKIE)[0] == 200
    # Behind a proxy that speaks TLS.
    assert ask(origin="https://127.0.0.1:80", cookie=COOKIE)[0] == 200
