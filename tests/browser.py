"""A headless Chromium for tests, by its DevTools protocol over two pipes: no port, no driver, no library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE = 60.0  # seconds; of a machine with a hundred other things to do


class Tab:
    """One page. Requests to hosts are blocked, and counted: a page that is read offline makes none.

    Attributes:
        requested: addresses that the page has asked for.
        errors: exceptions of its scripts, and what the browser has logged, as JSON.
    """

    def __init__(self, send: Any, receive: Any) -> None:
        self._send, self._receive, self._number, self._session = send, receive, 0, ""
        self.requested: list[str] = []
        self.errors: list[str] = []
        target = next(item for item in self.call("Target.getTargets")["targetInfos"] if item["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.setBlockedURLs", urls=["http://*", "https://*"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._read())
            if answer.get("method") == "Network.requestWillBeSent":
                self.requested.append(answer["params"]["request"]["url"])
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> bytes:
        message = bytearray()
        while not message.endswith(b"\0"):
            message += self._receive.read(1) or b"\0"
        assert len(message) > 1, "Chromium has gone away"
        return bytes(message[:-1])

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        """Show pages in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def open(self, url: str) -> None:
        """Open a page, and wait until it is there."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true; its value."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.05)
        raise AssertionError(f"not true after {DEADLINE:g} s: {expression}; {self.evaluate('location.href')}")

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def move(self, selector: str, share: float, kind: str = "mouseMoved") -> None:
        """Move the pointer to a share of an element's width, or press or release its left button there."""
        element = f"document.querySelector({selector!r})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.evaluate(
            f"(b => [b.left, b.top, b.width, b.height])({element}.getBoundingClientRect())"
        )
        self.call(
            "Input.dispatchMouseEvent", type=kind, button="none" if kind == "mouseMoved" else "left", clickCount=1,
            x=left + share * width, y=top + height / 2,
        )  # fmt: skip

    def click(self, selector: str) -> None:
        """Click into the middle of an element."""
        self.move(selector, 0.5, "mousePressed")
        self.move(selector, 0.5, "mouseReleased")

    def photograph(self, file: Path, most: int | None = None) -> None:
        """Save what the window shows as PNG, or the whole page down to so many pixels."""
        clip = {}
        if most is not None:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            area = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most), "scale": 1}
            clip = {"captureBeyondViewport": True, "clip": area}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **clip)["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Start Chromium with an empty profile, and end it."""
    commands, send = os.pipe()
    receive, answers = os.pipe()
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--hide-scrollbars",
    ]
    # Chromium reads its commands from 3 and writes to 4
    line = [
        "bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', CHROMIUM or "chromium", *flags,
        "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(line, pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(commands)
    os.close(answers)
    with os.fdopen(send, "wb", 0) as writer, os.fdopen(receive, "rb") as reader:
        try:
            yield Tab(writer, reader)
        finally:
            process.kill()
            process.wait()
