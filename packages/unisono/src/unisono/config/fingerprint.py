"""Which keys are mathematics, and whether two configurations are the same run.

A run may be continued on any layout, on other hosts and with other observation; what it computes may not change unless
the user says so.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from unisono.config.schema import retired_values
from unisono.config.schema.run import RunConfig

# Groups and keys that leave the result alone. `layout.micro_batch` is mathematics where a forward pass draws numbers.
_RESULT_NEUTRAL = (
    "layout", "eval", "checkpoint", "observe", "launch", "callbacks", "run.name", "run.dir", "run.resume",
    "run.allow_change", "run.stop_after", "train.guard_every", "optim.implementation",
    "data.workers", "data.worker_kind", "data.prefetch", "data.prefetch_mb", "data.storage", "data.cache",
    "data.verify", "data.in_memory",
)  # fmt: skip


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key; lists are values."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {
        key: leaf
        for name, value in values.items()
        for key, leaf in flatten(value, f"{prefix}.{name}" if prefix else name).items()
    }


def to_json(config: RunConfig) -> dict[str, Any]:
    """A configuration as JSON values."""
    return config.model_dump(mode="json")


def _flat(config: RunConfig | dict[str, Any]) -> dict[str, Any]:
    return flatten(to_json(config) if isinstance(config, RunConfig) else config)


def mathematical_keys(config: RunConfig | dict[str, Any], random: bool) -> dict[str, Any]:
    """The keys that decide what is computed, and their values.

    Args:
        config: of the run, or the same as JSON values.
        random: whether a forward pass draws random numbers.
    """
    values = _flat(config)
    kept = {
        key: value
        for key, value in values.items()
        if not any(key == h or key.startswith(h + ".") for h in _RESULT_NEUTRAL)
    }
    kept["recipe"] = task_identity(values["recipe"])
    if random:
        kept["layout.micro_batch"] = values["layout.micro_batch"]
        if values.get("layout.strategy") == "dp":  # every device draws for its own rows
            kept["layout.strategy"] = "dp"
    if values.get("layout.sync_batch_norm"):  # else nothing, as in digests from before there was the key
        kept["layout.sync_batch_norm"] = True
    if kept.get("data.group_by_length") is None:  # the same
        kept.pop("data.group_by_length", None)
    return kept


def batch_norm_rows(config: RunConfig | dict[str, Any]) -> tuple[int, int] | None:
    """Which rows have common batch statistics where those are synchronised; part of the mathematics of a run under way.

    Returns:
        Processes and rows of a micro-batch. None where it is always the same: the whole global batch, or where each
        process has statistics of its own micro-batches.
    """
    values = _flat(config)
    world, micro_batch = values["layout.world_size"], values["layout.micro_batch"]
    if not (values.get("layout.sync_batch_norm") and isinstance(micro_batch, int) and isinstance(world, int)):
        return None
    return None if world * micro_batch == values["train.global_batch"] else (world, micro_batch)


def changed_keys(
    old: RunConfig | dict[str, Any], new: RunConfig | dict[str, Any], random: bool
) -> dict[str, tuple[Any, Any]]:
    """Mathematical keys whose value is not the same, with the old and the new value."""
    before, after = mathematical_keys(old, random), mathematical_keys(new, random)
    for key, value in (pair for one in (old, new) if isinstance(one, RunConfig) for pair in retired_values(one)):
        for side in (before, after):
            if key in side and side[key] == value:
                del side[key]
    there, here = _flat(old), _flat(new)
    engines = there.get("layout.engine"), here.get("layout.engine")
    if "auto" not in engines and None not in engines:  # one recipe may have a task for each, with other first weights
        before["layout.engine"], after["layout.engine"] = engines
    keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    there, here = {**there, **before}, {**here, **after}
    return {key: (there.get(key), here.get(key)) for key in keys}


def config_digest(config: RunConfig) -> str:
    """A hash of the mathematics, equal for equal runs on any layout.

    The micro-batch is not in it: only a run that is under way knows whether its forward passes draw random numbers.
    """
    return hashlib.sha256(json.dumps(mathematical_keys(config, random=False), sort_keys=True).encode()).hexdigest()


def task_identity(recipe: str) -> str:
    """Which task it is, wherever its file lies.

    >>> task_identity("language"), task_identity("/home/me/tasks.py:Mine"), task_identity("mine.tasks:Mine")
    ('language', 'tasks.py:Mine', 'tasks.py:Mine')
    """
    place, _, name = recipe.rpartition(":")
    file = Path(place).name if place.endswith(".py") else f"{place.rpartition('.')[2]}.py"
    return f"{file}:{name}" if place else recipe
