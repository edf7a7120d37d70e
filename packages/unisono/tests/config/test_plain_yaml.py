"""YAML that would never end in memory is refused before anything reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.checkpoint.exchange.export import read_adapter_settings
from unisono.config import safe_yaml
from unisono.config.code import foreign_run
from unisono.observe.trackers import show_samples
from unisono.runtime.errors import ConfigError
from unisono.supervise.diagnose import diagnose_run

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "stand for .*e\\+1[0-9] values"),
        ("a: &a [1, *a]", "mine.yaml:1: an alias .* refers to something that contains it"),
        ("[" * 80 + "]" * 80, "nested more than 64 deep"),
        ("[" * 5000 + "]" * 5000, "nested more than 64 deep"),
        ("a: " + "x" * (1 << 20), "has 1048579 bytes"),
        (r'a: "\ud800"', r"mine.yaml:1: half a character \('\\ud800'\)"),
    ],
)
def test_it_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        safe_yaml.check_yaml(tmp_path / "mine.yaml")


@pytest.mark.parametrize("reads", [diagnose_run, read_adapter_settings, lambda run: show_samples(run, {})])
def test_whatever_reads_a_run_that_came_from_elsewhere_refuses_it(tmp_path: Path, reads: Callable[[Path], Any]) -> None:
    (tmp_path / "config.yaml").write_text(BOMB)
    with pytest.raises(ConfigError, match="stand for"):
        reads(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read as a configuration"):
        reads(tmp_path)


@pytest.mark.parametrize("text", ["", "a: &a [1, 2]\nb: *a\nc: {d: *a}", "a: [1", "\x00"])
def test_plain_values_and_what_is_no_yaml_are_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    safe_yaml.check_yaml(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    "value",
    [":".join(["1"] * 3000) + ".5", ":".join(["59"] * 3000), "0x" + "f" * 10_000, "9" * 5000, "2001-99-99"],
    ids=["sexagesimal float", "sexagesimal", "hexadecimal", "digits", "date"],
)  # fmt: skip
def test_a_number_that_no_setting_has_is_a_sentence(tmp_path: Path, value: str) -> None:
    """`1:1:1:…:1.5`, a float to the base of 60, was an OverflowError."""
    (tmp_path / "config.yaml").write_text(f"recipe: tasks.py:Mine\ntrain: {{steps: {value}}}\n")
    with pytest.raises(ConfigError):
        foreign_run.read_values(tmp_path / "config.yaml")
