"""What the user writes beats a default of ours, also where they are different keys that cannot both hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import tasks
from unisono.config.compose import compose
from unisono.runtime.errors import ConfigError
from unisono.task_config import validate_config

LINEAR = f"{tasks.__file__}:LinearTask"
pytestmark = pytest.mark.usefixtures("spirals")
BEST = "checkpoint.keep_best={}"


def lengths(recipe: str, *words: str, folder: Path | None = None) -> tuple[Any, Any]:
    train = validate_config(compose(recipe, words, folder)).train
    return train.steps, train.epochs


@pytest.mark.parametrize("recipe", [LINEAR, "spirals"])
def test_epochs_on_the_command_line_beat_our_steps(recipe: str):
    assert lengths(recipe, "train.epochs=5") == (None, 5.0)
    assert lengths(recipe)[1] is None


def test_epochs_in_a_file_of_the_user_beat_our_steps(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(f"defaults: [task, _self_]\nrecipe: {LINEAR}\ntrain:\n  epochs: 2\n")
    assert lengths("mine", folder=tmp_path) == (None, 2.0)
    with pytest.raises(ConfigError, match="got steps=3 and epochs=2"):
        lengths("mine", "train.steps=3", folder=tmp_path)


def test_steps_and_epochs_that_the_user_wrote_both_are_refused():
    with pytest.raises(ConfigError, match="got steps=1000 and epochs=5"):
        lengths(LINEAR, "train.epochs=5", "train.steps=1000")


@pytest.mark.parametrize("recipe", [LINEAR, "spirals"])
def test_tokens_on_the_command_line_beat_our_steps(recipe: str):
    train = validate_config(compose(recipe, ["train.tokens=2e9"])).train
    assert (train.steps, train.epochs, train.tokens) == (None, None, 2e9)
    with pytest.raises(ConfigError, match=r"got epochs=5 and tokens=2e\+09"):
        lengths(recipe, "train.epochs=5", "train.tokens=2e9")


def test_a_default_that_yields_says_to_which_key():
    composed = compose(LINEAR, ["train.epochs=5"])
    assert composed.origin("train.steps") == "default, which yields to train.epochs"


def test_no_average_means_none_of_our_settings_of_it():
    ema = validate_config(compose("spirals", ["ema.decay=null"])).ema
    assert (ema.decay, ema.exclude) == (None, [])
    with pytest.raises(ConfigError, match=r"ema\.exclude has no effect without ema\.decay"):
        validate_config(compose("spirals", ["ema.decay=null", "ema.exclude=[a]"]))


@pytest.mark.parametrize(
    ("words", "found"),  # (checkpoint.every, eval.every); the recipe has 80 and 80
    [
        (("checkpoint.keep_every=100",), (100, 80)),
        (("checkpoint.keep_every=160",), (80, 80)),
        ((BEST,), (80, 80)),
        ((BEST, "eval.every=30"), (30, 30)),
        ((BEST, "checkpoint.every=30"), (30, 30)),
        ((BEST, "eval.every=null"), "eval.every is null"),
        ((BEST, "eval.every=30", "checkpoint.every=40"), "checkpoint.every=40 is not a multiple of eval.every=30"),
        (("checkpoint.keep_every=100", "checkpoint.every=30"), "is not a multiple of checkpoint.every=30"),
    ],
)
def test_our_steps_between_checkpoints_and_evaluations_yield_to_what_is_to_be_kept(
    words: tuple[str, ...], found: tuple[int, int] | str
):
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found.replace(".", r"\.")):
            validate_config(compose("spirals", words))
        return
    config = validate_config(compose("spirals", words))
    assert (config.checkpoint.every, config.eval.every) == found


def test_the_best_checkpoint_of_a_task_of_ones_own_needs_no_word_about_evaluations():
    assert validate_config(compose(LINEAR, [BEST, "checkpoint.every=20"])).eval.every == 20
