"""Servers of files that a test can stop, or keep from answering."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from unisono.data.sources import File


class Server(ThreadingHTTPServer):
    """Files over HTTP, with ranges.

    Attributes:
        folder: whose files it gives.
        mode: `well`, `silent` (takes a request and never answers), `gone`, `half` (breaks off within an answer), or
            `broken` (answers that it cannot).
        requests: that it got.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.mode, self.requests = folder, "well", 0
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        self.server.requests += 1
        path = self.server.folder / self.path.lstrip("/")
        if self.server.mode == "gone":  # connections that are open outlive a server that takes no others
            self.close_connection = True
            return
        if self.server.mode == "silent":
            self.server.closing.wait(300)
            return
        if self.server.mode == "broken" or not path.is_file():
            self.send_response(500 if self.server.mode == "broken" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        first, last = 0, len(content)
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end) + 1 if end else last, last)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(last - first))
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(content)}")
        self.end_headers()
        if body:
            half = (last - first) // 2 if self.server.mode == "half" else last - first
            self.wfile.write(content[first : first + half])
            if self.server.mode == "half":
                self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server of the files of a folder, until the end of the block."""
    server = Server(folder)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()


@contextmanager
def hurried(file: File, deadline: float) -> Iterator[None]:
    """A deadline that a busy machine might not keep, for what is to miss it; clients by themselves wait far longer."""
    before, began = file.where.deadline, time.monotonic()
    object.__setattr__(file.where, "deadline", deadline)
    yield
    object.__setattr__(file.where, "deadline", before)
    assert time.monotonic() - began < 60, "not a measurement, but whether it hung"
