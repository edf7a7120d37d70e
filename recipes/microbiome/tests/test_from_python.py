"""The task as an object that is trained from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import unisono
from unisono.launch import task_objects
from unisono.runtime.errors import DataError
from unisono.task_config import read_run
from unisono_microbiome.settings import ModelSettings, Simulated, Study
from unisono_microbiome.task import Microbiome

SHORT = {"train.steps": 3, "train.global_batch": 8, "observe.progress": False, "layout.threads": 1}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SMALL = ModelSettings(features=8, heads=2, encoder="taxon", taxon_layers=1, sample_layers=1, recompute=False)


def test_an_object_of_a_packaged_recipe_keeps_its_settings_before_those_of_the_recipes_files():
    """The files say `model=tiny` and simulated data of another size."""
    task = Microbiome(model=SMALL, data=Simulated(kind="simulated", subjects=6, taxa=16, metric="jaccard"))
    result = unisono.train(task, {**SHORT, "data.visits": 3, "data.group": "subject"})
    written = read_run(result.folder, trust=True)
    assert written.model == SMALL
    assert (written.data.subjects, written.data.taxa, written.data.metric, written.data.visits) == (6, 16, "jaccard", 3)


def test_data_of_an_object_may_be_of_another_kind_than_the_files_of_its_recipe_say(tmp_path: Path):
    data = Study(kind="study", table=tmp_path / "${seed}" / "none.biom", target="ibd")
    with pytest.raises(DataError, match=r"\$\{seed\}/none\.biom"):
        unisono.train(Microbiome(model=SMALL, data=data), SHORT)


def test_the_task_is_called_by_the_name_of_its_recipe():
    assert task_objects.reference_to(Microbiome) == "microbiome"
