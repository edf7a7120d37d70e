"""A task whose data have everything that makes an order hard; worker processes import it, and no torch with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.task import Batch, SampleContext, Task

CAPACITY = 20


class Blocked(list[Any]):
    """Records in blocks of seven."""

    @property
    def blocks(self) -> np.ndarray:
        return np.array([7] * (len(self) // 7) + ([len(self) % 7] if len(self) % 7 else []))


class Mixed(Task):
    """Samples whose content and length are drawn for them; every eleventh record cannot be made."""

    capacity = CAPACITY

    def data(self) -> Any:
        return {"a": Blocked(range(200)), "b": Blocked(range(1000, 1333)), "c": Blocked(range(2000, 2700))}

    def sample(self, record: Any, context: SampleContext) -> np.ndarray:
        if record % 11 == 5:
            raise ValueError(f"record {record} is bad")
        return record * 1000.0 + context.rng.random(int(context.rng.integers(1, 30)))

    def length(self, sample: np.ndarray) -> int:
        return len(sample)

    def cut(self, sample: np.ndarray, first: int, last: int) -> np.ndarray:
        return sample[first:last]

    def pack(self, samples: Any) -> dict[str, np.ndarray]:
        units, document = np.zeros(CAPACITY), np.full(CAPACITY, -1)
        together = np.concatenate(samples)
        units[: len(together)] = together
        document[: len(together)] = np.repeat(np.arange(len(samples)), [len(sample) for sample in samples])
        return {"units": units, "document": document}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"unit": float((batch["document"] >= 0).sum())}

    def build(self) -> Any:
        raise NotImplementedError

    outputs = loss = build
