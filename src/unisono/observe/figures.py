"""Adds pictures of a finished run to its trackers, next to its curves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from unisono.config import safe_yaml
from unisono.observe import events, trackers


def show_figures(folder: Path, pictures: Mapping[str, Path]) -> list[str]:
    """Send pictures to the trackers of a run, waiting no longer than at the end of a run.

    As in training, a tracker that fails only causes a warning.

    Args:
        folder: The run's directory.
        pictures: PNG files by display name.

    Returns:
        The names of the run's trackers.

    Raises:
        ConfigError: For a tracker that is no longer installed, or has no key.
    """
    observe = safe_yaml.read_yaml(folder / "config.yaml")["observe"]
    ids = folder / trackers.IDS
    known = json.loads(ids.read_text(encoding="utf-8")) if ids.is_file() else {}
    names = [name for name in observe["trackers"] if name in known]
    if names and pictures:
        step = max((event["step"] for event in events.read_events(folder / "events.jsonl")), default=0)
        opened = trackers.open_trackers(names, folder, observe["project"], step, {}, {}, observe["tracker_timeout"])
        for name, path in pictures.items():
            opened.publish(step, name, path)
        opened.close()
    return names
