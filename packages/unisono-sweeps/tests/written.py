"""Runs as they lie on a disk, written by hand: what verbs read that only look at runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
TASK = f"{ROOT / 'packages' / 'unisono' / 'tests' / 'tasks.py'}:LinearTask"


def write_run(
    folder: Path, losses: Sequence[float | None], *, total: int | None = None, evaluations: int = 0, **settings: Any
) -> Path:
    """A run with a loss for each step; `settings` are dotted keys with two underscores for the dot."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "recipe": "language", "train": {"steps": total or len(losses)}, "optim": {"kind": "adamw", "lr": 1e-3},
        "run": {"name": folder.name, "dir": str(folder.parent)},
    }  # fmt: skip
    for key, value in settings.items():
        group, _, name = key.partition("__")
        config.setdefault(group, {})[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines: list[dict[str, Any]] = []
    for step, loss in enumerate(losses, 1):
        lines.append({"step": step, "loss": loss, "seconds": 0.5, "flops": 1e9, "lr": 1e-3, "grad_norm": 1.0})
        if evaluations and step % evaluations == 0:
            lines.append({"step": step, "eval": True, "loss": loss, "accuracy": step / 100, "rows": 8, "seconds": 0.1})
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_fault(folder: Path, text: str, code: int = 2) -> None:
    """The error that ended a run."""
    (folder / "logs").mkdir(exist_ok=True)
    fault = {"rank": 0, "kind": "DataError", "text": text, "code": code, "fault": "", "time": 1.0}
    (folder / "logs" / "rank-00000.fault.json").write_text(json.dumps(fault))
