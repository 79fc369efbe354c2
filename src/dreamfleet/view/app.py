"""The server: pages on one port, behind the guard."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from nicegui import app, ui

from dreamfleet.errors import ConfigError
from dreamfleet.view import curves_page, sweep_page, videos_page
from dreamfleet.view.dream_page import build_dream
from dreamfleet.view.fleet_page import build_fleet
from dreamfleet.view.frame import add_run_page, add_style
from dreamfleet.view.guard import Guard
from dreamfleet.view.overview_page import build_overview
from dreamfleet.view.records_page import build_checkpoints, build_configuration, build_logs
from dreamfleet.view.runs import Runs

PORT = 8765
_FORGET_SECONDS = 10.0
_FAVICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><g fill="#0b6fb8">\
<circle cx="16" cy="16" r="5"/><circle cx="6" cy="8" r="3"/><circle cx="26" cy="8" r="3"/>\
<circle cx="6" cy="24" r="3"/><circle cx="26" cy="24" r="3"/></g></svg>"""


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to this address."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def serve(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    trust: bool = False,
    ready: Callable[[str], None],
) -> None:
    """Serve pages about the runs in a folder, until Ctrl-C; `ready` gets their address.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    with _listen(host, port) as listening:
        port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        app.on_startup(lambda: ready(f"http://{shown}:{port}/?token={token}"))
        config = uvicorn.Config(
            Guard(make_app(Runs(folder, trust=trust)), token, host, port),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            ws_max_size=1 << 20,
        )
        server = uvicorn.Server(config)
        server.run(sockets=[listening])
    if server.should_exit:  # Ctrl-C is ignored in a shell's background
        raise KeyboardInterrupt


def make_app(runs: Runs) -> FastAPI:
    """The pages without a guard. Call it once per process: the library has one list of pages."""
    add_style()
    curves_page.add(runs)
    sweep_page.add(runs)
    videos_page.add_media(runs)
    add_run_page(runs, "run", build_overview, 1.0)
    add_run_page(runs, "fleet", build_fleet, 1.0)
    add_run_page(runs, "logs", build_logs)
    add_run_page(runs, "checkpoints", build_checkpoints)
    add_run_page(runs, "configuration", build_configuration)
    add_run_page(runs, "videos", videos_page.build_videos)
    add_run_page(runs, "dream", build_dream, 5.0)
    app.timer(_FORGET_SECONDS, runs.forget)
    server = FastAPI(openapi_url=None)
    ui.run_with(
        server,
        title="dreamfleet",
        dark=None,
        favicon=_FAVICON,
        tailwind=False,
        reconnect_timeout=30.0,
        message_history_length=50,
        binding_refresh_interval=None,
        show_welcome_message=False,
    )
    return server


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = [PORT, 0] if port is None else [port]
    for each in wanted:
        try:
            return socket.create_server((host, each), family=family)
        except OSError as error:
            problem = error
    raise ConfigError(f"Cannot listen on {host}:{wanted[0]}: {problem.strerror or problem}.")
