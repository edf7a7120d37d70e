"""A birdsong task that is small enough for tests: clips of half a second, eight patches, two blocks."""

from __future__ import annotations

from typing import Any

from unisono_birdsong.settings import BirdsongConfig, EncoderSettings, SyntheticData
from unisono_birdsong.task import Birdsong

SOUND = {"rate": 8000, "duration": 0.5, "window_ms": 32.0, "hop_ms": 16.0, "low_hz": 200.0}
ENCODER = {
    "sound": SOUND, "frames": 32, "mels": 16, "patch": (8, 8), "width": 16, "depth": 2, "heads": 2, "layer_scale": 0.5,
    "registers": 1,
}  # fmt: skip
DATA = {"kind": "synthetic", "species": 3, "recordings": 40, "held_out": 6, "seconds": 0.8, "rate": 8000}
TASK = {
    "lejepa": {"views": 3, "hidden": 24, "width": 5, "directions": 16},
    "pixio": {"width": 16, "depth": 2, "heads": 2},
}


def task(objective: str = "supervised", *, data: Any = None, model: Any = None, **config: Any) -> Birdsong:
    """The task of an objective, with changes of its groups."""
    return Birdsong(
        BirdsongConfig.model_validate({**TASK, "objective": objective, **config}),
        model=EncoderSettings.model_validate({**ENCODER, **(model or {})}),
        data=SyntheticData.model_validate({**DATA, **(data or {})}),
    )


def shown(task: Birdsong, rows: range, *, training: bool = True) -> dict[str, Any]:
    """The micro-batch of some rows, as a loader makes it."""
    from unisono import SampleContext, generator

    source = task.data() if training else task.held_out()
    assert source is not None
    return task.collate([task.sample(source[row], SampleContext(generator("test", row), training)) for row in rows])
