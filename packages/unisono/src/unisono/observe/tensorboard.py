"""The TensorBoard tracker: files in the run directory."""

from __future__ import annotations

import re
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from unisono.observe.trackers import TrackedRun
from unisono.runtime.untrusted import safe_writing


class Tracker:
    """Scalars, configuration and facts of a run; a resumed run removes the steps that it will repeat."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(safe_writing.make_folder(run.folder, "tensorboard"))
        self._writer = SummaryWriter(folder, purge_step=run.first_step + 1 if run.first_step else None)
        self._step = run.first_step
        for name, values in (("config", run.config), ("facts", run.facts)):
            self._text(name, values)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step by name."""
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Write a PNG file."""
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            self._writer.add_image(name, np.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def sound(self, step: int, name: str, path: Path) -> None:
        """Write a WAV file of 16 bits, mono."""
        import numpy as np

        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 32768
            self._writer.add_audio(name, samples[None], step, sample_rate=file.getframerate())

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text as it is."""
        self._writer.add_text(name, _indent(text), step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table in Markdown."""
        lines = [columns, ["---"] * len(columns), *rows]
        cells = [[re.sub(r"([\\|<])", r"\\\1", str(cell)).replace("\n", " ") for cell in line] for line in lines]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def close(self, summary: Mapping[str, float], failed: bool) -> None:
        """Write the summary, and close the files."""
        self._text("summary", dict(summary))
        self._writer.close()

    def _text(self, name: str, values: Mapping[str, Any]) -> None:
        if not values:
            return
        self._writer.add_text(name, _indent(yaml.safe_dump(_to_yaml_value(values), sort_keys=False)), self._step)


def _indent(text: str) -> str:
    """A text as a code block of Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _to_yaml_value(value: Any) -> Any:
    """Convert a value to what YAML can represent."""
    if isinstance(value, Mapping):
        return {str(name): _to_yaml_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_yaml_value(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
