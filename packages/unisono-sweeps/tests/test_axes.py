"""Which runs a command means: a function of its words alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.config.compose import Composer
from unisono.runtime.errors import ConfigError
from unisono_sweeps.axes import Interval, Variant, list_variants
from unisono_sweeps.settings import SweepSettings

from .written import TASK


def variants(*words: str, **settings: Any) -> list[Variant]:
    return list_variants(words, SweepSettings.model_validate(settings), Composer(TASK))[1]


def names(*words: str, **settings: Any) -> list[str]:
    return [variant.name for variant in variants(*words, **settings)]


def test_a_grid_has_every_combination_and_the_last_key_changes_fastest() -> None:
    assert names("optim.lr=1e-3,3e-4", "task.features=range(64,129,64)", seeds="2") == [
        f"lr{lr}-features{length}-seed{seed}" for lr in ("0.001", "0.0003") for length in (64, 128) for seed in (0, 1)
    ]


def test_zipped_keys_change_together() -> None:
    found = variants("optim.lr=1e-3,3e-4", "task.features=64,128", zip="[optim.lr,task.features]")
    assert [variant.words for variant in found] == [
        ["optim.lr=0.001", "task.features=64"], ["optim.lr=0.0003", "task.features=128"]
    ]  # fmt: skip


def test_a_group_is_swept_by_a_pattern_over_its_files() -> None:
    assert names("optim=glob(s*)") == ["optim-sgd"]


def test_random_draws_are_the_same_however_many_there_are() -> None:
    word = "optim.lr=tag(log,interval(1e-5,1e-2))"
    few, many = names(word, draws="3"), names(word, draws="20")
    assert many[:3] == few
    assert len(set(many)) == 20
    assert names(word, draws="3", draw_seed="1") != few


@given(st.floats(0, 1, exclude_max=True))
def test_a_drawn_value_lies_in_its_interval(share: float) -> None:
    assert 1e-5 <= Interval("x", 1e-5, 1e-2, log=True, whole=False).value(share) <= 1e-2
    assert Interval("x", 3, 5, log=False, whole=True).value(share) in (3, 4, 5)
    assert math.isclose(Interval("x", 1e-4, 1e-2, log=True, whole=False).value(0.5), 1e-3)


CONFIGS = """
def configs():
    wide = {"name": "wide", "task.features": 128}
    return [wide, {"optim": {"lr": 0.01}}]
"""


def test_a_python_file_lists_runs_and_its_settings_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "study.py"
    path.write_text(CONFIGS)
    found = variants("train.steps=3", configs=str(path), seeds="[7]")
    assert [variant.name for variant in found] == ["wide-seed7", "lr0.01-seed7"]
    assert found[0].settings[0].origin == f"{path}:3"
    assert found[1].settings[0].origin == f"{path}:4"


def test_values_that_a_name_cannot_hold_still_have_names_of_their_own() -> None:
    found = names("data.path='a b','a_b'")
    assert len(set(found)) == 2
    assert all(" " not in name for name in found)


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (["optim.lr=1,2", "optim.lr=3,4"], {}, "'optim.lr' is swept twice"),
        (["optim.lr=1,1"], {}, "has the value 1 twice"),
        (["run.seed=1,2"], {"seeds": "2"}, "'run.seed' is set twice"),
        (["optim.lr=interval(0.1,1)"], {}, "draws=N"),
        (["optim.lr=1,2"], {"draws": "3"}, "no key has an interval"),
        (["optim.lr=tag(log,interval(0,1))"], {"draws": "3"}, "both positive"),
        (["optim.lr=tag(normal,interval(0,1))"], {"draws": "3"}, "the only tag is 'log', not 'normal'"),
        (["optim=glob(x*)"], {}, "matches nothing; optim has adafactor"),
        (["optim.lr=1,2", "a.b=1,2,3"], {"zip": "[optim.lr,a.b]"}, "optim.lr has 2, a.b has 3"),
        (["optim.lr=1,2"], {"zip": "[optim.lrr]"}, "did you mean 'optim.lr'"),
        (["optim.lr=range(1,2,0)"], {}, "'optim.lr=range(1,2,0)': range() arg 3 must not be zero"),
        (["optim.lr=range(0,1000)", "a.b=range(0,1000)"], {}, "the words mean 1000000 runs, more than the 100000"),
        (["optim.lr=range(0,1000000000)"], {}, "the words mean 100001 runs"),
    ],
)
def test_what_is_no_sweep_is_refused_with_a_sentence(words: list[str], settings: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        variants(*words, **settings)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def configs():\n    raise KeyError('x')\n", "study.py: configs() failed:\n"),
        ("import sys\nsys.exit(3)\n", "study.py cannot be imported:\n"),
        ("def configs():\n    return [{1: 2}]\n", "the key 1 of a setting is not a text"),
        ("a = {}\na['optim'] = a\ndef configs():\n    return [a]\n", "a dictionary of settings holds itself"),
        ("def configs():\n    return [{'run.dir': 'x'}]\n", "run.dir is not its to set"),
    ],
)
def test_a_python_file_that_fails_is_reported_by_its_own_lines(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "study.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        variants(configs=str(path))
    assert message in str(refused.value)
    assert "unisono_sweeps" not in str(refused.value)
