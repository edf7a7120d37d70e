"""A run that goes on: with which data, and compared with its newest checkpoint, of which nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import tasks
from packages.unisono.tests.launch.test_folder import check, checkpoint, config, make, refusal, written
from unisono.config.code import foreign_run
from unisono.launch.resolving.preflight import DataFacts
from unisono.runtime.errors import CheckpointError, ConfigError, RunError
from unisono.task_config import read_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# data ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"rows": 7, "fingerprint": "x"}, {"rows": 7, "fingerprint": "y"}, "fingerprint was x and is y"),
        ({"rows": 7, "fingerprint": "x"}, {"rows": 8, "fingerprint": "x"}, "rows was 7 and is 8"),
        ({"rows": 7}, {"rows": 8}, "rows was 7 and is 8"),
    ],
)
def test_a_run_is_not_continued_on_other_data(before: dict[str, Any], now: dict[str, Any], told: str):
    path = make(facts=before)
    content = {file: file.read_text() for file in path.rglob("*.*")}
    with pytest.raises(RunError, match=f"runs/a was trained on different data: {told}"):
        make("optim.lr=9", facts=now)
    assert {file: file.read_text() for file in path.rglob("*.*")} == content


@pytest.mark.parametrize("now", [{"held_out": 3, "steps": 10}, {"held_out": 4, "steps": 20}])
def test_facts_that_do_not_touch_the_order_may_change(now: dict[str, Any]):
    make(facts={"rows": 7, "fingerprint": "x", "held_out": 3, "steps": 10})
    make(facts={"rows": 7, "fingerprint": "x", **now})


def test_a_file_that_changed_since_the_checkpoint_is_named():
    before = {"web": [{"name": "a.parquet", "rows": 7, "digest": "x"}], "code": [{"name": "c.arrow", "rows": 1}]}
    now = {**before, "web": [{"name": "a.parquet", "rows": 7, "digest": "y"}]}
    written(config(), DataFacts({"fingerprint": "x"}, before), tasks.LinearTask())
    written(config(), DataFacts({"fingerprint": "x"}, before), tasks.LinearTask())
    with pytest.raises(
        RunError, match=r"different data: of source 'web', a\.parquet has changed: its content differs; "
    ):
        written(config(), DataFacts({"fingerprint": "y"}, now), tasks.LinearTask())


# what is compared is the checkpoint, and nothing is lost -----------------------------------------------------------


def test_the_checkpoint_and_not_the_configuration_beside_it_is_compared():
    path = make("optim.lr=1")
    checkpoint(path)
    make("optim.lr=2", "run.allow_change=[optim.lr]")  # a start that ended before its first checkpoint
    assert check(config("optim.lr=1")).optim.lr == 1
    assert "  optim.lr: 1.0 there, 2.0 here" in refusal(config("optim.lr=2"))


def test_a_configuration_that_is_replaced_is_kept():
    path = make("optim.lr=1")
    first = (path / "config.yaml").read_text()
    make("optim.lr=1")
    assert not list(path.glob("config.0*.yaml"))
    make("optim.lr=2", "run.allow_change=[optim.lr]")
    make("optim.lr=3", "run.allow_change=[optim.lr]")
    assert sorted(file.name for file in path.glob("config.0*")) == ["config.0001.yaml", "config.0002.yaml"]
    assert (path / "config.0001.yaml").read_text() == first
    assert foreign_run.read_values(path / "config.0002.yaml")["optim"]["lr"] == 2
    assert read_run(path, trust=True).optim.lr == 3


def test_a_name_in_allow_change_that_is_no_key_is_refused_for_a_new_run_and_for_one_that_goes_on():
    for there in (make, lambda: checkpoint(make()), lambda: None):
        with pytest.raises(
            ConfigError, match=r"run\.allow_change: there is no key 'optim\.lrr'; did you mean 'optim\.lr'\?"
        ):
            check(config("run.allow_change=[optim.lrr]"))
        there()


def test_an_exact_start_is_refused_before_processes_start_where_anything_could_change_a_bit():
    checkpoint(make(), versions={"torch": "1.0"}, code={})
    with pytest.raises(RunError) as caught:
        check(config("run.resume=exact", "layout.world_size=2"))
    told = str(caught.value)
    assert told.startswith("runs/a cannot be resumed exactly (run.resume=exact); ")
    assert "\n  layout.world_size: 1 there, 2 here\n" in told
    assert "\n  versions: torch is '1.0' there and " in told
    assert "\n  code: " in told


def test_an_exact_start_goes_on_where_nothing_has_changed():
    checkpoint(make("layout.micro_batch=4", "train.global_batch=8"), random=True)
    assert check(config("run.resume=exact", "train.global_batch=8")).layout.micro_batch == 4


def test_an_exact_start_allows_no_change():
    with pytest.raises(ConfigError, match=r"run\.resume=exact allows no change, but run\.allow_change=\[optim\.lr\]"):
        config("run.resume=exact", "run.allow_change=[optim.lr]")


def torn(path: Path, step: int) -> Path:
    file = path / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    file.write_text(file.read_text()[:-10])
    return file


def test_a_newest_checkpoint_whose_manifest_is_damaged_leaves_the_one_before_it_to_compare_with():
    path = make("optim.lr=1")
    checkpoint(path, step=3)
    make("optim.lr=2", "run.allow_change=[optim.lr]")
    checkpoint(path, step=4)
    file = torn(path, 4)
    assert check(config("optim.lr=1")).optim.lr == 1
    with pytest.raises(CheckpointError, match=rf"{file} cannot be read.*run\.resume=exact accepts no other"):
        check(config("optim.lr=1", "run.resume=exact"))
    torn(path, 3)
    for how in ("auto", "must"):
        with pytest.raises(CheckpointError, match=r"no checkpoint is intact\. .*or choose another run\.name"):
            check(config("optim.lr=1", f"run.resume={how}"))
