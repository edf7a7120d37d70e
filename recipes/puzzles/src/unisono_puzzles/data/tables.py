"""Sudokus and mazes from text: CSV files with a question and an answer per row, or one Sudoku per line.

Every puzzle is checked before training starts; all improper puzzles are reported with their line and the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import DataError, read_table
from unisono.recipe_tools import safe_paths
from unisono_puzzles.data.augment import decode_grid
from unisono_puzzles.data.formats import (
    ARC_SIDE,
    BLANK,
    MAZE_SYMBOLS,
    SUDOKU_BOXES,
    Format,
    Puzzles,
    Tokens,
    maze_format,
    sudoku_format,
)
from unisono_puzzles.data.solver import solve, units

_QUESTION = ("q", "question", "puzzle", "quizzes")
_ANSWER = ("a", "answer", "solution", "solutions")
_RATING = ("rating", "difficulty")
_NAMED = 5  # improper puzzles listed in an error


@dataclass(frozen=True)
class Table:
    """The columns of a file.

    Attributes:
        path: of the file.
        questions: as in the file.
        answers: as in the file; None without a column of answers.
        ratings: None without a column of ratings.
        lines: line number of each row, from 1.
    """

    path: Path
    questions: list[str]
    answers: list[str] | None
    ratings: list[str] | None
    lines: list[int]


def read_puzzles(path: Path) -> Table:
    """A CSV file whose header names a question (`q`, `question`, …), or a file of one Sudoku per line.

    Raises:
        DataError: for a file that is empty, or has no such column.
    """
    try:
        with safe_paths.open_text(path, "utf-8-sig", "") as file:
            first = file.readline()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    if "," in first:
        columns = read_table(path, delimiter=",")
        questions, answers, ratings = (
            next((columns[name] for name in columns if name.lower() in words), None)
            for words in (_QUESTION, _ANSWER, _RATING)
        )
        if questions is None:
            raise DataError(
                f"{path} has no column of questions: its header is {', '.join(columns)}, and one of "
                f"{', '.join(_QUESTION)} is needed. A file of one Sudoku per line needs no header"
            )
        if answers is None:
            _refuse_unnamed_answers(path, columns, questions)
        table = Table(path, questions, answers, ratings, list(range(2, len(questions) + 2)))
    else:
        lines = safe_paths.read_regular(path).decode("utf-8-sig").splitlines()
        rows = [(number, text.strip()) for number, text in enumerate(lines, start=1)]
        rows = [(number, text) for number, text in rows if text and not text.startswith("#")]
        table = Table(path, [text for _, text in rows], None, None, [number for number, _ in rows])
    if not table.questions:
        raise DataError(f"{path} has no puzzle")
    return table


def _refuse_unnamed_answers(path: Path, columns: Mapping[str, list[str]], questions: list[str]) -> None:
    """Refuse a column that looks like answers under another name; it would be ignored and the Sudokus solved."""
    for name, values in columns.items():
        given = [(text, question) for text, question in zip(values, questions, strict=True) if text]
        if values is not questions and given and all(len(text) == len(question) for text, question in given):
            raise DataError(
                f"{path}: column '{name}' looks like the answers but has another name; rename it to one of "
                f"{', '.join(_ANSWER)}, or remove it"
            )


@dataclass(frozen=True)
class CheckedPuzzles:
    """The puzzles of a file, and the reasons why others are improper.

    Attributes:
        puzzles: the proper ones; `numbers` are their rows in the file.
        improper: line of the file -> why its puzzle cannot be used.
    """

    puzzles: Puzzles
    improper: dict[int, str]

    def require(self, path: Path, skip: bool) -> Puzzles:
        """The proper puzzles, if all are proper or improper ones may be skipped.

        Raises:
            DataError: naming lines and reasons.
        """
        if self.improper and not (skip and len(self.puzzles)):
            total = len(self.improper) + len(self.puzzles)
            named = "; ".join(f"line {line}: {why}" for line, why in list(self.improper.items())[:_NAMED])
            more = f"; and {len(self.improper) - _NAMED} more" if len(self.improper) > _NAMED else ""
            advice = "Fix the file"
            if len(self.puzzles):
                advice += ", or leave them out with data.improper=skip"
            elif all("characters, not" in why or "has the symbol" in why for why in self.improper.values()):
                advice += ", or choose the kind of puzzles that it holds, e.g. data=sudoku or data=maze"
            count = len(self.improper)
            are = "puzzle is" if total == 1 else "puzzles is" if count == 1 else "puzzles are"
            raise DataError(f"{path}: {count} of {total} {are} improper: {named}{more}. {advice}")
        return self.puzzles


def check_sudokus(table: Table, unique: bool = False, answers: bool = True) -> CheckedPuzzles:
    """The Sudokus of a table: `.` or `0` is an empty cell, and the size follows from the length of most of them.

    `unique` solves each to check that its solution is unique, as always where a required answer is missing. Without
    `answers`, missing ones are zeros.
    """
    format_ = _sudoku_format(table)
    questions, wrong = _encode(table.questions, format_, "." + _digits(format_), {"0": "."})
    improper: dict[int, str] = {}
    _add(improper, table, wrong)
    solutions = np.zeros_like(questions)
    if table.answers is not None:
        solutions, wrong = _encode(table.answers, format_, "." + _digits(format_), {}, what="answer")
        empty = np.array([not text for text in table.answers])
        _add(improper, table, ["" if none else why for none, why in zip(empty, wrong, strict=True)])
        for mask, why in (
            ((solutions == BLANK).any(axis=1), "its answer has an empty cell"),
            (((questions > BLANK) & (questions != solutions)).any(axis=1), "its answer contradicts a clue"),
            (~_is_complete(format_, solutions), "its answer has a digit twice in a row, column or box"),
        ):
            _add(improper, table, mask & ~empty, why)
        solutions[empty] = 0
    _add(improper, table, _clues_clash(format_, questions), "has a digit twice in a row, column or box")
    good = np.array([line not in improper for line in table.lines], dtype=bool)
    unknown = (solutions == 0).all(axis=1)
    unsolved = good & (np.ones_like(good) if unique else unknown & answers)
    if unsolved.any():
        found = solve(format_, questions[unsolved])
        counts = np.ones(len(good), dtype=np.int32)
        counts[unsolved] = found.counts
        _add(improper, table, counts == 0, "has no solution")
        _add(improper, table, counts == 2, "has several solutions")
        solutions[np.flatnonzero(unsolved)] = found.answers
    return _checked(table, format_, questions, solutions, improper)


def check_mazes(table: Table, size: tuple[int, int] | None = None, answers: bool = True) -> CheckedPuzzles:
    """The mazes of a table: walls `#`, floor, `S`, `G`; in answers `o` along the way; row after row, by default square.

    Without `answers`, missing ones are zeros.
    """
    length = _common_length(table.questions)
    side = math.isqrt(length)
    if size is None and side * side != length:
        raise DataError(
            f"{table.path}: mazes of {length} cells are not square; say their size: data.size=[rows,columns]"
        )
    height, width = size or (side, side)
    if height * width != length:
        raise DataError(f"{table.path}: mazes have {length} cells, not {height}×{width} (data.size)")
    format_ = maze_format(height, width)
    questions, wrong = _encode(table.questions, format_, MAZE_SYMBOLS, {})
    improper: dict[int, str] = {}
    _add(improper, table, wrong)
    path, start, goal = (MAZE_SYMBOLS.index(symbol) + 1 for symbol in "oSG")
    for token, name in ((start, "start (S)"), (goal, "goal (G)")):
        number = (questions == token).sum(axis=1)
        _add(improper, table, [f"has {n} cells with the {name}, not 1" if n != 1 else "" for n in number])
    if table.answers is None and answers:
        raise DataError(f"{table.path} has no column of answers; one of {', '.join(_ANSWER)} is needed")
    ways = np.zeros_like(questions)
    if table.answers is not None:
        ways, wrong = _encode(table.answers, format_, MAZE_SYMBOLS, {}, what="answer")
        missing = np.array([not text and not answers for text in table.answers])
        _add(improper, table, ["" if none else why for none, why in zip(missing, wrong, strict=True)])
        walked = np.where(ways == path, MAZE_SYMBOLS.index(" ") + 1, ways)
        differs = (walked != questions).any(axis=1) & ~missing
        _add(improper, table, differs, "its answer is of another maze")
        shape = (len(ways), height, width)
        broken = ~_connects_start_and_goal(ways.reshape(shape), path, start, goal) & ~missing
        _add(improper, table, broken, "its path (o) does not lead from the start to the goal")
    return _checked(table, format_, questions, ways, improper)


def puzzle_to_text(tokens: Tokens, format_: Format) -> str:
    """A puzzle as in files, with `?` for tokens without a symbol; JSON for ARC and other formats."""
    if format_.kind == "arc":
        return json.dumps(decode_grid(tokens).tolist())
    if format_.kind == "other":
        return json.dumps(tokens.tolist())
    symbols = "." + _digits(format_) if format_.kind == "sudoku" else MAZE_SYMBOLS
    return "".join(symbols[token - 1] if 1 <= token <= len(symbols) else "?" for token in tokens.tolist())


def grid_to_json(restored: NDArray[np.int64]) -> str:
    """An ARC grid from `votes.restore`, (901,), as JSON."""
    width = int(restored[-1])
    rows = restored[:-1].reshape(ARC_SIDE, ARC_SIDE)
    height = int((rows[:, 0] > 0).sum()) if width else 0
    return json.dumps((rows[:height, :width] - 1).tolist())


def _sudoku_format(table: Table) -> Format:
    length = _common_length(table.questions)
    sides = {side * side: side for side in SUDOKU_BOXES}
    if length not in sides:
        raise DataError(
            f"{table.path}: line {table.lines[0]} has {len(table.questions[0])} characters, and a Sudoku has "
            f"{', '.join(map(str, sorted(sides)))}; mazes are read by data=maze"
        )
    return sudoku_format(sides[length])


def _digits(format_: Format) -> str:
    return "123456789"[: format_.height]


def _common_length(texts: Sequence[str]) -> int:
    lengths, counts = np.unique([len(text) for text in texts], return_counts=True)
    return int(lengths[counts.argmax()])


def _encode(
    texts: Sequence[str], format_: Format, symbols: str, same: dict[str, str], what: str = ""
) -> tuple[Tokens, list[str]]:
    """Tokens, (texts, length), 0 for texts that cannot be encoded; and the reason for each of these, else ''."""
    table = np.zeros(256, dtype=np.uint8)
    for number, symbol in enumerate(symbols, start=1):
        table[ord(symbol)] = number
    for symbol, other in same.items():
        table[ord(symbol)] = table[ord(other)]
    tokens = np.zeros((len(texts), format_.length), dtype=np.uint8)
    reasons = [""] * len(texts)
    subject = f"its {what} has" if what else "has"
    fits = []
    for row, text in enumerate(texts):
        if len(text) != format_.length:
            reasons[row] = f"{subject} {len(text)} characters, not {format_.length} ({format_.size})"
        elif not text.isascii():
            reasons[row] = f"{subject} the symbol {next(one for one in text if not one.isascii())!r}"
        else:
            fits.append(row)
    if fits:
        joined = np.frombuffer("".join(texts[row] for row in fits).encode("ascii"), dtype=np.uint8)
        tokens[fits] = table[joined].reshape(len(fits), format_.length)
    for row in np.array(fits, dtype=np.int64)[(tokens[fits] == 0).any(axis=1)].tolist():
        place = int((tokens[row] == 0).argmax())
        reasons[row] = f"{subject} the symbol {texts[row][place]!r} in place {place + 1}; allowed are {symbols!r}"
    return tokens, reasons


def _is_complete(format_: Format, answers: Tokens) -> NDArray[np.bool_]:
    lines = np.sort(answers[:, units(format_)], axis=2)
    return np.asarray((lines == np.arange(2, format_.height + 2)).all(axis=(1, 2)))


def _clues_clash(format_: Format, questions: Tokens) -> NDArray[np.bool_]:
    lines = np.sort(questions[:, units(format_)], axis=2)
    return np.asarray(((lines[:, :, 1:] == lines[:, :, :-1]) & (lines[:, :, 1:] > BLANK)).any(axis=(1, 2)))


def _connects_start_and_goal(grids: Tokens, path: int, start: int, goal: int) -> NDArray[np.bool_]:
    """Whether the path of each grid, (grids, rows, columns), connects start and goal, with no cell apart."""
    way = (grids == path) | (grids == start) | (grids == goal)
    reached = grids == start
    while True:
        wider = reached.copy()
        wider[:, 1:] |= reached[:, :-1]
        wider[:, :-1] |= reached[:, 1:]
        wider[:, :, 1:] |= reached[:, :, :-1]
        wider[:, :, :-1] |= reached[:, :, 1:]
        wider &= way
        if (wider == reached).all():
            return np.asarray((reached == way).all(axis=(1, 2)))
        reached = wider


def _add(improper: dict[int, str], table: Table, wrong: Iterable[Any], why: str = "") -> None:
    """Keep the first reason of each line: `why` wherever something is wrong, by default the entry itself."""
    for line, reason in zip(table.lines, wrong, strict=True):
        if reason:
            improper.setdefault(line, why or str(reason))


def _checked(
    table: Table, format_: Format, questions: Tokens, answers: Tokens, improper: dict[int, str]
) -> CheckedPuzzles:
    ratings = np.full(len(questions), np.nan, dtype=np.float32)
    for row, text in enumerate(table.ratings or ()):
        try:
            ratings[row] = float(text) if text else np.nan
        except ValueError:
            improper.setdefault(table.lines[row], f"its rating {text!r} is not a number")
    good = np.array([line not in improper for line in table.lines], dtype=bool)
    puzzles = Puzzles.from_arrays(format_, questions, answers, ratings=ratings).subset(good)
    return CheckedPuzzles(puzzles, dict(sorted(improper.items())))
