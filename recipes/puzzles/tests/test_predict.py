"""Puzzles of one's own, solved by a trained run with `unisono predict`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import unisono as face
from recipes.puzzles.tests.puzzles_for_tests import small_sudokus, write_csv, write_mazes
from unisono.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {
        "data.side": 4, "data.clues": [6, 8], "data.puzzles": 16, "data.held_out": 4, "train.steps": 1,
        "train.global_batch": 8, "task.halt_steps": 2, "model.width": 16, "model.heads": 2, "model.embedding": 16,
        "model.prefix": 2, "model.inner_multiple": 8, "layout.world_size": 1, "layout.device": "cpu",
        "layout.threads": 1, "observe.progress": False, "observe.trackers": [],
        "run.dir": str(tmp_path_factory.mktemp("runs")), "run.name": "run",
    }  # fmt: skip
    return face.train("puzzles", settings).folder


def predict(run: Path, out: Path, *words: str) -> tuple[int, list[dict[str, str]]]:
    code = main.main(["predict", str(run), f"out={out}", *words])
    rows = list(csv.DictReader(out.read_text().splitlines())) if code == 0 else []
    return code, rows


def test_sudokus_with_answers_are_scored(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(tmp_path / "own.csv", small_sudokus(6))
    code, rows = predict(run, tmp_path / "out.csv", "data=sudoku", f"data.path={tmp_path / 'own.csv'}")
    assert code == 0 and list(rows[0]) == [
        "row", "puzzle", "solution", "answer", "exact", "cells", "confidence", "steps"
    ]  # fmt: skip
    share = sum(float(row["cells"]) for row in rows) / 6
    told = dict(line.split(": ") for line in capsys.readouterr().out.splitlines()[1:])
    assert float(told["cells"]) == pytest.approx(share, abs=1e-5)


def test_bare_lines_are_solved_and_not_scored(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without answers there is nothing to score: an `exact` of 0 would say that all were solved wrongly."""
    (tmp_path / "own.txt").write_text("12..............\n..34............\n")
    code, rows = predict(run, tmp_path / "out.csv", "data=sudoku", f"data.path={tmp_path / 'own.txt'}")
    assert code == 0 and [row["puzzle"] for row in rows] == ["12..............", "..34............"]
    assert all(len(row["solution"]) == 16 and not row["answer"] and not row["exact"] for row in rows)
    assert capsys.readouterr().out.split() == [str(tmp_path / "out.csv")]


def test_puzzles_of_another_kind_or_size_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mazes(tmp_path / "mazes.csv")
    write_csv(tmp_path / "larger.csv", small_sudokus(3, side=6))
    for data, file, theirs in (("maze", "mazes.csv", "maze 5×5"), ("sudoku", "larger.csv", "sudoku 6×6")):
        assert predict(run, tmp_path / "out.csv", f"data={data}", f"data.path={tmp_path / file}")[0] == 2
        assert f"these puzzles are {theirs}, and the run was trained on sudoku 4×4" in capsys.readouterr().err
