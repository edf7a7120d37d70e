"""ARC-AGI tasks (versions 1 and 2) from JSON: a folder of tasks by set, or Kaggle's combined files.

Demonstrations of every task are trained on, and what is asked of the sets that are evaluated is held out. What ties a
question to the demonstrations of its task is the task's puzzle embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unisono import ConfigError, DataError
from unisono.recipe_tools import nearest, safe_paths
from unisono_puzzles.data.augment import Grid, encode_grid
from unisono_puzzles.data.formats import ARC_FORMAT, ARC_SIDE, Puzzles

Pair = tuple[Grid, Grid | None]
_COMBINED = "_challenges.json"


@dataclass(frozen=True)
class ArcTask:
    """One task.

    Attributes:
        name: as its file is called.
        set: that it belongs to, e.g. `training`.
        demonstrations: questions and answers.
        tests: questions, and answers where they are known.
    """

    name: str
    set: str
    demonstrations: tuple[Pair, ...]
    tests: tuple[Pair, ...]


def read_tasks(path: Path, sets: Sequence[str] | None = None) -> list[ArcTask]:
    """All tasks below a folder, by set and name.

    Args:
        path: a folder with `<set>/<task>.json` (below `data/` or not), or with `…_<set>_challenges.json` and
            `…_<set>_solutions.json`.
        sets: only these.

    Raises:
        DataError: for what is no task, naming file, task and pair; or where there is none.
        ConfigError: for a set that is not there.
    """
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    for link in path.rglob("*.json"):
        safe_paths.check_link(path, link.relative_to(path))
    combined = sorted(path.rglob(f"*{_COMBINED}"))
    read = _read_combined(path, combined) if combined else _read_folders(path)
    tasks = sorted(read, key=lambda task: (task.set, task.name))
    if not tasks:
        raise DataError(f"{path} has no ARC task: neither <set>/<task>.json nor files called *{_COMBINED}")
    known = sorted({task.set for task in tasks})
    for name in sets or ():
        if name not in known:
            raise ConfigError(f"data.sets: {path} has no set '{name}', {nearest(name, known)}")
    return [task for task in tasks if sets is None or task.set in sets]


def split_tasks(
    tasks: Sequence[ArcTask], evaluate: Sequence[str] | None, answers: bool = True
) -> tuple[Puzzles, Puzzles]:
    """Examples to train on, and those held out: what is asked in the evaluated sets.

    A task's group is its place in the list. `evaluate` None: the sets called `evaluation…`, else all; without
    `answers`, those held out need none.
    """
    sets = sorted({task.set for task in tasks})
    if evaluate is None:
        evaluate = [name for name in sets if name.startswith("evaluation")] or sets
    for name in evaluate:
        if name not in sets:
            raise ConfigError(f"data.evaluate: there is no set '{name}', {nearest(name, sets)}")
    training, held_out = list[tuple[int, Pair]](), list[tuple[int, Pair]]()
    for number, task in enumerate(tasks):
        training += [(number, pair) for pair in task.demonstrations]
        tests = held_out if task.set in evaluate else training
        tests += [(number, pair) for pair in task.tests if pair[1] is not None or (tests is held_out and not answers)]
    return examples(training), examples(held_out)


def examples(pairs: Sequence[tuple[int, Pair]]) -> Puzzles:
    """Pairs with the numbers of their tasks as examples, each grid at the upper left; unknown answers are empty."""
    length = ARC_FORMAT.length
    questions = np.zeros((len(pairs), length), dtype=np.uint8)
    answers = np.zeros((len(pairs), length), dtype=np.uint8)
    for row, (_, (question, answer)) in enumerate(pairs):
        questions[row] = encode_grid(question)
        if answer is not None:
            answers[row] = encode_grid(answer)
    groups = np.array([number for number, _ in pairs], dtype=np.int32)
    return Puzzles.from_arrays(ARC_FORMAT, questions, answers, groups=groups)


def _read_folders(path: Path) -> Iterator[ArcTask]:
    for file in sorted(path.rglob("*.json")):
        content = _load(path, file, Any)
        if isinstance(content, Mapping) and "train" in content:
            yield _task(file.stem, file.parent.name, content, None, f"{file}")


def _read_combined(path: Path, files: Sequence[Path]) -> Iterator[ArcTask]:
    for file in files:
        stem = file.name.removesuffix(_COMBINED)
        name = stem.split("_", 1)[-1]  # arc-agi_training -> training
        solutions_file = file.with_name(f"{stem}_solutions.json")
        solutions = _load(path, solutions_file, dict[str, list[Any]]) if solutions_file.is_file() else {}
        for task, content in _load(path, file, dict[str, dict[str, Any]]).items():
            yield _task(task, name, content, solutions.get(task), f"{file}: task {task}")


def _load(folder: Path, file: Path, shape: Any) -> Any:
    try:
        with safe_paths.open_found(file, folder) as opened:
            return safe_paths.parse_json(opened.read(), shape)
    except (ValueError, OSError) as error:
        raise DataError(f"{file} cannot be read as ARC tasks: {error}") from error


def _task(name: str, set_: str, content: Any, solutions: Sequence[Any] | None, where: str) -> ArcTask:
    parts: dict[str, tuple[Pair, ...]] = {}
    for part in ("train", "test"):
        pairs = []
        if not isinstance(content.get(part), list):
            raise DataError(f"{where} has no list '{part}'")
        for number, pair in enumerate(content[part]):
            place = f"{where}, {part} pair {number + 1}"
            if not isinstance(pair, Mapping) or "input" not in pair:
                raise DataError(f"{place} has no 'input'")
            output = pair.get("output")
            if output is None and part == "test" and solutions is not None and number < len(solutions):
                output = solutions[number]
            if output is None and part == "train":
                raise DataError(f"{place} has no 'output'")
            answer = None if output is None else _grid(output, f"{place}, output")
            pairs.append((_grid(pair["input"], f"{place}, input"), answer))
        parts[part] = tuple(pairs)
    return ArcTask(name, set_, parts["train"], parts["test"])


def _grid(rows: Any, where: str) -> Grid:
    try:
        grid = np.array(rows, dtype=np.int64)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: the rows of the grid are not of one length") from error
    if grid.ndim != 2 or not grid.size:
        raise DataError(f"{where} is not a grid: a list of rows, each a list of colours")
    if max(grid.shape) > ARC_SIDE:
        raise DataError(f"{where}: the grid is {grid.shape[0]}×{grid.shape[1]}, and at most 30×30 is allowed")
    if grid.min() < 0 or grid.max() > 9:
        raise DataError(f"{where}: colours are 0 to 9, got {grid.min()} to {grid.max()}")
    return grid.astype(np.uint8)
