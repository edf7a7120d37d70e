"""From settings to puzzles: the training and held-out puzzles, and how a puzzle becomes an example."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError, compute_once, file_hash, generator, generators, hold_out
from unisono.recipe_tools import format_examples, safe_paths
from unisono_puzzles import settings
from unisono_puzzles.data import arc, arrays, augment, formats, generate, tables, twins
from unisono_puzzles.data.arrays import StoredPuzzle, StoredPuzzles
from unisono_puzzles.data.formats import (
    ARC_FORMAT,
    Format,
    Puzzle,
    Puzzles,
    Tokens,
    format_from_json,
    format_to_json,
)
from unisono_puzzles.data.prepared import PreparedPuzzles, PuzzlePreparation

PuzzleSource = Puzzles | StoredPuzzles | PreparedPuzzles
_VERSION = 2  # of cache entries
_PREPARED_VERSION = 3  # of prepared folders; 3: other random numbers for the numbered augmentations


class Example(NamedTuple):
    """An example as the model sees it.

    Attributes:
        question: tokens, (length,).
        answer: tokens, (length,); 0 is not counted.
        identifier: number of its puzzle embedding; 0 if it has none of its own.
        rating: NaN if unknown.
    """

    question: Tokens
    answer: Tokens
    identifier: int
    rating: float


@dataclass(frozen=True)
class Library:
    """The puzzles of one kind.

    Attributes:
        config: settings of their source.
        format: of all of them.
        training: puzzles to train on.
        held_out: None if there are none.
        embeddings: number of puzzle identifiers, including the shared 0.
        tasks: names of ARC tasks, by group.
        demonstrations: number of training examples of each group, (groups,).
    """

    config: Any
    format: Format
    training: PuzzleSource
    held_out: PuzzleSource | None
    embeddings: int = 1
    tasks: tuple[str, ...] = ()
    demonstrations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def example(self, puzzle: Puzzle | StoredPuzzle, rng: np.random.Generator | None) -> Example:
        """A puzzle as the model sees it: randomly augmented if there is a generator, else unchanged."""
        if isinstance(puzzle, StoredPuzzle):
            number = 0 if rng is None else int(rng.integers(len(puzzle.examples)))
            return Example(*puzzle.variant(number), puzzle.rating)
        if rng is None or not self.config.augment:
            return self.variant(puzzle, 0)
        count = self.config.augmentations
        if self.format.kind == "arc":
            return self.variant(puzzle, int(rng.integers(count + 1)), rng)
        if count is None:
            question, answer = augment.augment_puzzle(self.format, puzzle.question, puzzle.answer, rng)
            return Example(question, answer, 0, puzzle.rating)
        return self.variant(puzzle, int(rng.random() * (count + 1)))

    @property
    def draws(self) -> int:
        """How many random numbers `examples` needs for a puzzle."""
        if not self.config.augment:
            return 0
        return augment.count_draws(self.format) if self.config.augmentations is None else 1

    def examples(self, puzzles: Puzzles, draws: NDArray[np.float64]) -> Tokens:
        """Sudokus or mazes as the model sees them, as `example` makes each: (puzzles, question and answer, cells).

        Args:
            puzzles: to be augmented.
            draws: the first random numbers of each, (puzzles, `draws`).
        """
        boards = np.stack([puzzles.questions, puzzles.answers], axis=1)
        if not self.config.augment:
            return boards
        if self.config.augmentations is None:
            return augment.augment_boards(self.format, boards, draws)
        numbers = (draws[:, 0] * (self.config.augmentations + 1)).astype(np.int64)
        changed = np.flatnonzero(numbers)
        rows = np.stack([puzzles.numbers[changed], numbers[changed]], axis=1)
        rngs = generators(self.config.seed, "augmentation", self.format.kind, rows=rows)
        drawn = rngs.random(augment.count_draws(self.format))
        boards[changed] = augment.augment_boards(self.format, boards[changed], drawn)
        return boards

    def variant(self, puzzle: Puzzle, number: int, rng: np.random.Generator | None = None) -> Example:
        """A numbered augmentation of a puzzle; 0 is the puzzle itself. `rng` places ARC grids, else upper left."""
        identifier = self.identifier(puzzle, number)
        if self.format.kind == "arc":
            if number == 0 and rng is None:
                return Example(puzzle.question, puzzle.answer, identifier, puzzle.rating)
            change = self.arc_variant(puzzle.group, number)
            grids = [change(augment.decode_grid(tokens)) for tokens in (puzzle.question, puzzle.answer)]
            if rng is not None and (not self.config.translate or rng.random() * self.demonstrations[puzzle.group] < 1):
                rng = None  # one of a task's examples, on average, stays where questions are asked: at the corner
            return Example(*augment.place_grids(grids[0], grids[1], rng), identifier, puzzle.rating)
        if number == 0:
            return Example(puzzle.question, puzzle.answer, identifier, puzzle.rating)
        rng = generator(self.config.seed, "augmentation", self.format.kind, puzzle.number, number)
        question, answer = augment.augment_puzzle(self.format, puzzle.question, puzzle.answer, rng)
        return Example(question, answer, identifier, puzzle.rating)

    def with_tasks_of_run(self, tasks: Sequence[str], embeddings: int) -> Library:
        """The held-out ARC puzzles with the task numbers, and so the puzzle embeddings, of a trained run.

        Args:
            tasks: names of the run's tasks, `<set>/<task>`; a task of another set is found by its own name.
            embeddings: number of the run's puzzle embeddings.

        Raises:
            DataError: for tasks that the run was not trained on, and for another number of augmentations.
        """
        by_name = {name.rpartition("/")[2]: number for number, name in enumerate(tasks)}
        by_name |= {name: number for number, name in enumerate(tasks)}
        numbers = [by_name.get(name, by_name.get(name.rpartition("/")[2], -1)) for name in self.tasks]
        assert isinstance(self.held_out, Puzzles)
        groups = np.array(numbers, dtype=np.int32)[self.held_out.groups]
        if unknown := sorted({self.tasks[group] for group in self.held_out.groups[groups < 0].tolist()}):
            raise DataError(
                f"{self.config.path}: the run was not trained on the demonstrations of {format_examples(unknown)}, so "
                "it has no puzzle embedding for them. Train on a folder that has these tasks, too"
            )
        if embeddings != 1 + len(tasks) * (self.config.augmentations + 1):
            raise DataError(
                f"data.augmentations={self.config.augmentations} does not fit the {embeddings} puzzle embeddings of "
                "the run; leave it out to use the run's own"
            )
        return replace(self, held_out=replace(self.held_out, groups=groups), tasks=tuple(tasks), embeddings=embeddings)

    def stored_variant(self, puzzle: Puzzle, number: int) -> Example:
        """A numbered augmentation as it is stored; training grids of ARC have a random place of their own."""
        rng = generator(self.config.seed, "place", puzzle.group, puzzle.number, number) if number else None
        return self.variant(puzzle, number, rng)

    def identifier(self, puzzle: Puzzle, number: int) -> int:
        """The puzzle identifier of a numbered augmentation."""
        return 1 + puzzle.group * (self.config.augmentations + 1) + number if self.format.kind == "arc" else 0

    def arc_variant(self, group: int, number: int) -> augment.ArcVariant:
        """How a numbered augmentation changes all grids of a task."""
        if number == 0:
            return augment.ArcVariant.identity()
        return augment.ArcVariant.draw(generator(self.config.seed, "augmentation", self.tasks[group], number))

    def preparations(self) -> dict[str, PuzzlePreparation]:
        """What `unisono data prepare` writes, by part: all augmentations to train on, and the held-out puzzles.

        Raises:
            ConfigError: if the number of augmentations is unlimited, or the data is already prepared.
        """
        if isinstance(self.config, settings.Prepared):
            raise ConfigError(f"{self.config.path} is prepared already (data=prepared)")
        variants = 1
        if not isinstance(self.config, settings.Arrays) and self.config.augment:
            if self.config.augmentations is None:
                raise ConfigError(
                    "data.augmentations=null has no fixed number of augmentations to store; set the number per puzzle, "
                    "e.g. data.augmentations=1000"
                )
            variants += self.config.augmentations
        parts = {"train": (self.training, variants), "test": (self.held_out, 1)}
        settings_ = {name: str(value) for name, value in self.config.model_dump().items() if name != "cache"}
        made = {}
        for name, (rows, count) in parts.items():
            if rows is not None and len(rows):
                puzzles = getattr(rows, "fingerprint", None)
                inputs = {"version": _PREPARED_VERSION, "part": name, "puzzles": puzzles, "settings": settings_}
                made[name] = PuzzlePreparation(self, rows, count, inputs)
        return made

    def facts(self) -> dict[str, Any]:
        """Sizes, as JSON."""
        facts: dict[str, Any] = {"kind": f"{self.format.kind} {self.format.size}", "puzzles": len(self.training)}
        facts["held_out"] = 0 if self.held_out is None else len(self.held_out)
        if self.embeddings > 1:
            facts["puzzle_embeddings"] = self.embeddings
        return facts


def open_libraries(config: Any, ask: bool = False) -> dict[str, Library]:
    """Open the puzzles of the settings, by kind; a single kind is named after its format.

    Args:
        config: the group `data`.
        ask: only to be solved: all puzzles are held out, and need no answers.

    Raises:
        DataError: for missing files and improper puzzles.
        ConfigError: for settings that do not fit the puzzles.
    """
    if isinstance(config, settings.SeveralData):
        return {name: open_library(part, ask) for name, part in config.parts.items()}
    library = open_library(config, ask)
    return {library.format.kind: library}


def open_library(config: settings.Part, ask: bool = False) -> Library:
    """The puzzles of one kind; see `open_libraries`."""
    match config:
        case settings.Embedded():
            clues = (config.clues[0], config.clues[1])
            count = config.puzzles + config.held_out

            def make() -> Puzzles:
                return generate.sudokus(config.side, count, clues, config.seed)

            made = _load_or_compute(config, ["embedded", config.side, count, clues, config.seed], make)
            training, held_out = made.subset(slice(0, config.puzzles)), made.subset(slice(config.puzzles, None))
            return Library(config, made.format, training, held_out)
        case settings.Sudoku():
            check = partial(tables.check_sudokus, unique=config.unique, answers=not ask)
            return _open_tables(config, ["sudoku", config.unique, ask], check, ask)
        case settings.Maze():
            check = partial(tables.check_mazes, size=config.size, answers=not ask)
            return _open_tables(config, ["maze", config.size, ask], check, ask)
        case settings.Arc():
            tasks = arc.read_tasks(config.path, config.sets)
            training, held_out = arc.split_tasks(tasks, config.evaluate, answers=not ask)
            return Library(
                config,
                ARC_FORMAT,
                training,
                held_out if len(held_out) else None,
                1 + len(tasks) * (config.augmentations + 1),
                tuple(f"{task.set}/{task.name}" for task in tasks),
                np.bincount(training.groups, minlength=len(tasks)),
            )
        case settings.Arrays() | settings.Prepared():
            read: Callable[[Path], StoredPuzzles | PreparedPuzzles] = (
                arrays.read_split if isinstance(config, settings.Arrays) else PreparedPuzzles
            )
            train = read(config.path / "train")
            test = read(config.path / "test") if (config.path / "test").is_dir() else None
            if test is not None and test.format != train.format:
                raise DataError(f"{config.path}: train and test hold different kinds of puzzles")
            return Library(config, train.format, train, test, train.embeddings, getattr(train, "tasks", ()))
    raise AssertionError(config)


def _open_tables(
    config: settings.Sudoku | settings.Maze,
    address: list[Any],
    check: Callable[[tables.Table], tables.CheckedPuzzles],
    ask: bool,
) -> Library:
    def read(path: Path) -> Puzzles:
        if not path.is_file():
            raise DataError(f"{path} (data.path) does not exist")

        def proper() -> Puzzles:
            return check(tables.read_puzzles(path)).require(path, config.improper == "skip")

        return _load_or_compute(config, [*address, config.improper, file_hash(path)], proper)

    path, test = config.path, config.test
    if path.is_dir():
        if not (path / "train.csv").is_file():
            raise DataError(
                f"{path} (data.path) is a folder without train.csv; name a file, or another folder (ARC-AGI tasks are "
                "read by data=arc)"
            )
        path, test = path / "train.csv", test or path / "test.csv"
        if config.test is None and not test.is_file():
            test = None
    if ask:
        questions = read(test or path)
        return Library(config, questions.format, questions.subset(slice(0, 0)), questions)
    every = read(path)
    if test is not None:
        training, held_out = every, read(test)
        if held_out.format != every.format:
            raise DataError(f"{path} and {test} hold puzzles of different sizes")
    else:
        out = _choose_held_out(config, every)
        training, held_out = every.subset(~out), every.subset(out)
    if config.puzzles is not None:
        if config.puzzles > len(training):
            raise ConfigError(f"data.puzzles={config.puzzles}, but {path} has {len(training)} to train on")
        drawn = generator(config.seed, "puzzles").permutation(len(training))[: config.puzzles]
        training = training.subset(np.sort(drawn))
    return Library(config, every.format, training, held_out if len(held_out) else None)


def _choose_held_out(config: settings.Sudoku | settings.Maze, puzzles: Puzzles) -> NDArray[np.bool_]:
    """Which puzzles are held out, (puzzles,): of Sudokus, whole groups of possible twins."""
    if puzzles.format.kind != "sudoku":
        return hold_out(len(puzzles), config.held_out, what="maze")
    names = twins.twin_names(puzzles.format, puzzles.answers)
    return hold_out(names, config.held_out, what="puzzle up to symmetry")


def _load_or_compute(config: Any, address: list[Any], make: Callable[[], Puzzles]) -> Puzzles:
    """Puzzles from the cache; read, checked or generated on first use."""

    def write(folder: Path) -> None:
        puzzles = make()
        for name in formats.COLUMNS:
            np.save(folder / f"{name}.npy", getattr(puzzles, name))
        (folder / "format.json").write_text(json.dumps(format_to_json(puzzles.format)), encoding="utf-8")

    def load(folder: Path) -> Puzzles:
        format_ = format_from_json(safe_paths.read_json(folder, "format.json", formats.FormatJson))
        found = (safe_paths.load_array(folder, f"{name}.npy", mapped=True) for name in formats.COLUMNS)
        return Puzzles(format_, *found)

    return compute_once("puzzles", [_VERSION, *address], write, load, cache=config.cache)
