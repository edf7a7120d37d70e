"""The published data layout: `<split>/dataset.json` and `.npy` files, with augmented examples stored one by one.

Folders made by the original repositories (sapientinc/HRM, SamsungSAILMontreal/TinyRecursiveModels) are read as they are,
memory-mapped, and `unisono data prepare puzzles` writes the same. An epoch is what it is there: each task once, in one
of its stored variants, which is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.puzzles.data.formats import ARC_FORMAT, Format, Puzzle, Tokens, maze_format, other_format, sudoku_format
from unisono.runtime.errors import DataError
from unisono.runtime.files import whole

_FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
_META = ("pad_id", "ignore_label_id", "vocab_size", "seq_len", "num_puzzle_identifiers", "sets")
Numbers = NDArray[np.int64]


class StoredPuzzle(NamedTuple):
    """An example of which several variants are stored.

    Attributes:
        questions: of each variant, (variants, length).
        answers: of each variant, (variants, length).
        identifiers: of each variant, (variants,).
    """

    source: StoredPuzzles
    examples: Numbers
    variants: Numbers

    def variant(self, number: int) -> tuple[Tokens, Tokens, int]:
        """Question, answer and puzzle identifier of a variant."""
        example, source = int(self.examples[number]), self.source
        identifier = int(source.identifiers[self.variants[number]])
        answer = np.asarray(source.answers[example])
        if source.ignored != 0:
            answer = np.where(answer == source.ignored, 0, answer)
        return np.asarray(source.questions[example]), answer.astype(np.uint8), identifier


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
        embeddings: puzzle identifiers there are.
        ignored: token of the answers that is not counted.
    """

    format: Format
    questions: Tokens
    answers: Tokens
    identifiers: Numbers
    first_example: Numbers
    first_variant: Numbers
    embeddings: int
    ignored: int

    def __post_init__(self) -> None:
        sizes = self.first_example[self.first_variant[:-1] + 1] - self.first_example[self.first_variant[:-1]]
        object.__setattr__(self, "_first_row", np.concatenate([[0], np.cumsum(sizes)]))

    def __len__(self) -> int:
        rows: Numbers = vars(self)["_first_row"]
        return int(rows[-1])

    def __getitem__(self, row: int) -> StoredPuzzle:
        if not 0 <= row < len(self):
            raise IndexError(f"puzzle {row} of {len(self)}")
        rows: Numbers = vars(self)["_first_row"]
        task = int(np.searchsorted(rows, row, side="right")) - 1
        variants = np.arange(self.first_variant[task], self.first_variant[task + 1])
        sizes = self.first_example[variants + 1] - self.first_example[variants]
        return StoredPuzzle(self, self.first_example[variants] + (row - int(rows[task])) % sizes, variants)


def read_split(folder: Path) -> StoredPuzzles:
    """The split in a folder, e.g. `DIR/train`.

    Raises:
        DataError: for files that are missing or do not fit each other.
    """
    meta_file = folder / "dataset.json"
    if not meta_file.is_file():
        raise DataError(f"{folder} is not a data folder: it has no dataset.json")
    try:
        meta = json.loads(meta_file.read_text(encoding="utf-8"))
        values = {name: meta[name] for name in _META}
    except (ValueError, KeyError) as error:
        raise DataError(f"{meta_file} cannot be used: {type(error).__name__}: {error}") from error
    if len(values["sets"]) != 1:
        raise DataError(f"{meta_file} names the sets {values['sets']}; folders of one set can be read")
    if values["pad_id"] != 0:
        raise DataError(f"{meta_file} pads with token {values['pad_id']}; 0 is expected")
    arrays = {name: _open(folder / f"{values['sets'][0]}__{name}.npy") for name in _FIELDS}
    examples, length = arrays["inputs"].shape
    variants, tasks = len(arrays["puzzle_identifiers"]), len(arrays["group_indices"]) - 1
    for fits, what in (
        (length == values["seq_len"], f"inputs have {length} tokens, and seq_len is {values['seq_len']}"),
        (arrays["labels"].shape == (examples, length), "inputs and labels have different shapes"),
        (len(arrays["puzzle_indices"]) == variants + 1, "puzzle_indices does not have one entry more than puzzles"),
        (int(arrays["puzzle_indices"][-1]) == examples, "puzzle_indices does not end with the number of examples"),
        (int(arrays["group_indices"][-1]) == variants, "group_indices does not end with the number of puzzles"),
        (tasks > 0 and examples > 0, "there is no example"),
        (int(arrays["puzzle_identifiers"].max()) < values["num_puzzle_identifiers"], "a puzzle identifier is too large"),
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
        int(values["num_puzzle_identifiers"]),
        0 if values["ignore_label_id"] is None else int(values["ignore_label_id"]),
    )


class SplitWriter:
    """Writes a split, example by example; the folder is complete once `close` has written `dataset.json`.

    Args:
        folder: where; made anew.
        format: of all examples.
        examples: that will be written.
        embeddings: puzzle identifiers there are.
    """

    def __init__(self, folder: Path, format: Format, examples: int, embeddings: int) -> None:  # noqa: A002
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._format, self._embeddings = folder, format, embeddings
        shape = (examples, format.length)
        self._arrays = [
            np.lib.format.open_memmap(folder / f"all__{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
            for name in ("inputs", "labels")
        ]
        self._written, self._identifiers = 0, list[int]()
        self._first_example, self._first_variant = [0], [0]

    def add_variant(self, identifier: int, examples: Iterable[tuple[Tokens, Tokens]]) -> None:
        """One variant of a task: its examples."""
        for pair in examples:
            for array, tokens in zip(self._arrays, pair, strict=True):
                array[self._written] = tokens
            self._written += 1
        self._identifiers.append(identifier)
        self._first_example.append(self._written)

    def end_task(self) -> None:
        """All variants of a task have been added."""
        self._first_variant.append(len(self._identifiers))

    def close(self) -> None:
        """Write what describes the examples."""
        for array in self._arrays:
            assert len(array) == self._written
            array.flush()
        tasks = len(self._first_variant) - 1
        numbers = (self._identifiers, self._first_example, self._first_variant)
        for name, values in zip(_FIELDS[2:], numbers, strict=True):
            np.save(self._folder / f"all__{name}.npy", np.array(values, dtype=np.int32))
        meta = {
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "vocab_size": self._format.vocabulary,
            "seq_len": self._format.length,
            "num_puzzle_identifiers": self._embeddings,
            "total_groups": tasks,
            "mean_puzzle_examples": self._written / len(self._identifiers),
            "total_puzzles": len(self._identifiers),
            "sets": ["all"],
        }
        with whole(self._folder / "dataset.json") as temporary:
            temporary.write_text(json.dumps(meta, indent=1), encoding="utf-8")


def write_identifiers(folder: Path, names: list[str]) -> None:
    """`identifiers.json`: what each puzzle identifier stands for; 0 is none in particular."""
    with whole(folder / "identifiers.json") as temporary:
        temporary.write_text(json.dumps(["<blank>", *names]), encoding="utf-8")


def _open(file: Path) -> NDArray[Any]:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _format(length: int, vocabulary: int) -> Format:
    """What is known by its numbers; anything else is a row of tokens."""
    known = (sudoku_format(4), sudoku_format(6), sudoku_format(9), maze_format(30, 30), ARC_FORMAT)
    fits = (one for one in known if (one.length, one.vocabulary) == (length, vocabulary))
    return next(fits, other_format(length, vocabulary))


def as_puzzle(stored: StoredPuzzle, number: int, row: int) -> Puzzle:
    """A stored variant as an example of its own; its group is its puzzle identifier."""
    question, answer, identifier = stored.variant(number)
    return Puzzle(question, answer, identifier, 0, float("nan"), row)
