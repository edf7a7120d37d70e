"""Runs that somebody else has made: their configuration names a file, and that file tells if it was ever imported."""

from __future__ import annotations

from pathlib import Path

import yaml

from unisono.config import fingerprint
from unisono.task_config import load_config

EVIL = """
from pathlib import Path
Path({touched!r}).touch()
from packages.unisono.tests.tasks import LinearTask as Evil
"""


def stranger(folder: Path, *words: str, reference: str | None = None) -> tuple[Path, Path]:
    """A run whose configuration names a file of its assets; returns it, and what that file touches when imported."""
    touched, run = folder / "touched", folder / "run"
    (run / "assets").mkdir(parents=True)
    evil = run / "assets" / "evil.py"
    evil.write_text(EVIL.format(touched=str(touched)))
    given = ["train.steps=2", "train.global_batch=8", "run.name=run", *words]
    config, _ = load_config("packages.unisono.tests.tasks:LinearTask", given)
    values = {**fingerprint.to_json(config), "recipe": reference or f"{evil}:Evil"}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    return run, touched
