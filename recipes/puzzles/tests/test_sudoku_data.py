"""Sudokus: solved, generated, read, checked, augmented, and kept apart from their twins."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.puzzles.tests.puzzles_for_tests import SHARED, SUDOKU4, small_sudokus, write_csv
from unisono.runtime.errors import DataError
from unisono.runtime.rng import generator
from unisono_puzzles.data import tables
from unisono_puzzles.data.augment import augment_puzzle
from unisono_puzzles.data.formats import BLANK, sudoku_format
from unisono_puzzles.data.generate import sudokus
from unisono_puzzles.data.solver import solve, units
from unisono_puzzles.data.twins import twin_names

HARD = SHARED / "sudoku_hard"


def complete(format_, boards: np.ndarray) -> bool:
    """Whether every row, column and box of every board has every digit."""
    digits = np.arange(2, format_.height + 2)
    return bool((np.sort(boards[:, units(format_)], axis=2) == digits).all())


def test_the_solver_finds_exactly_the_solutions_that_trying_everything_finds() -> None:
    full = small_sudokus(40)
    rng = np.random.default_rng(0)
    questions = np.where(rng.random(full.questions.shape) < 0.7, full.answers, BLANK).astype(np.uint8)
    questions[-5:, 0] = questions[-5:, 1] = 2  # no solution
    every = np.array([rows for rows in product(*[range(2, 6)] * 4) if len(set(rows)) == 4])
    boards = np.array([np.concatenate(four) for four in product(every, repeat=4)])
    boards = boards[(np.sort(boards[:, units(SUDOKU4)], axis=2) == np.arange(2, 6)).all(axis=(1, 2))]
    assert len(boards) == 288
    fits = [((boards == question) | (question == BLANK)).all(axis=1).sum() for question in questions]
    assert {0, 1} <= set(fits) and max(fits) > 1
    assert solve(SUDOKU4, questions, limit=1000).counts.tolist() == fits
    found = solve(SUDOKU4, questions)
    assert found.counts.tolist() == np.minimum(fits, 2).tolist()
    solved = found.counts > 0
    assert complete(SUDOKU4, found.answers[solved]) and not found.answers[~solved].any()


@pytest.mark.parametrize(("side", "clues"), [(4, (5, 7)), (6, (10, 14)), (9, (30, 34))])
def test_a_generated_sudoku_has_one_solution_and_does_not_depend_on_its_neighbours(side: int, clues: tuple) -> None:
    made = sudokus(side, 12, clues, seed=1)
    assert complete(made.format, made.answers)
    found = solve(made.format, made.questions)
    assert (found.counts == 1).all() and (found.answers == made.answers).all()
    assert (made.questions == BLANK).sum(axis=1).min() > side
    later = sudokus(side, 4, clues, seed=1, first=8)
    assert (later.questions == made.questions[8:]).all() and (later.answers == made.answers[8:]).all()
    assert (sudokus(side, 2, clues, seed=2).questions != made.questions[:2]).any(axis=1).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), side=st.sampled_from([4, 6, 9]))
def test_an_augmented_sudoku_is_a_sudoku_with_the_augmented_answer(seed: int, side: int) -> None:
    made = sudokus(side, 1, (side * 3, side * 3 + 2), seed=5)
    question, answer = augment_puzzle(made.format, made.questions[0], made.answers[0], generator(seed))
    found = solve(made.format, question[None])
    assert found.counts[0] == 1 and (found.answers[0] == answer).all()
    assert (question != made.questions[0]).any()


def test_every_symmetry_of_a_small_sudoku_is_drawn() -> None:
    made = small_sudokus(1)
    seen = {augment_puzzle(SUDOKU4, made.answers[0], made.answers[0], generator(n))[0].tobytes() for n in range(4000)}
    twins = set(twin_names(SUDOKU4, np.array([np.frombuffer(one, dtype=np.uint8) for one in seen])))
    assert len(seen) in (96, 192) and len(twins) == 1  # the two kinds of 288 solutions


def test_twins_are_found_and_others_told_apart() -> None:
    made = sudokus(9, 60, (60, 70), seed=2)
    twins = np.stack([augment_puzzle(made.format, one, one, generator(n))[0] for n, one in enumerate(made.answers)])
    groups = twin_names(made.format, np.concatenate([made.answers, twins]))
    assert groups[:60] == groups[60:] and len(set(groups)) == 60


def test_what_is_improper_is_named_by_its_line(tmp_path: Path) -> None:
    made = small_sudokus(9)
    lines = write_csv(tmp_path / "a.csv", made)
    questions = [line.split(",")[1] for line in lines]

    def change(row: int, question: str | None = None, answer: str | None = None) -> None:
        parts = lines[row].split(",")
        lines[row] = ",".join([parts[0], question or parts[1], answer or parts[2], parts[3]])

    change(2, question=questions[2] + ".")
    change(3, question="x" + questions[3][1:])
    change(4, answer=lines[5].split(",")[2])
    change(6, question="11" + "." * 14, answer="1234341221434321")
    change(7, answer="1" * 16)
    change(8, question="." * 16)
    (tmp_path / "b.csv").write_text("\n".join(lines))
    checked = tables.check_sudokus(tables.read_puzzles(tmp_path / "b.csv"), unique=True)
    assert checked.improper == {
        3: "has 17 characters, not 16 (4×4)",
        4: "has the symbol 'x' in place 1; allowed are '.1234'",
        5: "its answer contradicts a clue",
        7: "its answer contradicts a clue",
        8: "its answer contradicts a clue",
        9: "has several solutions",
    }
    with pytest.raises(
        DataError, match=r"6 of 9 puzzles are improper: line 3: has 17 characters.*and 1 more.*improper=skip"
    ):
        checked.require(tmp_path / "b.csv", skip=False)
    kept = checked.require(tmp_path / "b.csv", skip=True)
    assert kept.numbers.tolist() == [0, 4, 8] and (kept.questions == made.questions[[0, 4, 8]]).all()


def test_the_advice_fits_what_is_wrong_with_the_puzzles(tmp_path: Path) -> None:
    """Where no puzzle is proper, another kind may be meant, but not if they were read and have several solutions."""
    made, path = small_sudokus(3), tmp_path / "bare.txt"
    bare = [tables.puzzle_to_text(one, SUDOKU4) for one in made.questions]

    def refused(*lines: str) -> str:
        path.write_text("\n".join(lines))
        with pytest.raises(DataError) as told:
            tables.check_sudokus(tables.read_puzzles(path)).require(path, skip=False)
        return str(told.value)

    assert "1 of 3 puzzles is improper: line 3: has several solutions. Fix the file, or leave" in refused(
        bare[0], bare[1], "." * 16
    )
    assert refused("." * 16, "1" + "." * 15).endswith("line 2: has several solutions. Fix the file")
    assert refused("#" * 16, "S" * 16, "x" * 16).endswith("e.g. data=sudoku or data=maze")


def test_answers_under_another_name_are_not_passed_over(tmp_path: Path) -> None:
    path, made = tmp_path / "a.csv", sudokus(4, 2, (6, 8), 0)
    texts = [[tables.puzzle_to_text(tokens, made.format) for tokens in part] for part in (made.questions, made.answers)]
    for name, answers in (("solved", texts[1]), ("solved", [texts[1][0], ""])):
        path.write_text("\n".join([f"q,{name}", *map(",".join, zip(texts[0], answers, strict=True))]))
        with pytest.raises(DataError, match=r"column 'solved' looks like the answers.*rename it to one of a, answer"):
            tables.read_puzzles(path)
    path.write_text("\n".join(["q,source", *(f"{text},here" for text in texts[0])]))
    assert tables.read_puzzles(path).answers is None


def test_bare_lines_are_solved_and_those_without_one_solution_refused(tmp_path: Path) -> None:
    made = small_sudokus(5)
    file = tmp_path / "bare.txt"
    bare = [tables.puzzle_to_text(one, SUDOKU4).replace(".", "0") for one in made.questions]
    file.write_text("# a comment\n" + "\n".join(bare) + "\n")
    checked = tables.check_sudokus(tables.read_puzzles(file))
    assert not checked.improper and (checked.puzzles.answers == made.answers).all()
    file.write_text("\n".join([*bare, "." * 16, "12" + "." * 6 + "21" + "." * 6, "1" + "." * 10 + "1" + "...."]) + "\n")
    assert tables.check_sudokus(tables.read_puzzles(file)).improper[6] == "has several solutions"
    unanswered = tables.check_sudokus(tables.read_puzzles(file), answers=False).puzzles
    assert len(unanswered) >= 6 and not unanswered.answers.any()


@pytest.mark.skipif(not HARD.is_dir(), reason=f"{HARD} is not there")
def test_the_hard_sudokus_are_proper_and_the_improper_ones_are_not() -> None:
    table = tables.read_puzzles(HARD / "test.csv")
    checked = tables.check_sudokus(table)
    assert len(checked.puzzles) == 2903 and not checked.improper
    some = checked.puzzles.subset(np.arange(0, 2903, 40))
    found = solve(sudoku_format(9), some.questions)
    assert (found.counts == 1).all() and (found.answers == some.answers).all()
    assert checked.puzzles.ratings.max() > 200
    improper = tables.check_sudokus(tables.read_puzzles(HARD / "improper_multi_solution.txt"))
    assert len(improper.improper) == 1000 and set(improper.improper.values()) == {"has several solutions"}
