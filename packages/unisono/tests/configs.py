"""Configurations of tests: the files of a task are composed once, which takes most of the time of `load_config`."""

from __future__ import annotations

import re
from functools import cache

from unisono.config.compose import ComposedConfig, apply_overrides
from unisono.config.schema.run import RunConfig
from unisono.task_config import load_config, validate_config


def configured(task: str, *overrides: str) -> RunConfig:
    """What `load_config` returns for a task whose files do not change, and for overrides like `train.steps=3`."""
    if all(re.match(r"\w+(\.\w+)+=", word) for word in overrides):
        return validate_config(apply_overrides(_composed(task), overrides))
    return load_config(task, overrides)[0]  # files are chosen


@cache
def _composed(task: str) -> ComposedConfig:
    return load_config(task)[1]
