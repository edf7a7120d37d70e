"""A terminal for tests: a program runs on a pseudo-terminal of some width, and what the screen shows is read."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_TOKENS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n])", re.DOTALL)
# At the end of what was read: a control sequence, or a character of several bytes, of which the rest is to come.
_UNFINISHED = re.compile(rb"\x1b(\[[?\d;]*)?$|[\xc0-\xdf]$|[\xe0-\xef][\x80-\xbf]?$|[\xf0-\xf7][\x80-\xbf]{0,2}$")


@dataclass
class Screen:
    """What a terminal shows of what was written to it.

    Attributes:
        width: of the terminal.
        lines: from the top, however many.
        wrapped: lines that did not fit.
    """

    width: int
    lines: list[str] = field(default_factory=lambda: [""])
    wrapped: list[str] = field(default_factory=list)
    _row: int = 0
    _column: int = 0

    def write(self, text: str) -> None:
        """Write text and control sequences."""
        for count, command, back, down, character in _TOKENS.findall(text):
            if back:
                self._column = 0
            elif down:
                self._row += 1
                if self._row == len(self.lines):
                    self.lines.append("")
            elif command == "A":
                self._row -= int(count or 1)
            elif command == "K":
                self.lines[self._row] = ""
            elif character:
                if self._column == self.width:
                    self.wrapped.append(self.lines[self._row])
                    self._row, self._column = self._row + 1, 0
                    if self._row == len(self.lines):
                        self.lines.append("")
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
                self._column += 1

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).strip("\n")


@dataclass
class Showing:
    """What a program showed: each picture with its time in seconds from the start, and the screen at its end."""

    pictures: list[tuple[float, str]]
    screen: Screen
    code: int


def show(
    command: Sequence[str], cwd: Path, width: int, timeout: float = 120, typed: Sequence[tuple[str, str]] = ()
) -> Showing:
    """Run a program on a pseudo-terminal to its end.

    Args:
        command: Its words.
        cwd: Where it runs.
        width: Of the terminal.
        timeout: Seconds that it has.
        typed: What is typed in turn, each when a text is on the screen: ("step 3", "\\x03").
    """
    to_type = list(typed)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(cwd)
        # Not the process's own variables: the readline library may have set a size there.
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        os.execvpe(command[0], list(command), {**kept, "TERM": "xterm", "OMP_NUM_THREADS": "1"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    screen, pictures, rest, began = Screen(width), list[tuple[float, str]](), b"", time.monotonic()
    while time.monotonic() < began + timeout:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            written = os.read(terminal, 65536)
        except OSError:  # its end
            written = b""
        if not written:
            break
        rest += written
        cut = _UNFINISHED.search(rest)
        end = cut.start() if cut else len(rest)
        whole, rest = rest[:end], rest[end:]
        screen.write(whole.decode())
        pictures.append((time.monotonic() - began, screen.text))
        if to_type and to_type[0][0] in screen.text:
            os.write(terminal, to_type.pop(0)[1].encode())
    screen.write(rest.decode())
    os.close(terminal)
    return Showing(pictures, screen, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


def told_at(width: int | None, monkeypatch: pytest.MonkeyPatch, tell: Callable[[], object]) -> str:
    """What is told on a terminal of this width, or into a pipe."""
    out = Terminal() if width else io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((width or 0, 50)))
        tell()
    return out.getvalue()


def words(text: str) -> set[str]:
    """The words of a text; all numbers are alike, and times that pass between two calls are none, folded or not."""
    return set(re.sub("[─#]+", " ", re.sub(r"\d+(\.\d+)?(\s+(s|min|h|d)\b)?", "0", text)).split())


def wrapped_lines(text: str, width: int) -> list[str]:
    """Lines that a terminal wraps, but for single words that are longer, and what is copied whole."""
    screen = Screen(width)
    screen.write("\r\n".join(line for line in text.splitlines() if " " in line.strip() and not line.startswith("    ")))
    return screen.wrapped


def check_widths(monkeypatch: pytest.MonkeyPatch, tell: Callable[[], object]) -> None:
    """At 60, 80 and 120 columns the terminal wraps no line, and all words are there that a pipe gets."""
    whole = words(told_at(None, monkeypatch, tell))
    assert len(whole) > 5
    for width in (60, 80, 120):
        text = told_at(width, monkeypatch, tell)
        assert (wrapped_lines(text, width), words(text)) == ([], whole), width
