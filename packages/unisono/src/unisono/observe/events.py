"""`events.jsonl`: one JSON object per step and per evaluation, written by rank 0, appended to on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from unisono.runtime import secrets
from unisono.runtime.files import wrap_record_errors, write_whole
from unisono.runtime.untrusted import safe_paths, safe_writing
from unisono.runtime.untrusted.shapes import Number, misfit

NOTE_KEYS = frozenset({"changed", "fallback", "brought_again"})  # events about where and how a run resumed

_LARGEST = 1 << 30  # bytes of a file of events
_MOST = 1 << 53  # of an integer, above which a float does not tell it from the next


class _Numbered(TypedDict):
    step: Annotated[int, Field(ge=0, lt=_MOST)]


class _Step(_Numbered):
    loss: Number | None


class Events:
    """An append-only file of JSON lines.

    A resumed run removes the lines of steps that it will repeat, so that every step appears once. Notes about earlier
    resumptions are kept.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        self._path = path
        kept: list[str] = []
        self._notes: set[str] = set()
        with wrap_record_errors(path):
            if os.path.lexists(path):
                seen = [(line, event) for line in _read_text(path).splitlines() if (event := _parse_line(line))]
                kept = [line for line, event in seen if event["step"] <= first_step or NOTE_KEYS & event.keys()]
                self._notes = {line for line, event in seen if NOTE_KEYS & event.keys()}
            write_whole(path, "".join(f"{line}\n" for line in kept))
            self._file = safe_writing.open_to_append(path.parent, path.name)

    def write(self, event: dict[str, Any]) -> None:
        """Append one event and flush it.

        Raises:
            RecordError: If it cannot be written.
        """
        with wrap_record_errors(self._path):
            self._file.write(_line(event))
            self._file.flush()

    def note(self, event: dict[str, Any]) -> None:
        """Append a note (one of `NOTE_KEYS`), which survives a resumption; duplicates are written once."""
        if _line(event).rstrip() not in self._notes:
            self.write(event)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # of a write that failed before and has been reported
            self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events of a run; a truncated last line is skipped."""
    return parse_events(_read_text(path))


def parse_events(text: str) -> list[dict[str, Any]]:
    """Return the events in a part of the file; lines that are cut off are skipped."""
    return [event for line in text.splitlines() if (event := _parse_line(line)) is not None]


def append_event(path: Path, event: Mapping[str, Any]) -> None:
    """Append an event to a file that no process of the run has open, after any half-written line."""
    text = safe_paths.read_bytes(path.parent, path.name, _LARGEST) if os.path.lexists(path) else b""
    with safe_writing.open_to_append(path.parent, path.name) as file:
        file.write("\n" * (not text.endswith(b"\n") and bool(text)) + _line(event))


def step_events(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events that are steps."""
    return [event for event in events if misfit(event, _Step) is None and not event.get("eval")]


def last_evaluation(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return loss and metrics of the newest evaluation; empty if there is none."""
    newest: Mapping[str, Any] = next((event for event in reversed(events) if event.get("eval")), {})
    return {name: value for name, value in newest.items() if name not in ("step", "eval", "rows", "seconds")}


def _read_text(path: Path) -> str:
    return safe_paths.read_bytes(path.parent, path.name, _LARGEST).decode("utf-8", errors="replace")


def _parse_line(line: str) -> dict[str, Any] | None:
    """The event of a line; None for one that is damaged."""
    with suppress(ValueError):
        event = dict(safe_paths.parse_json(line, _Numbered))
        return None if any(isinstance(value, int) and abs(value) >= _MOST for value in event.values()) else event
    return None


def _line(event: Mapping[str, Any]) -> str:
    """Format an event for the file: without secrets, and with null for numbers that JSON cannot represent."""
    return json.dumps({name: _finite_or_none(value) for name, value in event.items()}) + "\n"


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict):
        return secrets.hidden(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
