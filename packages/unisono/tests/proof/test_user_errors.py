"""Errors of the user's code are shown by its own lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

import unisono
from unisono.proof.user_errors import find_functions, raise_as_sentences
from unisono.runtime.errors import ConfigError, RunError


def broken() -> None:
    json.loads("{")


def test_the_frames_of_libraries_are_left_out() -> None:
    with pytest.raises(RunError) as caught, raise_as_sentences():
        broken()
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert [line.rpartition(" in ")[2] for line in lines if line.startswith("  File ")] == [
        "test_the_frames_of_libraries_are_left_out",
        "broken",
    ]


class Written(unisono.Task):
    def loss(self, outputs: Any, batch: Any, context: Any) -> Any: ...

    def outputs(self, model: Any, batch: Any, context: Any) -> Any: ...


def test_functions_that_the_user_has_written_have_their_lines() -> None:
    found = find_functions(Written)
    assert list(found) == ["outputs", "loss"], "the others are ours"
    assert found["loss"].endswith(f"test_user_errors.py:{Written.loss.__code__.co_firstlineno}")


def test_an_error_that_is_a_sentence_already_stays_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^no such layout$"), raise_as_sentences():
        raise ConfigError("no such layout")
