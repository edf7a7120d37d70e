"""The files that decide what a model's arrays mean are verified as the arrays are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from packages.unisono.tests.checkpoint.saved import save
from packages.unisono.tests.security.runs import stranger
from packages.unisono.tests.tasks import LinearTask
from unisono.checkpoint.core import assets, commit
from unisono.checkpoint.core.commit import Checkpoint
from unisono.checkpoint.exchange.export import export
from unisono.config.schema.verbs import Export
from unisono.launch.trained.run import evaluate, open_run
from unisono.runtime.errors import CheckpointError

TOKENS = "tokens/vocab.json"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a checkpoint and two assets."""
    found, _ = stranger(tmp_path)
    (found / "assets" / "tokens").mkdir()
    (found / "assets" / TOKENS).write_text("{}")
    (found / "assets" / "config.json").write_text('{"model_type": "gpt2"}')
    save(found / "checkpoints", 1)
    return found


def newest(run: Path) -> Checkpoint:
    return commit.read_manifest(commit.find_checkpoints(run / "checkpoints")[-1])


def _use(run: Path) -> list[Callable[[], object]]:
    return [
        lambda: assets.check(newest(run), run),
        lambda: open_run(run, task=LinearTask),
        lambda: evaluate(run, task=LinearTask),
        lambda: export(run, Export(to="safetensors")),
    ]


@pytest.mark.parametrize("change", ["changed", "lost", "added", "a link"])
def test_assets_that_differ_from_the_checkpoint_s_are_refused_by_name(run: Path, change: str) -> None:
    file = run / "assets" / TOKENS
    assert set(newest(run).assets or ()) == {"config.json", TOKENS}
    assets.check(newest(run), run)
    if change == "changed":
        file.write_text("{ }")
    elif change == "added":
        file = file.with_name("more.json")
        file.write_text("{}")
    else:
        file.rename(run / "elsewhere")
        if change == "a link":
            file.symlink_to(run / "elsewhere")
    for use in _use(run):
        with pytest.raises(CheckpointError, match=f"{file.name} (has changed|did not exist|is missing)"):
            use()


def test_a_checkpoint_of_before_has_nothing_to_compare(run: Path) -> None:
    (run / "assets" / TOKENS).write_text("other")
    assets.check(replace(newest(run), assets=None), run)
