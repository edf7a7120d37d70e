"""The trackio tracker: a local database (`trackio show`), or a Space or server if its variables are set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.observe.trackers import TrackedRun


class Tracker:
    """One run of trackio, which does not let us choose ids, so the id is part of the run's name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=run.project,
            group=run.group,
            name=f"{run.name}-{run.id[:6]}",
            resume="allow",
            embed=False,
            config=json.loads(json.dumps({"config": run.config, "facts": run.facts}, default=str))
            if run.config
            else None,
        )
        self._step = run.first_step

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a row of the database."""
        self._step = step
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Write a PNG file into a row of the database."""
        import trackio

        self.write(step, {name: trackio.Image(str(path))})

    def sound(self, step: int, name: str, path: Path) -> None:
        """Write a WAV file into a row of the database."""
        import trackio

        self.write(step, {name: trackio.Audio(str(path))})

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text into a row of the database, as a code block."""
        import trackio

        self.write(step, {name: trackio.Markdown("\n".join(f"    {line}" for line in text.splitlines()))})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table into a row of the database."""
        import trackio

        shown = trackio.Table(columns=list(columns), data=[list(row) for row in rows])
        self.write(step, {name: shown})

    def close(self, summary: Mapping[str, float], failed: bool) -> None:
        """Write the summary with the last step, since trackio has no summaries, and finish."""
        if summary:
            self._run.log({f"summary/{name}": value for name, value in summary.items()}, step=self._step)
        self._run.finish()
