"""From the settings of the data to puzzles: what is trained on, what is held out, and how a puzzle becomes an example."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.puzzles import settings
from unisono.recipes.puzzles.data import arc, arrays, augment, generate, tables, twins
from unisono.recipes.puzzles.data.arrays import StoredPuzzle, StoredPuzzles
from unisono.recipes.puzzles.data.formats import ARC_FORMAT, Format, Puzzle, Puzzles, Tokens
from unisono.runtime.errors import ConfigError, DataError
from unisono.runtime.rng import generator


class Example(NamedTuple):
    """What a model is shown.

    Attributes:
        question: tokens, (length,).
        answer: tokens, (length,); 0 is not counted.
        identifier: number of its puzzle embedding; 0 where it has none of its own.
        rating: NaN where nobody says.
    """

    question: Tokens
    answer: Tokens
    identifier: int
    rating: float


@dataclass(frozen=True)
class Library:
    """The puzzles of one kind.

    Attributes:
        config: where they come from.
        format: of all of them.
        training: a source of `Puzzle` or `StoredPuzzle`.
        held_out: as training; None for none.
        embeddings: puzzle identifiers there are, with 0 for none in particular.
        tasks: names of what the groups of ARC stand for.
        demonstrations: examples of each group in the training, (groups,).
    """

    config: Any
    format: Format
    training: Puzzles | StoredPuzzles
    held_out: Puzzles | StoredPuzzles | None
    embeddings: int = 1
    tasks: tuple[str, ...] = ()
    demonstrations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def example(self, puzzle: Puzzle | StoredPuzzle, rng: np.random.Generator | None) -> Example:
        """A puzzle as it is shown: with a generator under a drawn symmetry, without one as it is."""
        if isinstance(puzzle, StoredPuzzle):
            number = 0 if rng is None else int(rng.integers(len(puzzle.variants)))
            return Example(*puzzle.variant(number), float("nan"))
        if rng is None or not self.config.augment:
            return self.variant(puzzle, 0)
        count = self.config.augmentations
        if self.format.kind == "arc":
            return self.variant(puzzle, int(rng.integers(count + 1)), rng)
        if count is None:
            question, answer = self._changed(puzzle, rng)
            return Example(question, answer, 0, puzzle.rating)
        return self.variant(puzzle, int(rng.integers(count + 1)))

    def variant(self, puzzle: Puzzle, number: int, rng: np.random.Generator | None = None) -> Example:
        """A numbered augmentation of a puzzle; 0 is the puzzle as it is.

        Args:
            puzzle: it.
            number: of the augmentation.
            rng: ARC: draws where the grids are placed; None: at the upper left.
        """
        if self.format.kind == "arc":
            identifier = 1 + puzzle.group * (self.config.augmentations + 1) + number
            if number == 0 and rng is None:
                return Example(puzzle.question, puzzle.answer, identifier, puzzle.rating)
            change = self.arc_variant(puzzle.group, number)
            grids = [change(augment.decode_grid(tokens)) for tokens in (puzzle.question, puzzle.answer)]
            if rng is not None and (not self.config.translate or rng.random() * self.demonstrations[puzzle.group] < 1):
                rng = None  # one of a task's examples, on average, stays where questions are asked: at the corner
            return Example(*augment.place_grids(grids[0], grids[1], rng), identifier, puzzle.rating)
        if number == 0:
            return Example(puzzle.question, puzzle.answer, 0, puzzle.rating)
        rng = generator(self.config.seed, "augmentation", self.format.kind, puzzle.number, number)
        question, answer = self._changed(puzzle, rng)
        return Example(question, answer, 0, puzzle.rating)

    def arc_variant(self, group: int, number: int) -> augment.ArcVariant:
        """The change of all grids of a task in its numbered augmentation."""
        if number == 0:
            return augment.ArcVariant.identity()
        return augment.ArcVariant.draw(generator(self.config.seed, "augmentation", self.tasks[group], number))

    def _changed(self, puzzle: Puzzle, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        change = augment.augment_sudoku if self.format.kind == "sudoku" else augment.augment_grid
        return change(self.format, puzzle.question, puzzle.answer, rng)

    def facts(self) -> dict[str, Any]:
        """Sizes, as JSON."""
        shape = f"{self.format.height}×{self.format.width}"
        told: dict[str, Any] = {"kind": f"{self.format.kind} {shape}", "puzzles": len(self.training)}
        told["held_out"] = 0 if self.held_out is None else len(self.held_out)
        if self.embeddings > 1:
            told["puzzle_embeddings"] = self.embeddings
        return told


def open_libraries(config: settings.Part | settings.SeveralData) -> dict[str, Library]:
    """The puzzles that the settings ask for, by the name of their kind; of a single kind the name is its `kind`.

    Raises:
        DataError: for files that are missing, or puzzles that are improper.
        ConfigError: for settings that do not fit them.
    """
    if isinstance(config, settings.SeveralData):
        return {name: open_library(part) for name, part in config.parts.items()}
    library = open_library(config)
    return {library.format.kind: library}


def open_library(config: settings.Part) -> Library:
    """The puzzles of one kind; see `open_libraries`."""
    match config:
        case settings.Embedded():
            made = generate.sudokus(config.side, config.puzzles + config.held_out, config.clues, config.seed)
            training, held_out = made.subset(slice(0, config.puzzles)), made.subset(slice(config.puzzles, None))
            return Library(config, made.format, training, held_out)
        case settings.Sudoku():
            return _of_tables(config, lambda path: _checked_sudokus(config, path))
        case settings.Maze():
            return _of_tables(
                config,
                lambda path: tables.check_mazes(tables.read_table(path), config.size).require(
                    path, config.improper == "skip"
                ),
            )
        case settings.Arc():
            tasks = arc.read_tasks(config.path, config.sets)
            training, held_out = arc.split_tasks(tasks, config.evaluate)
            return Library(
                config,
                ARC_FORMAT,
                training,
                held_out if len(held_out) else None,
                1 + len(tasks) * (config.augmentations + 1),
                tuple(f"{task.set}/{task.name}" for task in tasks),
                np.bincount(training.groups, minlength=len(tasks)),
            )
        case settings.Arrays():
            train = arrays.read_split(config.path / "train")
            test = arrays.read_split(config.path / "test") if (config.path / "test").is_dir() else None
            if test is not None and test.format != train.format:
                raise DataError(f"{config.path}: train and test hold different kinds of puzzles")
            return Library(config, train.format, train, test, train.embeddings)
    raise AssertionError(config)


def _checked_sudokus(config: settings.Sudoku, path: Path) -> Puzzles:
    checked = tables.check_sudokus(tables.read_table(path), config.unique)
    return checked.require(path, config.improper == "skip")


def _of_tables(config: settings.Sudoku | settings.Maze, read: Any) -> Library:
    path, test = config.path, config.test
    if path.is_dir():
        path, test = path / "train.csv", test or path / "test.csv"
        if config.test is None and not test.is_file():
            test = None
    every: Puzzles = read(path)
    if test is not None:
        training, held_out = every, read(test)
        if held_out.format != every.format:
            raise DataError(f"{path} and {test} hold puzzles of different sizes")
    else:
        out = _held_out(config, every)
        training, held_out = every.subset(~out), every.subset(out)
    if config.puzzles is not None:
        if config.puzzles > len(training):
            raise ConfigError(f"data.puzzles={config.puzzles}, but {path} has {len(training)} to train on")
        drawn = generator(config.seed, "puzzles").permutation(len(training))[: config.puzzles]
        training = training.subset(np.sort(drawn))
    if not len(training):
        raise ConfigError(f"data.held_out={config.held_out} leaves no puzzle of {path} to train on")
    return Library(config, every.format, training, held_out if len(held_out) else None)


def _held_out(config: settings.Sudoku | settings.Maze, puzzles: Puzzles) -> NDArray[np.bool_]:
    """Which puzzles are held out, (puzzles,): whole groups of possible twins, in a drawn order, up to the fraction."""
    sudoku = puzzles.format.kind == "sudoku"
    kinds = twins.twin_groups(puzzles.format, puzzles.answers) if sudoku else np.arange(len(puzzles))
    sizes = np.bincount(kinds)
    order = generator(config.seed, "held out").permutation(len(sizes))
    chosen = order[np.cumsum(sizes[order]) <= config.held_out * len(puzzles)]
    return np.isin(kinds, chosen)
