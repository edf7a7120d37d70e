"""A page in a real browser: headless Chromium, driven through a pipe by its own protocol, without a network."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")


class Browser:
    """One open page."""

    def __init__(self, write: int, read: int) -> None:
        self._out, self._in = os.fdopen(write, "wb", buffering=0), os.fdopen(read, "rb")
        self._numbers = itertools.count(1)
        self._session = ""
        self.errors: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        self._out.write(
            json.dumps({**message, **({"sessionId": self._session} if self._session else {})}).encode() + b"\0"
        )
        while True:
            answer = json.loads(self._read())
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> bytes:
        text = b""
        while not text.endswith(b"\0"):
            byte = self._in.read(1)
            assert byte, "the browser has ended"
            text += byte
        return text[:-1]

    def open(self, path: Path, width: int, height: int = 900) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Page.navigate", url=path.resolve().as_uri())
        for _ in range(600):
            if self.evaluate("document.readyState === 'complete' && location.protocol === 'file:'"):
                return
        raise AssertionError("the page did not load")

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _middle(self, selector: str, share: float) -> dict[str, float]:
        self.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.evaluate(
            f"(b => [b.left, b.top, b.width, b.height])(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        return {"x": box[0] + share * box[2], "y": box[1] + box[3] / 2}

    def move(self, selector: str, share: float, kind: str = "mouseMoved") -> None:
        self.call(
            "Input.dispatchMouseEvent", type=kind, button="none" if kind == "mouseMoved" else "left", clickCount=1,
            **self._middle(selector, share),
        )  # fmt: skip

    def click(self, selector: str) -> None:
        self.move(selector, 0.5, "mousePressed")
        self.move(selector, 0.5, "mouseReleased")

    def screenshot(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile in a folder, which ends with the context."""
    assert PROGRAM is not None
    to_browser, from_browser = os.pipe(), os.pipe()

    def connect() -> None:
        first, second = os.dup(to_browser[0]), os.dup(from_browser[1])  # 3 and 4 may be among the pipes
        os.dup2(first, 3, inheritable=True)
        os.dup2(second, 4, inheritable=True)

    process = subprocess.Popen(
        [PROGRAM, *_FLAGS, f"--user-data-dir={folder / 'profile'}"],
        preexec_fn=connect, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_browser[0])
    os.close(from_browser[1])
    browser = Browser(to_browser[1], from_browser[0])
    try:
        yield browser
    finally:
        process.kill()
        process.wait()
