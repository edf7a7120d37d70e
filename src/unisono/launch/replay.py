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
from unisono.checkpoint.exchange.export import newest
from unisono.config import fingerprint, references
from unisono.config.schema.run import RunConfig, Upload
from unisono.data import ledger
from unisono.launch import cluster, train
from unisono.launch.run_directory import FILES, FINGERPRINT
from unisono.observe import events
from unisono.runtime.errors import ConfigError, RunError, ranges
from unisono.task_config import read_run

if TYPE_CHECKING:
    from unisono.task import Task

FOLDER = "replays"  # in the run's
_COMPARED = ("loss", "grad_norm")  # of each step
_KEPT = ("step", "plan", "random")  # of a checkpoint's state


@dataclass(frozen=True)
class Replayed:
    """What steps came to when they were made again.

    Attributes:
        first: updates made before the first of them.
        last: updates made after the last of them.
        steps: the steps that both runs tell of, by number from 1.
        apart: values of the first step that is not what it was, as `name: (then, now)`; empty if all are.
        step: that step; None if there is none.
        arrays: names of those of the last checkpoint that are not what they were.
        compared: how many arrays there are.
        state: parts of its state that are not what they were.
        folder: of the steps that were made again; None where nothing differs, and it is gone.
    """

    first: int
    last: int
    steps: list[int]
    apart: Mapping[str, tuple[Any, Any]]
    step: int | None
    arrays: list[str]
    compared: int
    state: list[str]
    folder: Path | None

    @property
    def same(self) -> bool:
        """Whether everything is, bit for bit, what it was."""
        return self.step is None and not self.arrays and not self.state

    def lines(self, run: Path) -> list[str]:
        """What is told."""
        what = f"steps {self.first + 1} to {self.last} of {run}"
        if self.same:
            told = f"loss and gradient norm of {len(self.steps)} steps, {self.compared} arrays and the order"
            return [f"{what}, made again, are what they were: {told}, bit for bit"]
        lines = [f"{what} do not come out as they were. The run, as it is now, is left alone"]
        if self.step is not None:
            values = ", ".join(f"{name} was {then!r} and is {now!r}" for name, (then, now) in self.apart.items())
            lines.append(f"  the first step that differs is step {self.step}: {values}")
        if self.arrays:
            more = f" and {len(self.arrays) - 4} more" if len(self.arrays) > 4 else ""
            names = ", ".join(f"'{name}'" for name in self.arrays[:4])
            lines.append(f"  after step {self.last}: {names}{more} (of {self.compared} arrays)")
        if self.state:
            lines.append(f"  what was consumed is not the same either: {', '.join(self.state)}")
        return [
            *lines,
            f"  made again: {self.folder}",
            "  Replay once more. If two replays agree, the run was disturbed: suspect the hardware that it ran on. If "
            "they do not, this machine is at fault, or something in the task is not repeatable; `unisono prove` tells.",
        ]


def replay(
    run: Path,
    first: int | None = None,
    last: int | None = None,
    *,
    task: str | type[Task] | None = None,
    trust: bool = False,
) -> Replayed:
    """Make the steps between two checkpoints of a run again, with its layout, and compare.

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
        raise ConfigError(f"unisono replay starts the processes itself; give it without {place.launcher}")
    before, after = _chosen(run, first, last)
    config = read_run(run, task, trust=trust)
    made = before.step if before else 0
    try:
        folder, config = _prepared(run, config, before, after)
    except OSError as error:
        raise RunError(f"{run}: no folder can be made there to make steps in: {error.strerror}") from error
    train.start(config)
    again = commit.open_(folder / "checkpoints" / after.path.name)
    then, now = _steps(run, made, after.step), _steps(folder, made, after.step)
    common = sorted(then.keys() & now.keys())
    step = next((n for n in common if then[n] != now[n]), None)
    apart = {} if step is None else {
        name: (then[step][name], now[step][name]) for name in _COMPARED if then[step][name] != now[step][name]
    }  # fmt: skip
    arrays = [name for name, array in after.arrays.items() if _content(array) != _content(again.arrays.get(name))]
    state = [name for name in _KEPT if after.state[name] != again.state[name]]
    consumed = [(one.state["ledger"] or {}).get("consumed") for one in (after, again)]
    state += [] if consumed[0] == consumed[1] else ["samples"]
    result = Replayed(made, after.step, common, apart, step, arrays, len(after.arrays), state, folder)
    if not result.same:
        return result
    shutil.rmtree(folder)
    with suppress(OSError):
        (run / FOLDER).rmdir()  # unless another one lies there
    return Replayed(**{**vars(result), "folder": None})


def _chosen(run: Path, first: int | None, last: int | None) -> tuple[Checkpoint | None, Checkpoint]:
    """The two checkpoints, of which every byte is what was written."""
    newest(run)
    steps = [int(path.name.rpartition("-")[2]) for path in commit.find(run / "checkpoints")]
    if last is None:
        last = min((step for step in steps if first is not None and step > first), default=steps[-1])
    if first is None:
        first = max((step for step in steps if step < last), default=0)
    begin, end = newest(run, first) if first else None, newest(run, last)
    if not first < last:
        raise RunError(f"{run} has no checkpoint after step {first}; there are those of steps {ranges(steps)}")
    before = commit.open_(begin) if begin else None
    if before is not None and before.holds != "everything":
        raise RunError(f"{before.path} holds the {before.holds} only, so no step can be made from it")
    return before, commit.open_(end)


def _prepared(run: Path, config: RunConfig, before: Checkpoint | None, after: Checkpoint) -> tuple[Path, RunConfig]:
    """A run of its own that is as far as the first checkpoint, and its configuration."""
    made = before.step if before else 0
    name = f"{made}-to-{after.step}-{uuid.uuid4().hex[:8]}"
    folder = run / FOLDER / name
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
        _linked(before.path, folder / "checkpoints" / before.path.name)
        if (run / ledger.FOLDER).is_dir():
            shutil.copytree(run / ledger.FOLDER, folder / ledger.FOLDER)
        for file in (FINGERPRINT, FILES):
            if (run / file).is_file():
                shutil.copy(run / file, folder / file)
        values = {**fingerprint.plain(config), "recipe": references.lasting(config.recipe)}
        (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return folder, config


def _linked(source: Path, target: Path) -> None:
    """The same checkpoint under another name, without its bytes a second time where the file system can do that."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy(path, target / path.name)


def _steps(run: Path, first: int, last: int) -> dict[int, dict[str, Any]]:
    """What a run's events say of each of some steps."""
    told = events.steps(events.read(run / "events.jsonl"))
    return {e["step"]: {name: e.get(name) for name in _COMPARED} for e in told if first < e["step"] <= last}


def _content(array: Mapping[str, Any] | None) -> Any:
    """What a manifest says of an array's content, wherever it lies; of equal layouts the pieces are equal."""
    if array is None:
        return None
    pieces = sorted((piece["offset"], piece["shape"], piece["sha256"]) for piece in array["pieces"])
    return array["dtype"], array["shape"], pieces
