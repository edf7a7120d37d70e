"""Mazes, ARC and the published layout: read, checked, augmented, written and read again."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from recipes.puzzles.tests.puzzles_for_tests import (
    SHARED,
    small_sudokus,
    write_arc,
    write_csv,
    write_mazes,
    write_published,
)
from unisono import prepare
from unisono.runtime.errors import ConfigError, DataError
from unisono.runtime.rng import generator
from unisono_puzzles import settings
from unisono_puzzles.data import arc, arrays, augment, tables
from unisono_puzzles.data.formats import ARC_FORMAT, Puzzles
from unisono_puzzles.data.library import open_library
from unisono_puzzles.model import votes


def solved_maze(grid: np.ndarray) -> bool:
    """Whether the cells of the way lead from the start to the goal."""
    (start,), (goal,) = np.argwhere(grid == 3).tolist(), np.argwhere(grid == 4).tolist()
    queue, seen = deque([tuple(start)]), {tuple(start)}
    while queue:
        row, column = queue.popleft()
        for place in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if (
                0 <= place[0] < len(grid)
                and 0 <= place[1] < len(grid[0])
                and grid[place] in (4, 5)
                and place not in seen
            ):
                seen.add(place)
                queue.append(place)
    return tuple(goal) in seen


def test_mazes_are_read_and_stay_solved_under_all_symmetries(tmp_path: Path) -> None:
    write_mazes(tmp_path / "train.csv")
    checked = tables.check_mazes(tables.read_puzzles(tmp_path / "train.csv"))
    assert len(checked.puzzles) == 2 and not checked.improper
    puzzle, format_ = checked.puzzles[0], checked.puzzles.format
    seen = set()
    for number in range(60):
        question, answer = augment.augment_puzzle(format_, puzzle.question, puzzle.answer, generator(number))
        assert solved_maze(answer.reshape(5, 5)) and ((answer == 5) <= (question == 2)).all()
        seen.add(question.tobytes())
    assert len(seen) == 8


def test_an_improper_maze_is_named_by_its_line(tmp_path: Path) -> None:
    write_mazes(tmp_path / "train.csv")
    first, second = (tmp_path / "train.csv").read_text().splitlines()[1:]
    lines = [first.replace("S", " ", 1), second, first.replace("G#", " #", 1), first.replace("#####", "####o", 1)]
    lines += [",".join(["made", first.split(",")[1], second.split(",")[2], "4"]), first.replace(",4", ",long")]
    (tmp_path / "bad.csv").write_text("\n".join(["source,question,answer,rating", *lines]))
    improper = tables.check_mazes(tables.read_puzzles(tmp_path / "bad.csv")).improper
    assert sorted(improper) == [2, 4, 5, 6, 7]
    assert improper[2] == "has 0 cells with the start (S), not 1" and "another maze" in improper[6]
    assert improper[7] == "its rating 'long' is not a number"


def test_a_maze_whose_way_has_a_gap_or_a_cell_apart_is_improper(tmp_path: Path) -> None:
    write_mazes(tmp_path / "train.csv")
    head, first, second = (tmp_path / "train.csv").read_text().splitlines()
    source, question, answer, rating = first.split(",")
    gap = [source, question, answer.replace("o", " ", 1), rating]
    apart = [source, question[:-1] + " ", answer[:-1] + "o", rating]
    (tmp_path / "bad.csv").write_text("\n".join([head, ",".join(gap), second, ",".join(apart)]))
    improper = tables.check_mazes(tables.read_puzzles(tmp_path / "bad.csv")).improper
    assert improper == dict.fromkeys((2, 4), "its path (o) does not lead from the start to the goal")


def test_a_file_of_another_kind_is_refused_with_the_kinds_there_are(tmp_path: Path) -> None:
    write_mazes(tmp_path / "train.csv")
    write_csv(tmp_path / "sudokus.csv", small_sudokus(3))
    config = {"held_out": 0.5, "cache": tmp_path / "cache"}
    with pytest.raises(DataError, match=r"line 2 has 25 characters, and a Sudoku has 16, 36, 81; mazes .* data=maze"):
        open_library(settings.Sudoku(kind="sudoku", path=tmp_path / "train.csv", **config))
    with pytest.raises(DataError, match=r"3 of 3 puzzles are improper.* or choose the kind of puzzles"):
        open_library(settings.Maze(kind="maze", path=tmp_path / "sudokus.csv", **config))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty \(data.path\) is a folder without train.csv"):
        open_library(settings.Maze(kind="maze", path=tmp_path / "empty", **config))


def test_arc_is_read_in_both_layouts_alike_and_tests_of_the_evaluation_are_held_out(tmp_path: Path) -> None:
    write_arc(tmp_path / "folders")
    tasks = arc.read_tasks(tmp_path / "folders")
    combined = tmp_path / "combined"
    combined.mkdir()
    for set_ in ("training", "evaluation"):
        own = [task for task in tasks if task.set == set_]
        contents = {t.name: json.loads((tmp_path / "folders" / set_ / f"{t.name}.json").read_text()) for t in own}
        solutions = {name: [pair.pop("output") for pair in content["test"]] for name, content in contents.items()}
        (combined / f"arc-agi_{set_}_challenges.json").write_text(json.dumps(contents))
        (combined / f"arc-agi_{set_}_solutions.json").write_text(json.dumps(solutions))
    same = arc.read_tasks(combined)
    assert [(t.set, t.name) for t in same] == [(t.set, t.name) for t in tasks]
    for one, other in zip(arc.split_tasks(tasks, None), arc.split_tasks(same, None), strict=True):
        assert one.fingerprint == other.fingerprint
    training, held_out = arc.split_tasks(tasks, None)
    assert len(training) == 3 * 2 + 2 and len(held_out) == 1
    assert held_out.groups.tolist() == [0] and (training.groups == 0).sum() == 2


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ([[1, 2], [3]], "not of one length"),
        ([[10]], "colours are 0 to 9, got 10 to 10"),
        ([[0] * 31], "1×31, and at most 30×30"),
        ([], "is not a grid"),
    ],
)
def test_a_grid_that_is_none_is_named_by_file_and_pair(tmp_path: Path, grid: list, said: str) -> None:
    write_arc(tmp_path, tasks=1)
    file = tmp_path / "evaluation" / "task0.json"
    content = json.loads(file.read_text())
    content["train"][1]["output"] = grid
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"task0\.json, train pair 2, output.*{said}"):
        arc.read_tasks(tmp_path)


def restored(tokens: np.ndarray, change: augment.ArcVariant) -> np.ndarray:
    """The grid of the task as it was, by the code that counts votes."""
    index = np.arange(30, dtype=np.int32)
    return votes.restore(tokens[None], np.array([change.symmetry]), change.colours[None].astype(np.int32), index)


def test_an_arc_augmentation_is_one_of_its_task_and_can_be_taken_back(tmp_path: Path) -> None:
    write_arc(tmp_path)
    library = open_library(settings.Arc(kind="arc", path=tmp_path, augmentations=20))
    assert isinstance(library.training, Puzzles) and library.embeddings == 1 + 3 * 21
    one, other = (library.training[row] for row in np.flatnonzero(library.training.groups == 1)[:2])
    changed = 0
    for number in range(21):
        change = library.arc_variant(1, number)
        for puzzle in (one, other):  # both demonstrations of a task are changed alike
            example = library.variant(puzzle, number)
            assert example.identifier == 1 + 1 * 21 + number
            for tokens, original in ((example.question, puzzle.question), (example.answer, puzzle.answer)):
                assert (restored(tokens, change) == restored(original, library.arc_variant(1, 0))).all()
            changed += (example.question != puzzle.question).any()
    assert changed >= 30
    drawn = [library.example(one, generator(n)) for n in range(200)]
    assert len({example.identifier for example in drawn}) == 21
    places = {int(np.flatnonzero(example.question)[0]) for example in drawn}
    assert 0 in places and len(places) > 50  # translated, but some stay at the corner
    assert library.example(one, None).question.tolist() == one.question.tolist()


def test_the_published_layout_is_read_as_it_is_and_one_variant_is_drawn(tmp_path: Path) -> None:
    made = small_sudokus(6)
    write_published(tmp_path / "train", made, variants=3)
    stored = arrays.read_split(tmp_path / "train")
    assert len(stored) == 6 and stored.format == made.format and isinstance(stored.questions, np.memmap)
    assert [stored[row].variant(2)[0].tolist() for row in range(6)] == np.roll(made.questions, 2, axis=1).tolist()
    library = open_library(settings.Arrays(kind="arrays", path=tmp_path))
    shown = {library.example(stored[0], generator(n)).question.tobytes() for n in range(40)}
    assert len(shown) == 3 and library.held_out is None
    file = tmp_path / "train" / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "seq_len": 15}))
    with pytest.raises(DataError, match="inputs have 16 tokens, and seq_len is 15"):
        arrays.read_split(tmp_path / "train")


def test_an_ignored_token_of_the_published_layout_is_not_counted(tmp_path: Path) -> None:
    made = small_sudokus(2)
    write_published(tmp_path / "train", made, ignored=3)
    answer = arrays.read_split(tmp_path / "train")[0].variant(0)[1]
    assert (answer == np.where(made.answers[0] == 3, 0, made.answers[0])).all()


@pytest.mark.parametrize("kind", ["sudoku", "arc", "arrays"])
def test_prepared_puzzles_are_those_that_are_augmented_on_the_fly(tmp_path: Path, kind: str) -> None:
    made = small_sudokus(12)
    if kind == "sudoku":
        write_csv(tmp_path / "all.csv", made)
        asked: settings.Part = settings.Sudoku(kind="sudoku", path=tmp_path / "all.csv", held_out=0.4, augmentations=3)
    elif kind == "arc":
        write_arc(tmp_path / "arc")
        asked = settings.Arc(kind="arc", path=tmp_path / "arc", augmentations=3, translate=False)
    else:
        write_published(tmp_path / "published" / "train", made, variants=4)
        asked = settings.Arrays(kind="arrays", path=tmp_path / "published")
    library = open_library(asked)
    for part, preparation in library.preparations().items():
        assert prepare.prepare(preparation, tmp_path / "made" / part, shard_mb=0.001) is not None
    found = open_library(settings.Prepared(kind="prepared", path=tmp_path / "made"))
    assert found.format == library.format and found.embeddings == library.embeddings
    assert len(found.training) == len(library.training)
    seen = set()
    for row in range(len(library.training)):
        puzzle, stored = library.training[row], found.training[row]
        for number in range(4):
            want = puzzle.variant(number) if kind == "arrays" else library.variant(puzzle, number)[:3]
            have = stored.variant(number)
            assert (
                all((one == other).all() for one, other in zip(have[:2], want[:2], strict=True)) and have[2] == want[2]
            )
            seen.add(have[0].tobytes())
    assert len(seen) > len(library.training)
    if kind == "sudoku":
        assert found.held_out is not None and len(found.held_out) == len(library.held_out or ())
        assert (found.held_out[0].variant(0)[0] == library.held_out[0].question).all()


def test_augmentations_without_end_cannot_be_prepared(tmp_path: Path) -> None:
    write_csv(tmp_path / "all.csv", small_sudokus(3))
    library = open_library(settings.Sudoku(kind="sudoku", path=tmp_path / "all.csv", held_out=0))
    with pytest.raises(ConfigError, match=r"data\.augmentations=1000"):
        library.preparations()


def test_held_out_puzzles_have_no_twin_in_the_training_and_subsets_are_drawn(tmp_path: Path) -> None:
    made = small_sudokus(12)
    write_csv(tmp_path / "all.csv", made)
    library = open_library(settings.Sudoku(kind="sudoku", path=tmp_path / "all.csv", held_out=0.5))
    assert isinstance(library.training, Puzzles) and isinstance(library.held_out, Puzzles)
    assert len(library.training) + len(library.held_out) == 12 and len(library.held_out) > 0
    few = open_library(settings.Sudoku(kind="sudoku", path=tmp_path / "all.csv", held_out=0, puzzles=5)).training
    others = open_library(settings.Sudoku(kind="sudoku", path=tmp_path / "all.csv", held_out=0, puzzles=5, seed=1))
    assert len(few) == 5 and few.numbers.tolist() != others.training.numbers.tolist()


def test_numbered_augmentations_are_the_same_in_every_epoch(tmp_path: Path) -> None:
    write_csv(tmp_path / "all.csv", small_sudokus(3))
    config = settings.Sudoku(kind="sudoku", path=tmp_path / "all.csv", held_out=0, augmentations=4)
    library = open_library(config)
    puzzle = library.training[1]
    drawn = {library.example(puzzle, generator(n)).question.tobytes() for n in range(100)}
    assert drawn == {library.variant(puzzle, number).question.tobytes() for number in range(5)} and len(drawn) == 5
    free = open_library(config.model_copy(update={"augmentations": None}))
    assert len({free.example(puzzle, generator(n)).question.tobytes() for n in range(100)}) > 50
    still = open_library(config.model_copy(update={"augment": False}))
    assert {still.example(puzzle, generator(n)).question.tobytes() for n in range(9)} == {puzzle.question.tobytes()}


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not there")
def test_the_real_mazes_and_arc_tasks_are_read() -> None:
    mazes = open_library(settings.Maze(kind="maze", path=SHARED / "maze_30x30"))
    assert (len(mazes.training), len(mazes.held_out or ())) == (1000, 200)
    assert all(solved_maze(mazes.training[row].answer.reshape(30, 30)) for row in range(0, 1000, 100))
    tasks = open_library(settings.Arc(kind="arc", path=SHARED / "arc_agi_1"))
    assert (len(tasks.training), len(tasks.held_out or ())) == (1302, 416) and tasks.format == ARC_FORMAT
