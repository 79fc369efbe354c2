"""An endpoint for Prometheus: the newest value of every number, on this machine only."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Mapping
from typing import Any

from dreamfleet.errors import ConfigError
from dreamfleet.metrics.outputs.base import Output, kind_of

_HOST = "127.0.0.1"


class PrometheusOutput(Output):
    """Serves http://127.0.0.1:PORT/metrics, as Prometheus reads it.

    `train/loss` is `dreamfleet_train_loss`, and `dreamfleet_step` the newest step.

    Args:
        port: Where it listens; 0 for any that is free, which `port` then says.
        labels: Of every number, such as the run's name.
    """

    def __init__(self, port: int, labels: Mapping[str, str] | None = None) -> None:
        # Here, so that processes without such an output stay small.
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        self._values: dict[str, float] = {}
        pairs = [f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items()]
        self._labels = f"{{{','.join(pairs)}}}" if pairs else ""
        output = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "The numbers are at /metrics")
                    return
                text = output.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                """Say nothing about requests."""

        check_port(port)
        self._server = ThreadingHTTPServer((_HOST, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        found = {key: float(value) for key, value in metrics.items() if kind_of(value) == "scalar"}
        newest = max(float(step), self._values.get("step", 0.0))
        # Replaced and not changed: requests read it at the same time.
        self._values = {**self._values, **found, "step": newest}

    def text(self) -> str:
        """The newest numbers in Prometheus' text format."""
        lines: dict[str, str] = {}
        for key, value in self._values.items():
            name = "dreamfleet_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            shown = repr(value).replace("inf", "Inf").replace("nan", "NaN")
            lines[name] = f"# TYPE {name} gauge\n{name}{self._labels} {shown}\n"
        return "".join(lines.values())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def check_port(port: int) -> None:
    """Refuse a port that is in use, or that this user may not use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server has it
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ConfigError(
                f"metrics_port={port} cannot be used ({error.strerror}): choose another."
            ) from None


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
