"""The published data layout: `<split>/dataset.json` and `.npy` files, with augmented examples stored one by one.

Folders made by the original repositories (sapientinc/HRM, SamsungSAILMontreal/TinyRecursiveModels) are read as they
are, memory-mapped. An epoch is the same as there: each task once, in one of its stored variants, at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from unisono import DataError
from unisono.recipe_tools import safe_paths
from unisono_puzzles.data.formats import (
    ARC_FORMAT,
    Format,
    Tokens,
    maze_format,
    other_format,
    sudoku_format,
)

_FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
Numbers = NDArray[np.int64]


class _Meta(TypedDict):
    pad_id: int
    ignore_label_id: int | None
    vocab_size: int
    seq_len: int
    num_puzzle_identifiers: int
    sets: list[str]


class StoredPuzzle(NamedTuple):
    """An example of which several variants are stored.

    Attributes:
        source: that they are read from.
        examples: number of each variant's example in the source, (variants,).
        identifiers: puzzle identifier of each variant, (variants,).
        rating: NaN if unknown.
    """

    source: ExampleSource
    examples: Numbers
    identifiers: Numbers
    rating: float

    def variant(self, number: int) -> tuple[Tokens, Tokens, int]:
        """Question, answer and puzzle identifier of a variant."""
        question, answer = self.source.read(int(self.examples[number]))
        return question, answer, int(self.identifiers[number])


class ExampleSource(Protocol):
    """Examples that are stored one by one."""

    def read(self, example: int) -> tuple[Tokens, Tokens]:
        """Question and answer of an example."""


@dataclass(frozen=True)
class StoredPuzzles:
    """A split of a folder; a source of `StoredPuzzle`.

    Attributes:
        format: of all examples.
        questions: tokens of every stored example, (examples, length).
        answers: as questions.
        identifiers: of every stored variant of a task, (variants,).
        first_example: of every variant, (variants + 1,).
        first_variant: of every task, (tasks + 1,).
        embeddings: number of puzzle identifiers.
        ignored: answer token that is not counted.
    """

    format: Format
    questions: Tokens
    answers: Tokens
    identifiers: Numbers
    first_example: Numbers
    first_variant: Numbers
    embeddings: int
    ignored: int

    @cached_property
    def _first_row(self) -> Numbers:
        """Of every task, (tasks + 1,)."""
        sizes = self.first_example[self.first_variant[:-1] + 1] - self.first_example[self.first_variant[:-1]]
        return np.concatenate([[0], np.cumsum(sizes)])

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def __getitem__(self, row: int) -> StoredPuzzle:
        if not 0 <= row < len(self):
            raise IndexError(f"puzzle {row} of {len(self)}")
        task = int(np.searchsorted(self._first_row, row, side="right")) - 1
        variants = np.arange(self.first_variant[task], self.first_variant[task + 1])
        sizes = self.first_example[variants + 1] - self.first_example[variants]
        examples = self.first_example[variants] + (row - int(self._first_row[task])) % sizes
        return StoredPuzzle(self, examples, self.identifiers[variants], float("nan"))

    def read(self, example: int) -> tuple[Tokens, Tokens]:
        """Question and answer of an example; tokens that are ignored are 0."""
        answer = np.asarray(self.answers[example])
        if self.ignored != 0:
            answer = np.where(answer == self.ignored, 0, answer)
        return np.asarray(self.questions[example]), answer.astype(np.uint8)


def read_split(folder: Path) -> StoredPuzzles:
    """The split in a folder, e.g. `DIR/train`.

    Raises:
        DataError: for files that are missing or do not fit each other.
    """
    meta_file = folder / "dataset.json"
    if not meta_file.is_file():
        raise DataError(f"{folder} is not a data folder: it has no dataset.json")
    try:
        values = safe_paths.read_json(folder, meta_file.name, _Meta)
    except (OSError, ValueError) as error:
        raise DataError(f"{meta_file} cannot be used: {error}") from error
    if len(values["sets"]) != 1:
        raise DataError(f"{meta_file} names the sets {values['sets']}; folders of one set can be read")
    if values["pad_id"] != 0:
        raise DataError(f"{meta_file} pads with token {values['pad_id']}; 0 is expected")
    arrays = {name: _open(folder, f"{values['sets'][0]}__{name}.npy") for name in _FIELDS}
    examples, length = arrays["inputs"].shape
    variants, tasks = len(arrays["puzzle_identifiers"]), len(arrays["group_indices"]) - 1
    for fits, what in (
        (length == values["seq_len"], f"inputs have {length} tokens, and seq_len is {values['seq_len']}"),
        (arrays["labels"].shape == (examples, length), "inputs and labels have different shapes"),
        (len(arrays["puzzle_indices"]) == variants + 1, "puzzle_indices does not have one entry more than puzzles"),
        (int(arrays["puzzle_indices"][-1]) == examples, "puzzle_indices does not end with the number of examples"),
        (int(arrays["group_indices"][-1]) == variants, "group_indices does not end with the number of puzzles"),
        (tasks > 0 and examples > 0, "there is no example"),
        (
            int(arrays["puzzle_identifiers"].max()) < values["num_puzzle_identifiers"],
            "a puzzle identifier is too large",
        ),
    ):
        if not fits:
            raise DataError(f"{folder}: {what}")
    return StoredPuzzles(
        _format(values["seq_len"], values["vocab_size"]),
        arrays["inputs"],
        arrays["labels"],
        np.asarray(arrays["puzzle_identifiers"], dtype=np.int64),
        np.asarray(arrays["puzzle_indices"], dtype=np.int64),
        np.asarray(arrays["group_indices"], dtype=np.int64),
        values["num_puzzle_identifiers"],
        values["ignore_label_id"] or 0,
    )


def _open(folder: Path, name: str) -> NDArray[Any]:
    try:
        return safe_paths.load_array(folder, name, mapped=True, follow=True)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / name} cannot be read: {error}") from error


def _format(length: int, vocabulary: int) -> Format:
    """The format with this length and vocabulary; a row of tokens if none is known."""
    known = (sudoku_format(4), sudoku_format(6), sudoku_format(9), maze_format(30, 30), ARC_FORMAT)
    fits = (one for one in known if (one.length, one.vocabulary) == (length, vocabulary))
    return next(fits, other_format(length, vocabulary))
