"""The task whose batches `benchmarks.audio` measures: recordings out of an Arrow file, filter banks of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from unisono.task import Batch, Context, Loss, Task
from unisono_audio import Fbank, Pipeline
from unisono_audio.sources import open_recordings


class Recordings(Task):
    """Filter banks and labels; a model that does next to nothing.

    Args:
        path: of the recordings.
        backend: of the pipeline.
    """

    def __init__(self, path: str = "", backend: str = "auto", config: Any = None, **more: Any) -> None:
        super().__init__(config, **more)
        self.path, self.backend = path, backend

    def data(self) -> Any:
        return open_recordings(self.path, label="label")

    @cached_property
    def pipeline(self) -> Pipeline:
        features = Fbank(128, window_type="hanning")
        return Pipeline(32_000, 5.0, features, 512, -7.2, 8.86, backend=self.backend)  # type: ignore[arg-type]

    def collate(self, samples: Sequence[Any]) -> Batch:
        batch = self.pipeline([s["audio"] for s in samples], names=[s["name"] for s in samples])
        return {"features": batch.values, "label": np.array([s["label"] for s in samples])}

    def build(self) -> Any:
        from torch import nn

        return nn.Linear(128, 1)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"loss": float(len(batch["label"]))}

    def outputs(self, model: Any, batch: Batch, context: Context) -> Any:
        return model(batch["features"].mean(1))

    def loss(self, outputs: Any, batch: Batch, context: Context) -> Loss:
        return Loss({"loss": outputs.square().sum()})
