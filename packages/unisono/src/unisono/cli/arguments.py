"""Command-line arguments that several verbs share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.runtime.collector import paused_collector
from unisono.runtime.display.preparing import preparing

if TYPE_CHECKING:
    from unisono.config.schema.run import RunConfig


def add_recipe(verb: argparse.ArgumentParser, text: str = "as for train") -> None:
    """The verb is about a recipe, or a task of one's own."""
    verb.add_argument("recipe", metavar="RECIPE", help=text)
    verb.add_argument("--config-dir", type=Path, help="folder with YAML groups and configs of your own")


def add_run(verb: argparse.ArgumentParser, text: str = "folder of the run") -> None:
    """The verb is about a run."""
    verb.add_argument("folder", type=Path, metavar="RUN", help=text)


def add_task_options(verb: argparse.ArgumentParser) -> None:
    """The verb needs the task of a run, which the run itself must not choose; see `unisono.config.code.foreign_run`."""
    verb.add_argument("--task", metavar="FILE.py:CLASS", help="the task of the run, if it is one of your own")
    verb.add_argument(
        "--trust", action="store_true", help="import the task from the file that the run names: runs its author's code"
    )


def add_overrides(verb: argparse.ArgumentParser, text: str) -> None:
    """The verb takes settings; after whatever else it takes without a name."""
    # Without a default, argparse's error asks for one of them.
    verb.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=text)


def load_config(parsed: argparse.Namespace) -> RunConfig:
    """The typed configuration of a command line, kept with its origins for whatever error may follow."""
    with preparing(f"importing {parsed.recipe}"), paused_collector():
        from unisono.config import compose
        from unisono.task_config import validate_config

        parsed.composed = compose.compose(parsed.recipe, parsed.overrides, parsed.config_dir)
        return validate_config(parsed.composed)


def recipe_words(parsed: argparse.Namespace) -> list[str]:
    """The words of the command from the recipe on, for another command about the same."""
    return [
        parsed.recipe, *(["--config-dir", str(parsed.config_dir)] if parsed.config_dir else []), *parsed.overrides
    ]  # fmt: skip


def parse_settings(parsed: argparse.Namespace, kind: Any) -> Any:
    """The verb's own settings among the words; the others are the recipe's, and refused where there is none."""
    from unisono.config import key_values
    from unisono.runtime.errors import ConfigError, nearest

    settings, parsed.overrides = key_values.parse_settings(parsed.overrides, kind)
    if parsed.overrides and not hasattr(parsed, "recipe"):
        name = parsed.overrides[0].split("=")[0]
        raise ConfigError(f"unknown word '{parsed.overrides[0]}', {nearest(name, kind.model_fields)}")
    return settings
