"""Steps of a run made again, and held against what they were: whether this hardware computes the same twice.

What a device computes wrong before a reduction, every process receives alike, and no comparison of processes can see
it. The same steps made again can: from a checkpoint, with the configuration, layout and samples of the run, in a folder
of their own. The run itself is only read.
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

from unisono.checkpoint.core import commit
from unisono.checkpoint.core.manifest import Checkpoint
from unisono.checkpoint.exchange.export import find_checkpoint
from unisono.config import fingerprint, references
from unisono.config.schema.run import RunConfig, Upload
from unisono.data import ledger
from unisono.launch import cluster, train
from unisono.launch.run_directory import FILES, FINGERPRINT
from unisono.observe import events
from unisono.runtime.errors import ConfigError, RunError, format_ranges
from unisono.task_config import read_run

if TYPE_CHECKING:
    from unisono.task import Task

REPLAYS = "replays"  # in the run's
_STEP_VALUES = ("loss", "grad_norm")  # of each step
_STATE_KEYS = ("step", "plan", "random")  # of a checkpoint's state


@dataclass(frozen=True)
class ReplayResult:
    """The result of repeating steps of a run.

    Attributes:
        first: updates made before the first of them.
        last: updates made after the last of them.
        steps: the steps that both runs tell of, by number from 1.
        differing_values: values of the first step that is not what it was, as `name: (then, now)`; empty if all are.
        step: that step; None if there is none.
        arrays: names of those of the last checkpoint that are not what they were.
        array_count: how many arrays there are.
        state: parts of its state that are not what they were.
        folder: of the steps that were made again; None where nothing differs, and it is gone.
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
        """Whether everything is, bit for bit, what it was."""
        return self.step is None and not self.arrays and not self.state

    def lines(self, run: Path) -> list[str]:
        """The report, line by line."""
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
            more = f" and {len(self.arrays) - 4} more" if len(self.arrays) > 4 else ""
            names = ", ".join(f"'{name}'" for name in self.arrays[:4])
            lines.append(f"  after step {self.last}: {names}{more} (of {self.array_count} arrays)")
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
        run: its folder.
        first: updates of the checkpoint from which to go on; 0 begins anew. None: the last but one, or 0.
        last: updates of the checkpoint to come to. None: the next one after `first`, or the newest.
        task: of the run, as `unisono.task_config.read_run` takes it.
        trust: import the task that the run names, wherever it lies.

    Raises:
        TrustError: if the run names a task that nobody has vouched for.
        RunError: if there are no such checkpoints, or none from which a run can go on.
        CheckpointError: if one of them is damaged.
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
    train.start_run(config)
    again = commit.open_checkpoint(folder / "checkpoints" / after.path.name)
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
        (run / REPLAYS).rmdir()  # unless another one lies there
    return ReplayResult(**{**vars(result), "folder": None})


def _choose_checkpoints(run: Path, first: int | None, last: int | None) -> tuple[Checkpoint | None, Checkpoint]:
    """The two checkpoints, of which every byte is what was written."""
    find_checkpoint(run)
    steps = [int(path.name.rpartition("-")[2]) for path in commit.find_checkpoints(run / "checkpoints")]
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
    """A run of its own that is as far as the first checkpoint, and its configuration."""
    made = before.step if before else 0
    name = f"{made}-to-{after.step}-{uuid.uuid4().hex[:8]}"
    folder = run / REPLAYS / name
    layout = {**config.layout.model_dump(), **after.about["config"]["layout"]}  # as it was then
    changes: dict[str, Any] = {
        "layout": type(config.layout).model_validate(layout),
        "run": {"name": name, "dir": folder.parent, "resume": "must" if before else "never", "stop_after": after.step},
        "checkpoint": {
            "every": None, "keep_every": None, "keep_best": None, "at_end": True, "final": after.holds,
            "upload": Upload(),
        },
        "eval": {"every": None, "at_end": False}, "callbacks": [],
        "observe": {"trackers": [], "profile": None},
        "launch": {"nodes": 1, "node_rank": None, "rendezvous": None, "max_restarts": 0},
    }  # fmt: skip
    groups = {
        group: getattr(config, group).model_copy(update=change) if isinstance(change, dict) else change
        for group, change in changes.items()
    }
    config = config.model_copy(update=groups)
    if before is not None:
        _link_checkpoint(before.path, folder / "checkpoints" / before.path.name)
        if (run / ledger.FOLDER).is_dir():
            shutil.copytree(run / ledger.FOLDER, folder / ledger.FOLDER)
        for file in (FINGERPRINT, FILES):
            if (run / file).is_file():
                shutil.copy(run / file, folder / file)
        values = {**fingerprint.to_json(config), "recipe": references.absolute_reference(config.recipe)}
        (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return folder, config


def _link_checkpoint(source: Path, target: Path) -> None:
    """The same checkpoint under another name, without its bytes a second time where the file system can do that."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy(path, target / path.name)


def _read_steps(run: Path, first: int, last: int) -> dict[int, dict[str, Any]]:
    """What a run's events say of each of some steps."""
    shown = events.step_events(events.read_events(run / "events.jsonl"))
    return {e["step"]: {name: e.get(name) for name in _STEP_VALUES} for e in shown if first < e["step"] <= last}


def _array_content(array: Mapping[str, Any] | None) -> Any:
    """What a manifest says of an array's content, wherever it lies; of equal layouts the pieces are equal."""
    if array is None:
        return None
    pieces = sorted((piece["offset"], piece["shape"], piece["sha256"]) for piece in array["pieces"])
    return array["dtype"], array["shape"], pieces
