"""Repeats steps of a run and compares the results: does this hardware compute the same thing twice?

An error that a device makes before a reduction reaches every process alike, so no comparison between processes can see
it. Repeating the same steps can: from a checkpoint, with the run's configuration, layout and samples, in a separate
folder. The run itself is only read.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from unisono.checkpoint.core import commit, placement
from unisono.checkpoint.core.manifest import Checkpoint, parse_step
from unisono.checkpoint.exchange.export import find_checkpoint
from unisono.config import CONFIG_FILE, fingerprint
from unisono.config.code import references
from unisono.config.schema.run import RunConfig, Upload
from unisono.data import ledger
from unisono.launch import cluster, start
from unisono.launch.resolving.run_directory import FILES, FINGERPRINT
from unisono.observe import events
from unisono.runtime.errors import ConfigError, RunError, format_ranges
from unisono.runtime.text import join_names
from unisono.runtime.untrusted import safe_paths, safe_writing
from unisono.task_config import read_run

if TYPE_CHECKING:
    from unisono.task import Task

REPLAYS = "replays"  # folder inside the run's

_STEP_VALUES = ("loss", "grad_norm")  # compared for each step
_STATE_KEYS = ("step", "plan", "random")  # compared in the checkpoints' state


@dataclass(frozen=True)
class ReplayResult:
    """The result of repeating steps of a run.

    Attributes:
        first: Step after which the replay starts.
        last: Last repeated step.
        steps: Steps recorded by both runs, from 1.
        differing_values: Values of the first step that differs, as `name: (then, now)`; empty if none does.
        step: That step; None if there is none.
        arrays: Names of the arrays in the last checkpoint that differ.
        array_count: Total number of arrays.
        state: Parts of the saved state that differ.
        folder: Of the repeated steps; None if nothing differs, and it was removed.
    """

    first: int
    last: int
    steps: list[int]
    differing_values: Mapping[str, tuple[Any, Any]]
    step: int | None
    arrays: list[str]
    array_count: int
    state: list[str]
    folder: Path | None

    @property
    def is_same(self) -> bool:
        """Whether everything is bitwise identical."""
        return self.step is None and not self.arrays and not self.state

    def lines(self, run: Path) -> list[str]:
        """Return the report, line by line."""
        what = f"steps {self.first + 1} to {self.last} of {run}"
        if self.is_same:
            shown = (
                f"loss and gradient norm of {len(self.steps)} steps, {self.array_count} arrays and the order of samples"
            )
            return [f"{what} give the same result when repeated: {shown} agree, bit for bit"]
        lines = [f"{what} give a different result when repeated. The run itself was not changed"]
        if self.step is not None:
            values = ", ".join(
                f"{name} was {then!r} and is now {now!r}" for name, (then, now) in self.differing_values.items()
            )
            lines.append(f"  the first step that differs is step {self.step}: {values}")
        if self.arrays:
            names = join_names(f"'{name}'" for name in self.arrays)
            lines.append(f"  after step {self.last}: {names} (of {self.array_count} arrays)")
        if self.state:
            lines.append(f"  the saved state differs, too: {', '.join(self.state)}")
        return [
            *lines,
            f"  repeated steps: {self.folder}",
            "  Run the replay a second time. If both replays agree, the original run was disturbed: suspect its "
            "hardware. If they differ, this machine is at fault, or the task is not repeatable (see `unisono prove`).",
        ]


def replay(
    run: Path,
    first: int | None = None,
    last: int | None = None,
    *,
    task: str | type[Task] | None = None,
    trust: bool = False,
) -> ReplayResult:
    """Repeat the steps between two checkpoints of a run, with its layout, and compare.

    Args:
        run: The run's folder.
        first: Step of the checkpoint to start from; 0 starts from scratch. None: the last but one, or 0.
        last: Step of the checkpoint to end at. None: the next one after `first`, or the newest.
        task: Of the run, as for `unisono.task_config.read_run`.
        trust: Import the task that the run names, wherever it is.

    Raises:
        TrustError: If the run names a task that is not trusted.
        RunError: If there are no such checkpoints, or none that a run can be resumed from.
        CheckpointError: If one of them is damaged.
    """
    place = cluster.process_info()
    if place is not None and place.world_size > 1:
        raise ConfigError(f"unisono replay starts the processes itself; run it without {place.launcher}")
    before, after = _choose_checkpoints(run, first, last)
    config = read_run(run, task, trust=trust)
    made = before.step if before else 0
    try:
        folder, config = _prepare_run(run, config, before, after)
    except OSError as error:
        raise RunError(f"{run}: cannot create a folder for the repeated steps: {error.strerror}") from error
    start.start_run(config)
    again = commit.open_checkpoint(folder / placement.NAME / after.path.name)
    then, now = _read_steps(run, made, after.step), _read_steps(folder, made, after.step)
    common = sorted(then.keys() & now.keys())
    step = next((n for n in common if then[n] != now[n]), None)
    apart = {} if step is None else {
        name: (then[step][name], now[step][name]) for name in _STEP_VALUES if then[step][name] != now[step][name]
    }  # fmt: skip
    arrays = [
        name for name, array in after.arrays.items() if _array_content(array) != _array_content(again.arrays.get(name))
    ]
    state = [name for name in _STATE_KEYS if after.state[name] != again.state[name]]
    consumed = [(one.state["ledger"] or {}).get("consumed") for one in (after, again)]
    state += [] if consumed[0] == consumed[1] else ["samples"]
    result = ReplayResult(made, after.step, common, apart, step, arrays, len(after.arrays), state, folder)
    if not result.is_same:
        return result
    shutil.rmtree(folder)
    with suppress(OSError):
        (run / REPLAYS).rmdir()  # unless it holds another replay
    return ReplayResult(**{**vars(result), "folder": None})


def _choose_checkpoints(run: Path, first: int | None, last: int | None) -> tuple[Checkpoint | None, Checkpoint]:
    find_checkpoint(run, last or first or None)
    steps = [parse_step(path.name) for path in commit.find_checkpoints(run / placement.NAME)]
    if last is None:
        last = min((step for step in steps if first is not None and step > first), default=steps[-1])
    if first is None:
        first = max((step for step in steps if step < last), default=0)
    begin, end = find_checkpoint(run, first) if first else None, find_checkpoint(run, last)
    if not first < last:
        raise RunError(
            f"{run} has no checkpoint after step {first}; it has checkpoints of steps {format_ranges(steps)}"
        )
    before = commit.open_checkpoint(begin) if begin else None
    if before is not None and before.holds != "everything":
        raise RunError(f"{before.path} holds only the {before.holds}, so no step can be run from it")
    return before, commit.open_checkpoint(end)


def _prepare_run(run: Path, config: RunConfig, before: Checkpoint | None, after: Checkpoint) -> tuple[Path, RunConfig]:
    """Create a separate run that starts at the first checkpoint, and its configuration."""
    made = before.step if before else 0
    name = f"{made}-to-{after.step}-{uuid.uuid4().hex[:8]}"
    folder = safe_writing.make_folder(run, REPLAYS) / name
    layout = {**config.layout.model_dump(), **after.about["config"]["layout"]}  # as it was at that time
    falls = config.plateau is not None  # by what evaluations come to, so they are made again
    changes: dict[str, Any] = {
        "layout": type(config.layout).model_validate(layout),
        "run": {"name": name, "dir": folder.parent, "resume": "must" if before else "never", "stop_after": after.step},
        "checkpoint": {
            "every": None, "keep_every": None, "keep_best": None, "at_end": True,
            "folder": None,  # of the run itself
            "final": "resumable" if after.holds == "everything" else after.holds,
            "upload": Upload(),
        },
        "eval": {"every": config.eval.every if falls else None, "at_end": False, "patience": None}, "callbacks": [],
        "observe": {"trackers": [], "profile": None},
        "launch": {"nodes": 1, "node_rank": None, "rendezvous": None, "max_restarts": 0},
    }  # fmt: skip
    groups = {
        group: getattr(config, group).model_copy(update=change) if isinstance(change, dict) else change
        for group, change in changes.items()
    }
    config = config.model_copy(update=groups)
    if before is None:
        return folder, config
    try:
        _link_checkpoint(before.path, folder / placement.NAME / before.path.name)
        if (run / ledger.FOLDER).is_dir():
            safe_writing.copy_folder(run / ledger.FOLDER, folder / ledger.FOLDER)
        if falls:  # what was evaluated at the checkpoint is in its state, and not to be counted twice
            (folder / "events.jsonl").touch(exist_ok=False)
            for event in events.read_events(run / "events.jsonl"):
                if event.get("eval") and event["step"] == made:
                    events.append_event(folder / "events.jsonl", event)
        for file in (FINGERPRINT, FILES):
            if os.path.lexists(run / file):
                safe_paths.copy_inside(run, file, folder / file)
        values = {**fingerprint.to_json(config), "recipe": references.absolute_reference(config.recipe)}
        (folder / CONFIG_FILE).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, config


def _link_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint, by hard links where the file system supports them."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        safe_writing.link_inside(source, path.name, target / path.name)


def _read_steps(run: Path, first: int, last: int) -> dict[int, dict[str, Any]]:
    shown = events.step_events(events.read_events(run / "events.jsonl"))
    return {e["step"]: {name: e.get(name) for name in _STEP_VALUES} for e in shown if first < e["step"] <= last}


def _array_content(array: Mapping[str, Any] | None) -> Any:
    """Return what a manifest records of an array's content, independent of its location; layouts must be equal."""
    if array is None:
        return None
    pieces = sorted((piece["offset"], piece["shape"], piece["sha256"]) for piece in array["pieces"])
    return array["dtype"], array["shape"], pieces
