"""The page of many runs shows what the commands print: its commands are read as the verbs read them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest

from unisono.config.compose import Composer
from unisono_sweeps.axes import list_variants, read_space
from unisono_sweeps.planning import Estimate, PlannedRun, Sweep
from unisono_sweeps.sweep import describe_plan, read_words, split_place

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
STUDY = (ROOT / "recipes" / "language" / "README.md").read_text(encoding="utf-8")


def commands(text: str, verb: str) -> list[list[str]]:
    """The words after the recipe of each command of a page."""
    lines = re.findall(rf"^ *unisono {verb} language (.*)$", text.replace("\\\n", ""), re.MULTILINE)
    return [[word for word in shlex.split(line, comments=True) if not word.startswith("-")] for line in lines]


def plan(words: list[str]) -> list[str]:
    """What a dry run of these words prints, with an estimate that is the same for all runs."""
    settings, _, rest = read_words(
        [word for word in words if not word.startswith(("launcher=", "time=", "part", "gpus"))]
    )
    fixed, variants = list_variants(rest, settings, Composer("language"))
    sweep = Sweep("language", None, *split_place(fixed, variants, "language", settings.name))
    estimate = Estimate(2_410_000, 78.0, 2.26e10, 28_900_000)
    config = cast("Any", None)  # which the table does not read
    return describe_plan(sweep, [PlannedRun(one, (), config, 200, estimate=estimate) for one in variants])


@pytest.mark.parametrize("text", [PAGE, STUDY], ids=["docs/sweeps.md", "recipes/language/README.md"])
def test_every_sweep_of_a_page_is_one(text: str, tmp_path: Path) -> None:
    found = commands(text, "sweep")
    assert found
    assert all(len(plan(words)) > 4 for words in found)


def test_every_search_of_the_page_has_a_space() -> None:
    (words,) = commands(PAGE, "search")
    space = read_space([word for word in words if "." in word.partition("=")[0]], Composer("language"))
    assert ([*space.choices], [one.key for one in space.intervals]) == (["task.sequence"], ["optim.lr"])


def test_the_table_of_a_dry_run_has_the_columns_and_the_runs_that_the_page_shows() -> None:
    printed = plan(commands(PAGE, "sweep")[0])
    head = next(line for line in PAGE.splitlines() if re.search("FLOPs +time", line))
    assert head.split() == printed[0].split()
    (runs,) = re.findall(r"^ +(\d+ runs in \S+):", PAGE, re.MULTILINE)
    assert f"{runs}:" in "\n".join(printed)
    row = PAGE[PAGE.index(head) :].splitlines()[1]
    assert len(re.split(r" {2,}", row.strip())) == len(printed[0].split())
