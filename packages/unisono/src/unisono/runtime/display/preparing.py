"""What a start is doing before its first step, on a terminal: a line at once, and a bar after two seconds.

It is drawn with plain control sequences, since it stands there before any library is imported, and it is removed when
what it announces is done.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from unisono.runtime.console import clean, terminal_width
from unisono.runtime.display import notebook
from unisono.runtime.text import one_line

_PATIENCE = 2.0  # seconds without a bar
_INTERVAL = 0.2  # seconds between two pictures
_BAR, _SHUTTLE = 20, 5  # characters of the bar, and of what moves in it
_CLEAR = "\r\x1b[2K"
_others: list[threading.Thread] = []  # that draw on the one terminal of the process


@contextmanager
def preparing(what: str, *, shown: bool = True) -> Iterator[None]:
    """Show on a terminal what is being prepared, e.g. "building the model"; elsewhere, nothing."""
    if not (shown and sys.stdout.isatty()) or notebook.is_below_cell():
        yield
        return
    text, done, began = one_line(clean(what)), threading.Event(), monotonic()
    _write(_fit(f"{text} …") + "\r")  # a message of somebody else overwrites it
    with suspended():  # what it is a part of
        arguments = text, done, began, len(_others)
        thread = threading.Thread(target=_draw, args=arguments, name="unisono-preparing", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            _write(_CLEAR)


@contextmanager
def suspended() -> Iterator[None]:
    """Draw nothing meanwhile: something that knows how far it is has a bar of its own in the same place."""
    _others.append(threading.current_thread())
    try:
        yield
    finally:
        _others.pop()


def _draw(text: str, done: threading.Event, began: float, level: int) -> None:
    """Draw the bar until what it announces is done, except while anything of a higher level draws."""
    if done.wait(_PATIENCE):
        return
    while not done.wait(_INTERVAL):
        if len(_others) > level:
            continue
        _write(_CLEAR + _fit(f"{text}  {_bar(monotonic() - began)}  {monotonic() - began:.0f} s") + "\r")


def _bar(seconds: float) -> str:
    """A bar in which something moves to and fro, since nobody knows how long it takes.

    >>> _bar(0.0), _bar(1.0)
    ('━━━━━───────────────', '─────━━━━━──────────')
    """
    way = _BAR - _SHUTTLE
    place = int(seconds / _INTERVAL) % (2 * way)
    place = min(place, 2 * way - place)
    return "─" * place + "━" * _SHUTTLE + "─" * (way - place)


def _fit(line: str) -> str:
    """A line cut to the width of the terminal, which could not be cleared if it wrapped."""
    width = terminal_width() or 79
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _write(text: str) -> None:
    """Past Python's buffers and their locks, which a process forked meanwhile would inherit."""
    with suppress(OSError, ValueError):
        os.write(sys.stdout.fileno(), text.encode())
