"""What a run's folder says of it, read once for every verb that shows runs: its state, its steps and what it measured.

The folder is untrusted, and is only read. A state is what its files show: a process that holds the lock, an error that
a process recorded, or neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from unisono.config import CONFIG_FILE
from unisono.config.code import foreign_run
from unisono.observe import events
from unisono.runtime.errors import DeadlineError, Preempted, RunError
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Count
from unisono.supervise import records, run_lock


class _Data(TypedDict):
    steps: Count


class _Fingerprint(TypedDict):
    data: _Data


State = Literal["running", "finished", "stopped", "failed", "killed", "not started"]
_MAX_TEXT = 2000  # characters of a line of somebody else's message
_STOPPED_CODES = (Preempted.exit_code, 130)  # 130: Ctrl-C


@dataclass(frozen=True)
class RunFacts:
    """A run, as its folder shows it.

    Attributes:
        folder: of the run.
        config: its configuration, with defaults; the groups of its task as the file has them.
        events: all lines of `events.jsonl`.
        total: steps of the whole run; None if unknown.
        state: `running`: a process holds its lock; `finished`: all steps are done; `stopped`: on request, or in order
            before its last step; `failed`: with an error; `killed`: without a word; `not started`: no step is recorded.
        why: the error of a failed run, or why it stopped; empty if none is recorded.
        code: exit code that belongs to `why`.
    """

    folder: Path
    config: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    total: int | None
    state: State
    why: str = ""
    code: int | None = None

    @cached_property
    def steps(self) -> list[Mapping[str, Any]]:
        """The events that are steps."""
        return events.step_events(self.events)

    @cached_property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """The events that are evaluations."""
        return [event for event in self.events if event.get("eval")]

    @property
    def steps_done(self) -> int:
        """Updates made."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def loss(self) -> float | None:
        """Of the last step; None if there is none, or if it was not finite."""
        return self.steps[-1]["loss"] if self.steps else None


def read_run_facts(folder: Path) -> RunFacts:
    """Read the folder of a run.

    Raises:
        RunError: If it is not the folder of a run.
        ConfigError: If its `config.yaml` cannot be read.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise RunError(f"{folder} is not a run directory (no {CONFIG_FILE})")
    config = foreign_run.read_values(folder / CONFIG_FILE)
    written = folder / "events.jsonl"
    seen = events.read_events(written) if written.is_file() else []
    total = planned_steps(folder) or config["train"]["steps"]
    steps = events.step_events(seen)
    state, code, why = find_state(folder, int(steps[-1]["step"]) if steps else 0, total)
    if state == "stopped" and code is None:
        why = find_stop(seen)
    return RunFacts(folder, config, seen, total, state, why, code)


def find_state(folder: Path, steps_done: int, total: int | None) -> tuple[State, int | None, str]:
    """Return the state of a run that made so many of its steps, and the exit code and message that belong to it."""
    if run_lock.find_holder(folder) is not None:
        return "running", None, ""
    logs = folder / "logs"
    faults = records.read(logs, "*.fault.json", records.Fault)
    code, why = find_cause(faults, records.read(logs, "monitor-node-*.json", records.Finding))
    if code is not None:
        return "stopped" if code in _STOPPED_CODES else "failed", code, " ".join(why)
    if total is not None and steps_done >= total:
        return "finished", None, ""
    if not steps_done:
        return "not started", None, ""
    return "stopped" if run_lock.was_released(folder) else "killed", None, ""


def find_stop(seen: Sequence[Mapping[str, Any]]) -> str:
    """Why a run stopped the last time, by its events; empty if none says so."""
    return next((one_line(event["stopped"]) for event in reversed(seen) if "stopped" in event), "")


def planned_steps(folder: Path) -> int | None:
    """Return the total number of steps of a run; the configuration may state it in epochs."""
    with suppress(OSError, ValueError):
        steps: int = safe_paths.read_json(folder, "fingerprint.json", _Fingerprint)["data"]["steps"]
        return steps
    return None


def find_cause(faults: Sequence[dict[str, Any]], findings: Sequence[dict[str, Any]]) -> tuple[int | None, list[str]]:
    """Return the exit code and the message of a run that did not end well; None and no line if nothing is recorded.

    Waits that timed out come last, as on the console. Of processes that agree on an error, the lowest rank has it.
    """
    own = sorted((f for f in faults if f["kind"] != "DeadlineError"), key=lambda fault: fault["time"])
    if own:
        text = own[0]["text"].strip().splitlines()
        shown = [one_line(line, _MAX_TEXT) for line in (text[0], *(["…", *text[-3:]] if len(text) > 4 else text[1:]))]
        rank = min(fault["rank"] for fault in own if fault["text"] == own[0]["text"])
        return own[0]["code"], [f"rank {rank}: {shown[0]}", *(f"  {line}" for line in shown[1:])]
    if findings:
        first = min(findings, key=lambda found: found["time"])
        return first["code"], [one_line(first["text"], _MAX_TEXT)]
    if faults:
        first = min(faults, key=lambda fault: fault["time"])
        return DeadlineError.exit_code, [one_line(first["text"].strip().splitlines()[0], _MAX_TEXT)]
    return None, []
