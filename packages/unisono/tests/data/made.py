"""Tasks that worker processes import: nothing here needs torch, so they start in a moment."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from unisono.config.batch_split import BatchSplit
from unisono.config.schema.data import Packing
from unisono.data import ledger
from unisono.data.ledger import Ledger
from unisono.data.loading.loader import Loader
from unisono.data.loading.micro_batch import MicroBatch
from unisono.data.order.order import Order
from unisono.data.order.packed_plan import PackedPlan, lookup_lengths
from unisono.data.order.plan import Plan, StreamPlan
from unisono.task import SampleContext, Task

SIZE, BATCH = 31, 12
BAD = (3, 17, 18)


class Augmented(Task):
    """Samples that say which row they are and what was drawn for them, of different lengths."""

    def data(self) -> Any:
        return np.arange(SIZE)

    def sample(self, record: Any, context: SampleContext) -> dict[str, Any]:
        time.sleep(int(record) % 3 * 2e-4)  # so that workers finish out of order
        length = 1 + int(record) % 5
        units = 100 * int(record) + np.arange(length)
        return {"row": int(record), "units": units, "noise": context.rng.normal(size=2).astype(np.float32)}

    def collate(self, samples: Any) -> Any:
        longest = max(len(sample["units"]) for sample in samples)
        units = np.full((len(samples), longest), -1)
        for number, sample in enumerate(samples):
            units[number, : len(sample["units"])] = sample["units"]
        return {
            "row": np.array([sample["row"] for sample in samples]),
            "units": units,
            "noise": np.stack([sample["noise"] for sample in samples]),
        }

    def length(self, sample: Any) -> int:
        return len(sample["units"])

    def cut(self, sample: Any, first: int, last: int) -> Any:
        return {**sample, "units": sample["units"][first:last]}

    def pack(self, samples: Any) -> Any:
        return {
            "row": samples[0]["row"],
            "units": np.concatenate([sample["units"] for sample in samples]),
            "noise": sum(sample["noise"] for sample in samples),
        }

    def counts(self, batch: Any) -> dict[str, float]:
        return {"unit": float((batch["units"] >= 0).sum())}

    def work(self, batch: Any) -> dict[str, float]:
        return {"units": float((batch["units"] >= 0).sum())}

    def build(self) -> Any:
        raise NotImplementedError

    outputs = loss = build


class WithBad(Augmented):
    """Some rows cannot be made."""

    def sample(self, record: Any, context: SampleContext) -> dict[str, Any]:
        if int(record) in BAD:
            raise ValueError(f"no sample in {record}")
        return super().sample(record, context)


class NothingGood(Augmented):
    def sample(self, record: Any, context: SampleContext) -> dict[str, Any]:
        raise ValueError(f"no sample in {record}")


class Unpicklable(Exception):  # noqa: N818
    def __init__(self, row: int, other: Any) -> None:
        super().__init__(f"what {row}")
        self.other = lambda: other


class Ending(Augmented):
    """Row 17 ends its worker, in one way or another."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how

    def sample(self, record: Any, context: SampleContext) -> dict[str, Any]:
        if int(record) == 17:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif self.how == "bus":
                os.kill(os.getpid(), signal.SIGBUS)
            elif self.how == "_exit":
                os._exit(7)
            elif self.how == "exit":
                sys.exit(7)
            elif self.how == "unpicklable":
                raise Unpicklable(17, 3)
            elif self.how == "hang":
                time.sleep(60)
        return super().sample(record, context)

    def collate(self, samples: Any) -> Any:
        if self.how == "collate" and any(sample["row"] == 17 for sample in samples):
            os._exit(9)
        batch = super().collate(samples)
        return {**batch, "f": lambda: 0} if self.how == "lambda" else batch


class Large(Augmented):
    """Batches that go through memory, and what the worker has imported."""

    def collate(self, samples: Any) -> Any:
        rows = np.array([sample["row"] for sample in samples])
        pixels = rows[:, None].astype(np.float32) + np.zeros(200_000, dtype=np.float32)
        return {**super().collate(samples), "pixels": pixels}


class Telling(Augmented):
    """Says of its process what tests want to know."""

    def collate(self, samples: Any) -> Any:
        told = {"pid": os.getpid(), "torch": "torch" in sys.modules, "omp": os.environ.get("OMP_NUM_THREADS")}
        return {**super().collate(samples), **told}


def plan(epochs: float = 2.2, seed: int = 0) -> StreamPlan:
    return StreamPlan.create(Order(SIZE, seed), BATCH, None, epochs)  # 68 rows: six batches, the last one of eight rows


def packed_plan() -> PackedPlan:
    """Samples of one to five units end to end in rows of 16, some of them cut where a row is full."""
    lengths, how = lookup_lengths(1 + np.arange(SIZE) % 5), Packing(method="concatenate", chunk=20)
    return PackedPlan(Order(SIZE, 0), lengths, how, capacity=16, global_batch=BATCH, lanes=6, steps=5)


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class OnlyBlocks:
    """A source that can read whole blocks only, and notes which."""

    def __init__(self, sizes: Any, slow: float = 0.0) -> None:
        self.blocks, self.slow = np.array(sizes), slow
        self.starts = np.cumsum(self.blocks) - self.blocks
        self.lengths = np.ones(int(self.blocks.sum()), dtype=np.int64)
        self.read: list[int] = []

    def __len__(self) -> int:
        return int(self.blocks.sum())

    def read_block(self, number: int) -> list[int]:
        self.read.append(number)
        time.sleep(self.slow)
        return list(range(self.starts[number], self.starts[number] + self.blocks[number]))


@contextmanager
def loader(
    task: Task,
    *,
    of: Plan | None = None,
    rows: Any = None,
    world: int = 1,
    micro: int | None = 4,
    rank: int = 0,
    **how: Any,
) -> Iterator[Loader]:
    """A loader of a rank, which ends with the block."""
    rows, of = task.data() if rows is None else rows, of or plan()
    with closing(Loader(task, rows, of, BatchSplit.create(of.global_batch, world, micro), rank, **how)) as made:
        yield made


def recorded(
    task: Task, folder: Path, first: int, last: int, world: int = 1, *, start: str, shift: int = 0, **how: Any
) -> list[dict[str, Any]]:
    """Steps of a run that go into its ledger, as its processes would write it; the mark of each process.

    Args:
        task: whose bad samples are left out.
        folder: of the run.
        first: step, from 0.
        last: one past the last step.
        world: number of processes.
        start: a name for it.
        shift: how many steps later the samples are taken from the plan.
        how: of the loader.
    """
    folder.mkdir(exist_ok=True)
    marks = []
    for rank in range(world):
        given = {"micro": 2, "on_error": "mask", "contents": True, **how}
        with (
            Ledger(folder, rank, world, first, start) as book,
            loader(task, world=world, rank=rank, **given) as loading,
        ):
            running = loading.steps(first + shift)
            for step in range(first, last):
                book.step(step, next(running))
            book.flush()
            marks.append(book.mark())
    return marks


def audited(folder: Path, of: Plan, task: Task, source: Any, *, checkpoint: int = 0, remake: int = 3) -> Any:
    """The audit of a ledger against a plan, without a whole run."""
    from unisono.data import audit

    report = audit.AuditReport(folder)
    starts = audit.collect_starts(sorted((folder / ledger.FOLDER).glob("rank-*.jsonl")), report)
    counted = audit.check_starts(starts, of, checkpoint, report)
    audit.rebuild_steps(counted, of, task, source, remake, report)
    return report


def steps(
    task: Task,
    world: int = 1,
    micro: int = 4,
    first: int = 0,
    last: int | None = None,
    of: Plan | None = None,
    **how: Any,
) -> list[list[MicroBatch]]:
    """The micro-batches of every rank together, in order, step by step."""
    of = of or plan()
    with ExitStack() as opened:
        ranks = [
            opened.enter_context(loader(task, of=of, world=world, micro=micro, rank=r, **how)) for r in range(world)
        ]
        running = [each.steps(first) for each in ranks]
        return [
            [batch for one in running for batch in next(one)] for _ in range(first, of.steps if last is None else last)
        ]


def same(mine: list[list[MicroBatch]], theirs: list[list[MicroBatch]]) -> None:
    """Bit for bit, with everything that is said of them."""
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert [m.number for m in one] == [m.number for m in other]
        for a, b in zip(one, other, strict=True):
            assert (a.counts, a.work, a.idle, a.packed, a.rows.tolist()) == (
                b.counts, b.work, b.idle, b.packed, b.rows.tolist()
            )  # fmt: skip
            assert a.arrays.keys() == b.arrays.keys()
            for name, array in a.arrays.items():
                assert array.dtype == b.arrays[name].dtype
                if array.dtype == object:  # whose bytes are addresses
                    assert array.tolist() == b.arrays[name].tolist()
                else:
                    assert array.tobytes() == b.arrays[name].tobytes()
            assert a.info is not None
            assert b.info is not None
            assert a.info.masked == b.info.masked
            assert a.info.contents.tolist() == b.info.contents.tolist()
