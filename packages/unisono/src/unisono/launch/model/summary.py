"""The verb `describe`: the layers of a model with their shapes and parameters, found without building it in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from unisono.config.schema.run import RunConfig
from unisono.launch.model.check import build_without_memory
from unisono.runtime.display.text_table import format_table
from unisono.runtime.errors import ConfigError, UnisonoError
from unisono.task import Task, run_setup

Row = tuple[str, str, str, int]  # a layer's name and kind, the shapes of its own parameters, and their number


def describe_model(task: Task, config: RunConfig) -> Iterator[str]:
    """Lines of a table: every layer that has parameters of its own, in order, and the sums.

    Blocks that are alike are written once, as `blocks.0 … 11`.

    Raises:
        ConfigError: If the model cannot be built without memory.
    """
    rows, trained, total = (_read_jax if config.layout.engine == "jax" else _read_torch)(task, config)
    lines = [(name, kind, f"{count:,}", shape) for name, kind, shape, count in merge_alike(rows)]
    yield from format_table(("layer", "kind", "parameters", "shapes"), lines, left="<<><")
    yield f"{total:,} parameters, {trained:,} trained"


def merge_alike(rows: Sequence[Row]) -> list[Row]:
    """Rows of repeated blocks as one row each, with the sum of their parameters.

    >>> merge_alike([("h.0.up", "Linear", "4×2", 8), ("h.1.up", "Linear", "4×2", 8), ("head", "Linear", "2×4", 8)])
    [('h.0 … 1.up', 'Linear', '4×2', 16), ('head', 'Linear', '2×4', 8)]
    """
    groups: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
    for name, kind, shape, count in rows:
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        if number is None:
            pattern, value = name, ""
        else:
            pattern, value = ".".join([*parts[:number], "{}", *parts[number + 1 :]]), parts[number]
        alone = "" if number is None or number + 1 < len(parts) else name  # a layer of a sequence is no block
        groups.setdefault((pattern if not alone else name, kind, shape), []).append((value, count))
    merged = []
    for (pattern, kind, shape), found in groups.items():
        values = [value for value, _ in found]
        shown = values[0] if len(values) == 1 else f"{values[0]} … {values[-1]}"
        merged.append((pattern.replace("{}", shown, 1), kind, shape, sum(count for _, count in found)))
    return merged


def _read_torch(task: Task, config: RunConfig) -> tuple[list[Row], int, int]:
    try:
        model = build_without_memory(task, config)
    except UnisonoError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(task).__name__}.build cannot run without memory, because it needs the content of tensors: "
            f"{type(error).__name__}: {error}. The parameters are in the log of a run"
        ) from error
    rows = []
    for name, layer in model.named_modules():
        own = list(layer.parameters(recurse=False))
        if own:
            shapes = ", ".join(format_shape(tuple(one.shape)) for one in own)
            rows.append((name or "(model)", type(layer).__name__, shapes, sum(one.numel() for one in own)))
    every = list(model.parameters())
    trained = sum(one.numel() for one in every if one.requires_grad)
    return _require_rows(rows, task), trained, sum(one.numel() for one in every)


def _read_jax(task: Task, config: RunConfig) -> tuple[list[Row], int, int]:
    from unisono.engines.jax import model

    run_setup(task)
    structure = model.build_structure(task, config.run.seed)
    shapes: dict[str, Any] = dict(structure.shapes)
    rows = [
        (name, "trained" if name in structure.trained else "constant", format_shape(one.shape), prod(one.shape))
        for name, one in shapes.items()
    ]
    trained = sum(count for _, kind, _, count in rows if kind == "trained")
    return _require_rows(rows, task), trained, sum(row[3] for row in rows)


def _require_rows(rows: list[Row], task: Task) -> list[Row]:
    if not rows:
        raise ConfigError(f"the model that {type(task).__name__}.build returns has no parameters")
    return rows


def format_shape(shape: Sequence[int]) -> str:
    """A shape for people.

    >>> format_shape((10, 32)), format_shape(())
    ('10×32', 'scalar')
    """
    return "×".join(map(str, shape)) or "scalar"
