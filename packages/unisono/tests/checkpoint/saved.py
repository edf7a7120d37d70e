"""States that say which step they are of, saved and read again, and groups of threads as ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.core import commit
from unisono.checkpoint.core.arrays import ArrayReader
from unisono.checkpoint.core.commit import Snapshot
from unisono.engines.state import ArrayShard
from unisono.engines.torch.state import saved_tensors
from unisono.runtime.communication.communicator import SingleProcess

FILES = ("rank-00000.safetensors", "rank-00001.safetensors", "manifest.json")
STATE = {"step": 4, "random": False, "micro_batch": 3, "nested": {"list": [1, 2.5, None], "text": "é"}}


def shards(step: int, rank: int = 0, size: int = 1) -> list[ArrayShard]:
    """A rank's pieces of a state that says which step it is of: rows of a matrix, and on the last rank a scalar."""
    rows = torch.full((2, 3), float(step)) + torch.arange(3) / 10
    mine = [ArrayShard("model/weight", (2 * size, 3), (2 * rank, 0), rows)]
    return mine + ([ArrayShard("optimizer/weight/step", (), (), torch.tensor(step))] if rank == size - 1 else [])


def save(folder: Path, step: int, keep: int = 10, state: Any = None) -> Path:
    return commit.save_checkpoint(
        folder, Snapshot(step, shards(step), STATE if state is None else state), SingleProcess(), keep
    )


def load(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = commit.open_checkpoint(path)
    reader = ArrayReader(checkpoint.path, checkpoint.arrays)
    return {
        name: saved_tensors.read_tensor(reader, name, (0,) * len(shape), shape) for name, shape in reader.shapes.items()
    }


def is_of(path: Path, step: int) -> bool:
    """Whether a checkpoint is whole, and holds what was saved at a step."""
    found = load(path)
    return commit.open_checkpoint(path).step == step and all(
        torch.equal(found[shard.name], shard.data) for shard in shards(step)
    )


def flip_bit(file: Path, at: int = -1) -> bytes:
    """Damage a byte of a file, and of no other that is linked to it; returns the content."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.unlink()
    file.write_bytes(content)
    return bytes(content)


def steps(folder: Path) -> list[int]:
    return [commit.open_checkpoint(path).step for path in commit.find_checkpoints(folder)]


class Threads:
    """The group of so many threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)
        self._own = threading.local()

    @property
    def rank(self) -> int:
        rank: int = self._own.rank
        return rank

    def gather(self, value: Any, what: str) -> list[Any]:
        self._values[self.rank] = json.loads(json.dumps(value))
        self._barrier.wait()
        everyone = list(self._values)
        self._barrier.wait()
        return everyone

    def gather_to_first(self, value: Any, what: str) -> list[Any]:
        everyone = self.gather(value, what)
        return everyone if self.rank == 0 else []

    def barrier(self, what: str) -> None:
        self.gather(None, what)

    def run(self, act: Callable[[], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def enter(rank: int) -> None:
            self._own.rank = rank
            results[rank] = act()

        threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
