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
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    # No asset, script or connection of another host, whatever a page is tricked into. The library
    # compiles its templates in the browser, which needs the two words unsafe-*.
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' blob:; "
        "font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_OWN = {**_HEADERS, "cache-control": "no-store"}
_REFUSED = """<!doctype html><meta charset="utf-8"><title>dreamfleet</title>
<body style="font: 16px/1.6 system-ui, sans-serif; max-width: 34em; margin: 18vh auto;
padding: 0 1em; color: #667085"><h1 style="font-size: 1.2em; color: #0b6fb8">dreamfleet view</h1>
<p>{}</p>"""


class Guard:
    """Lets requests through to an app, or refuses them. The cookie is named after the port, because
    browsers do not tell ports apart."""

    def __init__(self, app: ASGIApp, token: str, host: str, port: int) -> None:
        self.app, self._token = app, token
        self._cookie = f"dreamfleet-{port}"
        name = socket.gethostname().lower()
        self._names = {"localhost", name, f"{name}.local", socket.getfqdn().lower(), host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        asked = HTTPConnection(scope)
        refused = self._why_not(asked)
        if refused and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif refused:
            status, why = refused
            await HTMLResponse(_REFUSED.format(why), status, _OWN)(scope, receive, send)
        elif asked.query_params.get("token") and scope.get("method") in ("GET", "HEAD"):
            await self._entered(asked)(scope, receive, send)
        else:
            await self.app(scope, receive, _with_headers(send))

    def _why_not(self, asked: HTTPConnection) -> tuple[int, str] | None:
        """The status and the reason with which it is refused."""
        host = asked.headers.get("host", "")
        origins = {each.partition("//")[2].lower() for each in asked.headers.getlist("origin")}
        if not self._is_here(host) or len(asked.headers.getlist("host")) > 1:
            return 400, "This is not the address of this server."
        if origins - {host.lower()}:
            return 403, "Another site's page has asked."
        if given := asked.query_params.get("token"):
            right = self._matches(given)
            return None if right else (403, "The token is not the one that was printed.")
        if self._matches(asked.cookies.get(self._cookie, "")):
            return None
        return 403, (
            "Open the address that 'dreamfleet view' printed, with its token. Every start of the "
            "server has another one."
        )

    def _entered(self, asked: HTTPConnection) -> Response:
        """The token is in the address: it becomes a cookie, and the address loses it."""
        query = asked.query_params.multi_items()
        rest = urlencode([(key, value) for key, value in query if key != "token"])
        # Not the path as it came: //other.host would lead away.
        path = "/" + asked.scope["raw_path"].decode("latin-1").partition("?")[0].lstrip("/\\")
        place = path + (f"?{rest}" if rest else "")
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax"
        return Response(None, 303, {**_OWN, "location": place, "set-cookie": cookie})

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _is_here(self, host: str) -> bool:
        name = re.sub(r":\d+$", "", host).lower()
        try:
            ipaddress.ip_address(name.strip("[]"))
            return True
        except ValueError:
            return name in self._names


def _with_headers(send: Send) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_HEADERS)
        await send(message)

    return sender
