"""The settings of a command among its words."""

from __future__ import annotations

import re

import pytest
from pydantic import Field

from unisono.config.key_values import parse_settings
from unisono.config.schema import Settings
from unisono.config.schema.verbs import Export
from unisono.proof.cases import ProofSettings
from unisono.proof.scripts.script_proof import ScriptSettings
from unisono.runtime.errors import ConfigError


def test_settings_of_a_command_are_told_from_those_of_the_run() -> None:
    words = ["layouts=[ddp:2,hsdp:2x2]", "optim.lr=1", "steps=4", "train.steps=9", "vary=[]"]
    settings, rest = parse_settings(words, ProofSettings)
    assert rest == ["optim.lr=1", "train.steps=9"]
    given = settings.model_dump(exclude_unset=True)
    assert given == {"layouts": ["ddp:2", "hsdp:2x2"], "steps": 4, "vary": []}


@pytest.mark.parametrize(
    ("words", "kind", "given"),
    [
        ({"worlds": "[1,4]", "precision": "null"}, ScriptSettings, {"worlds": [1, 4], "precision": None}),
        ({"out": "a, b/{x}", "step": "null"}, Export, {"out": "a, b/{x}", "step": None}),
    ],
)
def test_a_text_is_taken_as_it_stands_where_it_fits(
    words: dict[str, str], kind: type, given: dict[str, object]
) -> None:
    settings, _ = parse_settings([f"{key}={text}" for key, text in words.items()], kind)
    assert {name: getattr(settings, name) if name != "out" else str(settings.out) for name in words} == given


def test_all_words_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'layouts=\[ddp:2' cannot be parsed"):
        parse_settings(["layouts=[ddp:2"], ProofSettings)
    with pytest.raises(ConfigError) as caught:
        parse_settings(["steps=one", "global_batch=0"], ProofSettings)
    assert str(caught.value) == (
        "steps: input should be a valid integer, unable to parse string as an integer, got 'one'; "
        "global_batch: input should be greater than 0, got 0"
    )


class Variables(Settings):
    env: dict[str, str] = Field({})


def test_names_are_given_in_one_word_or_in_a_word_each() -> None:
    """The claim: neither way hides the other, in any order, and a name is not empty."""
    assert parse_settings(["env.A=x", "env.B=2"], Variables)[0].env == {"A": "x", "B": "2"}
    assert parse_settings(["env={A: x}"], Variables)[0].env == {"A": "x"}
    twice = "'env' is given twice: as env=… and as env.NAME=…; use one of them"
    for words in (["env={A: x}", "env.B=2"], ["env.B=2", "env={A: x}"]):
        with pytest.raises(ConfigError, match=re.escape(twice)):
            parse_settings(words, Variables)
    with pytest.raises(ConfigError, match=re.escape("'env.=…' names no variable: write env.NAME=VALUE")):
        parse_settings(["env.=x"], Variables)
