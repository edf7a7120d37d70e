"""The configuration of a run that is resumed by its folder alone, as `unisono resume RUN` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono.config import CONFIG_FILE, safe_yaml
from unisono.config.code import foreign_run, own_runs
from unisono.config.compose import ComposedConfig
from unisono.runtime.errors import RunError
from unisono.runtime.text import one_line
from unisono.task_config import override_run


def compose_run(folder: Path, overrides: Sequence[str] = (), *, trust: bool = False) -> ComposedConfig:
    """Compose the configuration with which a run is resumed.

    Training executes the run's task and callbacks, and reads and writes where its configuration says. So the run must
    be this user's own, or trusted.

    Args:
        folder: Of the run. Its name and place are those of the folder, which may have been moved.
        overrides: Settings that change.
        trust: Whether a run that somebody else made may be resumed.

    Raises:
        RunError: If the folder is not that of a run.
        TrustError: If somebody else made it, or its code has changed.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise RunError(f"{folder} is not a run directory (no {CONFIG_FILE})")
    values = safe_yaml.read_yaml(path)
    if not trust and (reason := own_runs.why_not_own(folder, values)):
        raise foreign_run.TrustError(
            f"{folder} cannot be resumed without your word. {one_line(reason, 2000)}. Resuming executes its task, "
            f"{foreign_run.describe_reference(str(values.get('recipe')))}, and its callbacks with your rights, and "
            "reads and writes where its configuration says. Give the whole command of `unisono train`, or add --trust "
            "if you trust everyone who can write that folder and these files"
        )
    named = folder if folder.name not in ("", "..") else folder.resolve()
    run = dict(values.get("run") or {})
    run |= {"dir": str(named.parent), "name": named.name, "stop_after": None}
    if run.get("resume") == "never":
        run["resume"] = "auto"
    length = dict(values.get("train") or {})
    given = {word.partition("=")[0] for word in overrides}
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if f"train.{name}" in given and f"train.{other}" not in given:
            length[other] = None  # a run has one of them, and the user has just named it
    composed = ComposedConfig({**values, "run": run, "train": length}, {name: str(path) for name in values})
    return override_run(composed, overrides) if overrides else composed
