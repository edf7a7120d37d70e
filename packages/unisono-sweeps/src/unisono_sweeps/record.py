"""What a sweep writes in its folder, beside its runs.

runs/<sweep>/
  sweep.json        the command, and the runs with what distinguishes each
  outcomes.jsonl    one line for each time that a run has ended
  console/          what each run printed
  <run>/            as of `unisono train`
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from unisono.checkpoint.core import commit, placement
from unisono.checkpoint.core.manifest import parse_step
from unisono.launch.launcher import Ended
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, Preempted, UnavailableError, UnisonoError
from unisono.runtime.files import write_whole
from unisono.runtime.untrusted import safe_paths, safe_writing
from unisono.runtime.untrusted.shapes import Integer, Number
from unisono.supervise.run_facts import RunFacts, read_run_facts
from unisono.supervise.step_sync import AS_REQUESTED

FILE = "sweep.json"
OUTCOMES = "outcomes.jsonl"
CONSOLE = "console"


class Outcome(TypedDict):
    """How a run ended."""

    run: str
    code: Integer
    seconds: Number
    steps: Integer
    why: str


class _Sweep(TypedDict):
    command: list[str]
    runs: dict[str, dict[str, str]]


def write_sweep(folder: Path, command: Sequence[str], runs: Mapping[str, Mapping[str, str]]) -> None:
    """Write the command of a sweep and its runs; those of earlier commands stay listed."""
    consoles = folder / CONSOLE
    if os.path.lexists(consoles) and (consoles.is_symlink() or not consoles.is_dir()):
        raise ConfigError(f"{consoles} is not a folder, where what runs print is written; remove it")
    try:
        consoles.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{consoles} cannot be created: {error.strerror}; choose another run.dir or name=") from error
    listed = {**read_sweep(folder)["runs"], **{name: dict(settings) for name, settings in runs.items()}}
    values = {"command": list(command), "runs": listed}
    try:
        write_whole(folder / FILE, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{folder / FILE} cannot be written: {error.strerror}; choose another run.dir") from error


def read_sweep(folder: Path) -> dict[str, Any]:
    """The command and the runs of a sweep; empty ones if the folder is none."""
    try:
        return dict(safe_paths.read_json(folder, FILE, _Sweep))
    except (OSError, ValueError):
        return {"command": [], "runs": {}}


def is_sweep(folder: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (folder / FILE).is_file()


def add_outcome(folder: Path, outcome: Outcome) -> None:
    """Note how a run ended; where that cannot be written, it is said, and the other runs go on."""
    try:
        with safe_writing.open_to_append(folder, OUTCOMES) as file:
            file.write(json.dumps(outcome) + "\n")
    except OSError as error:
        say(f"unisono: WARNING: {folder / OUTCOMES} cannot be written: {error.strerror}", error=True)


def was_stopped_by_user(run: RunFacts) -> bool:
    """Whether a run ended because `unisono stop` had asked; one that its own callback ended is complete."""
    return run.state == "not started" or (run.state == "stopped" and run.code is None and run.why == AS_REQUESTED)


def newest_step(folder: Path) -> int:
    """The step of a run's newest checkpoint; 0 if there is none."""
    found = commit.find_checkpoints(folder / placement.NAME)
    return parse_step(found[-1].name) if found else 0


def describe_lost_log(run: RunFacts) -> str:
    """What a run has logged and its file does not have any more; empty if nothing is missing."""
    try:
        saved = newest_step(run.folder)
    except UnavailableError as error:
        return f"whether its events.jsonl is whole is not known: {error}"
    if run.state == "running" or saved <= run.steps_done:
        return ""
    return f"its events.jsonl ends after step {run.steps_done}, and it has saved step {saved}: what it logged is lost"


def judge_end(folder: Path, how: Ended) -> tuple[Ended, RunFacts | None]:
    """How a job ended, and what its run's folder says if it ended well; one that cannot be read has failed.

    `unisono stop` ends a run with code 0, but leaves it as open as an interruption does.
    """
    if how.code:
        return how, None
    try:
        run = read_run_facts(folder)
        stopped = was_stopped_by_user(run) and not (run.total and newest_step(folder) >= run.total)
    except (OSError, UnisonoError) as error:
        return replace(how, code=ConfigError.exit_code, why=str(error)), None
    if stopped:
        why = f"as requested, after step {run.steps_done} of {run.total}"
        return replace(how, code=Preempted.exit_code, why=why), None
    return how, run


def read_outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """How each run of a sweep ended the last time; lines that are damaged are left out."""
    if not (folder / OUTCOMES).is_file():
        return {}
    found = {}
    for line in safe_paths.read_bytes(folder, OUTCOMES, 1 << 30).decode("utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            outcome = safe_paths.parse_json(line, Outcome)
            found[outcome["run"]] = outcome
    return found
