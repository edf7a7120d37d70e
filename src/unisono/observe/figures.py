"""Pictures of a run that has ended, handed to the trackers that have followed it: they stand beside its curves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from unisono.config import safe_yaml
from unisono.observe import events, trackers


def show_figures(folder: Path, pictures: Mapping[str, Path]) -> list[str]:
    """Hand pictures to the trackers of a run, and wait for them no longer than at a run's end.

    A tracker that fails costs a warning, as in training.

    Args:
        folder: of the run.
        pictures: PNG files by the name that they are to have.

    Returns:
        The names of the run's trackers.

    Raises:
        ConfigError: for a tracker that is not installed any more, or has no key.
    """
    observe = safe_yaml.read_yaml(folder / "config.yaml")["observe"]
    ids = folder / trackers.IDS
    known = json.loads(ids.read_text(encoding="utf-8")) if ids.is_file() else {}
    names = [name for name in observe["trackers"] if name in known]
    if names and pictures:
        step = max((event["step"] for event in events.read_events(folder / "events.jsonl")), default=0)
        opened = trackers.open_trackers(names, folder, observe["project"], step, {}, {}, observe["tracker_timeout"])
        for name, path in pictures.items():
            opened.picture(step, name, path)
        opened.close()
    return names
