"""Who may ask: every request, also that of a websocket, passes here first.

- `Host` has to be a number or a name of this machine. A page of another site that has pointed its
  own name here (DNS rebinding) sends its own name.
- `Origin`, which browsers send with websockets and with everything that may change something, has
  to be this server: another site's page cannot speak for a person who is logged in here.
- The token is in the address that is printed. It is compared in constant time, and kept as a cookie
  that scripts cannot read and that other sites' requests do not carry.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

_HEADERS = (
    # No asset, script or connection of another host, whatever a page is tricked into. The library
    # compiles its templates in the browser, which needs the two words unsafe-*.
    (
        b"content-security-policy",
        b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
        b"style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' blob:; "
        b"font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'none'; "
        b"form-action 'self'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_REFUSED = """<!doctype html><meta charset="utf-8"><title>dreamfleet</title>
<body style="font: 16px/1.6 system-ui, sans-serif; max-width: 34em; margin: 18vh auto;
padding: 0 1em; color: #667085"><h1 style="font-size: 1.2em; color: #0b6fb8">dreamfleet view</h1>
<p>{}</p>"""


class Guard:
    """Lets requests through to an app, or refuses them. The cookie is named after the port, because
    browsers do not tell ports apart."""

    def __init__(self, app: Asgi, token: str, host: str, port: int) -> None:
        self.app, self._token = app, token
        self._cookie = f"dreamfleet-{port}"
        name = socket.gethostname().lower()
        self._names = {"localhost", name, f"{name}.local", socket.getfqdn().lower(), host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not self._is_here(host):
            await _refuse(scope, send, 400, "This is not the address of this server.")
        elif origin and urlsplit(origin).netloc.lower() != host.lower():
            await _refuse(scope, send, 403, "Another site's page has asked.")
        elif given := _query_token(scope):
            await self._enter(scope, receive, send, given)
        elif not self._matches(self._cookie_of(headers)):
            await _refuse(
                scope, send, 403, "Open the address that 'dreamfleet view' printed, with its token."
            )
        else:
            await self.app(scope, receive, _with_headers(send))

    async def _enter(self, scope: Scope, receive: Receive, send: Send, given: str) -> None:
        """The token is in the address: it becomes a cookie, and the address loses it."""
        if not self._matches(given):
            await _refuse(scope, send, 403, "The token is not the one that was printed.")
            return
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        rest = urlencode([(key, value) for key, value in query if key != "token"])
        # Not the path as it came: //other.host would lead away.
        path = "/" + scope["raw_path"].decode("latin-1").partition("?")[0].lstrip("/\\")
        place = path + (f"?{rest}" if rest else "")
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax"
        await _answer(
            send, 303, b"", [(b"location", place.encode()), (b"set-cookie", cookie.encode())]
        )

    def _cookie_of(self, headers: dict[bytes, bytes]) -> str:
        try:
            found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(self._cookie)
        except CookieError:
            return ""
        return found.value if found else ""

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _is_here(self, host: str) -> bool:
        name = re.sub(r":\d+$", "", host).lower()
        try:
            ipaddress.ip_address(name.strip("[]"))
            return True
        except ValueError:
            return name in self._names


def _query_token(scope: Scope) -> str:
    query: str = scope.get("query_string", b"").decode("latin-1")
    return dict(parse_qsl(query)).get("token", "")


async def _refuse(scope: Scope, send: Send, status: int, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = _REFUSED.format(why).encode()
    await _answer(send, status, body, [(b"content-type", b"text/html; charset=utf-8")])


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    everything = [*headers, *_HEADERS, (b"cache-control", b"no-store")]
    everything.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": everything})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Send:
    async def sender(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return sender
