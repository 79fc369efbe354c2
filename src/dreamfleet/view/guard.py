"""Check host, origin and token of every request, also of websockets.

- `Host` must be an address or a name of this machine: a site that points its own name here (DNS
  rebinding) sends its own name.
- `Origin` must be this server: other sites' pages cannot act for a viewer.
- The token is in the printed address. It is compared in constant time, and kept in a cookie that
  scripts cannot read and other sites' requests do not carry.
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
    # Nothing is loaded from other hosts. The library compiles templates in the browser, which needs
    # unsafe-*.
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
_NO_STORE = {**_HEADERS, "cache-control": "no-store"}
_REFUSED = """<!doctype html><meta charset="utf-8"><title>dreamfleet</title>
<body style="font: 16px/1.6 system-ui, sans-serif; max-width: 34em; margin: 18vh auto;
padding: 0 1em; color: #667085"><h1 style="font-size: 1.2em; color: #0b6fb8">dreamfleet view</h1>
<p>{}</p>"""


class Guard:
    """Passes requests to an app, or refuses them. The cookie has the port in its name, because
    browsers share cookies between ports."""

    def __init__(self, app: ASGIApp, token: str, host: str, port: int) -> None:
        self.app, self._token = app, token
        self._cookie = f"dreamfleet-{port}"
        name = socket.gethostname().lower()
        self._names = {"localhost", name, f"{name}.local", socket.getfqdn().lower(), host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        refused = self._refusal(request)
        if refused and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif refused:
            status, why = refused
            await HTMLResponse(_REFUSED.format(why), status, _NO_STORE)(scope, receive, send)
        elif request.query_params.get("token") and scope.get("method") in ("GET", "HEAD"):
            await self._set_cookie(request)(scope, receive, send)
        else:
            await self.app(scope, receive, _with_headers(send))

    def _refusal(self, request: HTTPConnection) -> tuple[int, str] | None:
        """Status and reason of a refusal; None if the request may pass."""
        host = request.headers.get("host", "")
        origins = {each.partition("//")[2].lower() for each in request.headers.getlist("origin")}
        if not self._is_this_machine(host) or len(request.headers.getlist("host")) > 1:
            return 400, "This is not the address of this server."
        if origins - {host.lower()}:
            return 403, "The request comes from another site's page."
        if given := request.query_params.get("token"):
            return None if self._matches(given) else (403, "The token is wrong.")
        if self._matches(request.cookies.get(self._cookie, "")):
            return None
        return 403, (
            "Open the address that 'dreamfleet view' printed, with its token. The token changes "
            "with every start of the server."
        )

    def _set_cookie(self, request: HTTPConnection) -> Response:
        """Move the token from the address to a cookie."""
        query = request.query_params.multi_items()
        rest = urlencode([(key, value) for key, value in query if key != "token"])
        # Not the path as it came: //other.host would lead away.
        path = "/" + request.scope["raw_path"].decode("latin-1").partition("?")[0].lstrip("/\\")
        location = path + (f"?{rest}" if rest else "")
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax"
        return Response(None, 303, {**_NO_STORE, "location": location, "set-cookie": cookie})

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _is_this_machine(self, host: str) -> bool:
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
