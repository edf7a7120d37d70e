"""Verbs that come before a run: `check`, `describe`, `config`, `autobatch` and `find-lr`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli import arguments
from unisono.config import CONFIG_FILE
from unisono.runtime.collector import paused_collector
from unisono.runtime.console import say, terminal_width
from unisono.runtime.display.preparing import preparing
from unisono.runtime.text import format_value

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


def check(parsed: argparse.Namespace) -> int:
    """Say whether a run can start, and what was not checked."""
    from unisono.launch.data_check import find_data_warnings
    from unisono.launch.model.check import check_model
    from unisono.launch.resolving import resolve
    from unisono.task_config import build_task

    configured = arguments.load_config(parsed)
    task = build_task(configured)
    with preparing("looking at the data"):
        run, data = resolve.check_run(configured, task)
    config = run.config
    with preparing("checking the model"), paused_collector():
        model = check_model(task, config, resumes=run.resume is not None)
    facts = {**task.kernels(config.layout.device, config.train.precision), **data.facts}
    layout = config.layout
    devices = layout.world_size * layout.devices if isinstance(layout.devices, int) else layout.world_size
    say(f"{config.recipe} can run: {devices} × {layout.device}, {layout.strategy}, {config.train.precision}")
    for name, value in facts.items():
        say(f"  {name}: {format_value(value)}")
    if model.parameters is not None:
        say(f"  parameters: {model.parameters:,}")
    for line in model.updates:
        say(f"  {line}")
    for what in model.unchecked:
        say(f"  not checked: {what}")
    for warning in (*model.warnings, *find_data_warnings(task)):
        say(f"unisono: WARNING: {warning}", error=True)
    say(f"  run: {run.directory}")
    if run.resume is not None:
        say(f"  resumes after step {run.resume.step}")
    return 0


def describe(parsed: argparse.Namespace) -> int:
    """Print the layers of a model, or of a run's."""
    from unisono.launch.model.summary import describe_model
    from unisono.launch.resolving import layout
    from unisono.task_config import build_task, read_run

    if (Path(parsed.recipe) / CONFIG_FILE).is_file():  # a run is a task with settings
        with preparing(f"opening {parsed.recipe}"), paused_collector():
            configured = read_run(Path(parsed.recipe), overrides=parsed.overrides)
    else:
        configured = arguments.load_config(parsed)
    config = layout.resolve_layout(configured, None)
    with preparing("looking at the model"), paused_collector():
        lines = describe_model(build_task(config), config)
    for line in lines:
        say(line)
    return 0


def find_micro_batch(parsed: argparse.Namespace) -> int:
    """Find the largest micro-batch that fits."""
    from unisono.launch.autobatch import search
    from unisono.launch.resolving import layout
    from unisono.launch.resolving.preflight import preflight
    from unisono.task_config import build_task

    configured = arguments.load_config(parsed)
    configured = configured.model_copy(update={"layout": configured.layout.model_copy(update={"micro_batch": "auto"})})
    config = layout.resolve_layout(configured, None)
    preflight(build_task(config), config)
    say("\n".join(search.find_micro_batch(config).lines()))
    return 0


def find_rate(parsed: argparse.Namespace) -> int:
    """Try learning rates, and suggest one."""
    from unisono.config.schema.verbs import FindLr
    from unisono.launch.find_lr import find_lr

    settings = arguments.parse_settings(parsed, FindLr)
    config = arguments.load_config(parsed)
    found = find_lr(config, settings, parsed.composed.origins)
    say("\n".join(found.lines()))
    return 0


def print_config(parsed: argparse.Namespace) -> int:
    """Print every setting with its origin, or their schema."""
    import json

    from unisono.config import fingerprint
    from unisono.config.validate import MissingKeysError

    if parsed.schema:
        from unisono.config import compose, json_schema
        from unisono.task_config import find_groups

        parsed.composed = compose.compose(parsed.recipe, parsed.overrides, parsed.config_dir)
        say(json.dumps(json_schema.build_schema(find_groups(parsed.composed)), indent=1), verbatim=True)
        return 0
    incomplete: MissingKeysError | None = None
    try:
        values: Mapping[str, Any] = fingerprint.to_json(arguments.load_config(parsed))
    except MissingKeysError as error:
        incomplete, values = error, error.values
    lines = [
        (f"{key}: {json.dumps(value)}", parsed.composed.origin(key))
        for key, value in fingerprint.flatten(values).items()
    ]
    lines += [(f"{key}: missing", "has no default") for key in (incomplete.keys if incomplete else ())]
    width, limit = min(60, max(len(text) for text, _ in lines)), terminal_width()
    for text, origin in lines:
        beside = f"{text:<{width}}  # {origin}"
        say(beside if limit is None or len(beside) <= limit else f"{text}\n  # {origin}", verbatim=True)
    if incomplete is not None:
        raise incomplete
    return 0
