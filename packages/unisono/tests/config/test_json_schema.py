"""The JSON schema for editors: our own YAML files fit it, and what the configuration would refuse does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from packages.unisono.tests import tasks
from unisono.config.code.recipes import config_folders
from unisono.config.compose import GROUPS_DIR, compose
from unisono.config.json_schema import build_schema
from unisono.task_config import find_groups

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
LINEAR = f"{tasks.__file__}:LinearTask"


def validator(recipe: str) -> Any:
    schema = build_schema(find_groups(compose(recipe)))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_a_recipe_s_own_files_fit_its_schema(spirals: Path):
    """A file that holds a whole configuration, and each of its groups' files under the key of the group."""
    check, folder = validator("spirals"), config_folders()["spirals"]
    check.validate(yaml.safe_load((folder / "spirals.yaml").read_text()))
    files = [path for place in (folder, GROUPS_DIR) for path in place.glob("*/*.yaml")]
    for path in files:
        values = yaml.safe_load(path.read_text())
        check.validate(values if path.parent.name == "experiment" else {path.parent.name: values})
    assert len(files) > 10


@pytest.mark.parametrize(
    "text",
    [
        "optim: {lrr: 1}", "train: {steps: many}", "train: {steps: 0}", "layout: {strategy: dpp}", "unknown: 1",
        "task: {rowss: 3}", "schedules: {lr: {kind: cosin}}", "defaults: adamw",
    ],
)  # fmt: skip
def test_what_the_configuration_refuses_does_not_fit(text: str):
    with pytest.raises(jsonschema.ValidationError):
        validator(LINEAR).validate(yaml.safe_load(text))


@pytest.mark.parametrize("text", ["{}", "task: {rows: 3}", "optim: {lr: 1.0e-3}", "schedules: {lr: {warmup: 3}}"])
def test_a_part_of_a_configuration_fits(text: str):
    validator(LINEAR).validate(yaml.safe_load(text))


def test_the_command_prints_the_schema_with_what_each_key_is(command: Callable[..., tuple[int, str, str]]):
    code, told, _ = command("config", LINEAR, "train.steps=none", "--schema")  # whatever the values are
    schema = json.loads(told)
    assert code == 0
    assert (
        schema["$defs"]["Train"]["properties"]["steps"]["description"]
        == "number of updates; give steps, epochs or tokens"
    )
