"""Whoever follows the tutorial of the recipes trains each of them, and gets something out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.walkthrough import follow

PAGE = Path(__file__).parents[2] / "docs" / "tutorial-recipes.md"


@pytest.mark.slow
def test_every_command_of_the_tutorial_of_recipes_works(tmp_path: Path) -> None:
    said = follow(PAGE, tmp_path)
    assert len(said) == 10
    assert all((tmp_path / file).stat().st_size > 0 for file in ("microbes.distances.tsv", "sudoku.csv", "said.wav"))
