"""`unisono report --serve`: the page on this host alone, made anew for each visit, so that it follows runs under way.

Other users of the host, and pages of other sites in the same browser, can reach the port too. So a visitor needs the
token of the printed address, and the name by which it was called must be this host's own (against DNS rebinding).
"""

from __future__ import annotations

import hmac
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from time import monotonic

from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, UnisonoError
from unisono.runtime.text import one_line
from unisono_sweeps.report.content import describe

_HOST = "127.0.0.1"
REFRESH = 10  # seconds after which the browser asks again
_KEPT = 2.0  # seconds for which a page is not made again
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address has the token in it
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class ReportServer(ThreadingHTTPServer):
    """Serves the report of a folder.

    Args:
        folder: of a run, or of several.
        port: 0 for any that is free.

    Raises:
        ConfigError: if the port is in use.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        try:
            super().__init__((_HOST, port), _Visit)
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; choose another, or leave it out") from error
        self.token = secrets.token_urlsafe(16)
        self._folder, self._lock = folder, Lock()
        self._page, self._made = "", -_KEPT

    @property
    def address(self) -> str:
        """Of the page, with the token."""
        return f"http://{_HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print no traceback: a visitor that goes away is none of ours, and whoever reaches the port can be one."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            say(f"unisono: WARNING: the page could not be made: {one_line(error)}", error=True)

    def render(self) -> str:
        """The page as it is now.

        Raises:
            UnisonoError: if the folder holds no run any more.
        """
        with self._lock:
            if monotonic() - self._made >= _KEPT:
                self._page, self._made = describe(self._folder).render(refresh=REFRESH), monotonic()
            return self._page


class _Visit(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 10  # seconds that a visitor may be silent

    def do_GET(self) -> None:
        """Answer with the page, or say why not."""
        token, _, rest = self.path.removeprefix("/").partition("/")
        named = (f"{_HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}")
        if self.headers.get("Host") not in named:
            self._answer(HTTPStatus.FORBIDDEN, "this page is for this host alone")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(
                HTTPStatus.FORBIDDEN, "the address needs its token: copy all of the line that the command printed"
            )
        elif rest:
            self._answer(HTTPStatus.NOT_FOUND, "there is one page")
        else:
            try:
                self._answer(HTTPStatus.OK, self.server.render())
            except UnisonoError as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a request has the token in it."""

    def _answer(self, status: HTTPStatus, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            plain = name == "Content-Type" and status != HTTPStatus.OK
            self.send_header(name, "text/plain; charset=utf-8" if plain else value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def serve(folder: Path, port: int) -> None:
    """Serve the report of a folder until Ctrl-C.

    Raises:
        UnisonoError: if it is neither a run nor a folder of runs.
    """
    describe(folder)
    with ReportServer(folder, port) as server:
        say(server.address)
        say(
            "on this host only; from another: ssh -L PORT:127.0.0.1:PORT. Ctrl-C ends it".replace(
                "PORT", str(server.server_port)
            )
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
