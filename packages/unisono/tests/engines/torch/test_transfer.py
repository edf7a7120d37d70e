"""The way to the device, by a clock of our own: copies run beside the computation, nothing is read or reused early."""

from __future__ import annotations

import weakref
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.nested import leaves
from unisono.engines.torch.transfer import Transfer

CPU = torch.device("cpu")
COPY, COMPUTE, LOAD = 4.0, 10.0, 1.0  # what each takes, on the clock of the mock
Pair = namedtuple("Pair", "left right")


class Clock:
    """An accelerator with two streams: the process only puts work into them, until it waits for one.

    Work of a stream begins when the process has asked for it and what was asked for before is finished.
    """

    def __init__(self) -> None:
        self.now = 0.0  # of the process
        self.side = self.main = 0.0  # when the streams have nothing more to do
        self.copies: list[tuple[float, float]] = []
        self.computed: list[tuple[float, float]] = []
        self.released: list[tuple[float, float]] = []  # pinned memory: when it was, and when its copy was finished
        self.marked: list[weakref.ref[Tensor]] = []
        self.most = 0  # micro-batches in the memory of the device
        self._pinned: list[Tensor] = []

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.append(pinned := tensor.clone())
        return pinned

    def copy(self, tensors: list[Tensor]) -> tuple[list[Tensor], float]:
        begin = max(self.now, self.side)
        self.side = begin + COPY
        self.copies.append((begin, self.side))
        done = self.side
        for pinned in self._pinned:
            weakref.finalize(pinned, lambda: self.released.append((self.now, done)))
        self._pinned = []
        self.most = max(self.most, len(self.copies) - sum(end <= self.now for _, end in self.computed))
        return [tensor.clone() for tensor in tensors], done

    def use(self, tensors: list[Tensor], copied: float) -> None:
        self.main = max(self.main, copied)
        self.marked += [weakref.ref(tensor) for tensor in tensors]

    def is_finished(self, copied: float) -> bool:
        return self.now >= copied

    def mark(self) -> float:
        return self.main

    # what the test's computation does

    def compute(self, batch: Any) -> None:
        marked = [tensor() for tensor in self.marked]
        for _, tensor in leaves(batch):
            assert any(tensor is known for known in marked), "the computation's stream was not told of the copy"
        begin = max(self.now, self.main)
        assert any(end <= begin for _, end in self.copies), "computed before it was copied"
        self.main = begin + COMPUTE
        self.computed.append((begin, self.main))

    def wait(self, until: float | None = None) -> None:
        self.now = max(self.now, self.main if until is None else until)


def micro(number: int) -> MicroBatch:
    arrays = {"x": np.full(3, number, np.float32)}
    return MicroBatch(number, np.arange(3), arrays, {"n": 3.0}, {})


def overlap(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def test_the_next_micro_batch_is_copied_while_the_present_one_is_computed_with_and_no_other_is_on_the_device() -> None:
    clock = Clock()
    transfer = Transfer(CPU, "fp32", streams=clock)
    seen = []
    for one, batch in transfer.prefetch(micro(n) for n in range(6)):
        clock.compute(batch)
        seen.append((one.number, batch["x"].tolist()))
    clock.wait()
    assert seen == [(n, [n, n, n]) for n in range(6)]
    for number in range(1, 6):
        assert overlap(clock.copies[number], clock.computed[number - 1]) == COPY
        assert clock.copies[number][1] <= clock.computed[number][0], "the computation waits for its copy"
    assert clock.now == COPY + 6 * COMPUTE, "only the first copy is waited for"
    assert clock.most == 2, "however far ahead the process could run"


def test_pinned_memory_is_kept_until_its_copy_is_finished() -> None:
    clock = Clock()
    transfer = Transfer(CPU, "fp32", streams=clock)
    for number, (_, batch) in enumerate(transfer.prefetch(micro(n) for n in range(9))):
        clock.compute(batch)
        if number % 3 == 2:
            clock.wait()
        del batch
    assert len(clock.released) >= 3, "it is let go of, some time"
    assert all(released >= finished for released, finished in clock.released)


def steps(clock: Clock, count: int) -> Iterator[list[MicroBatch]]:
    for number in range(count):
        clock.now += LOAD
        yield [micro(number)]


@pytest.mark.parametrize("ahead", [True, False])
def test_with_one_pass_per_step_the_copy_for_the_next_step_begins_in_this_one(ahead: bool) -> None:
    clock = Clock()
    transfer = Transfer(CPU, "fp32", streams=clock)
    for batches in transfer.incoming(steps(clock, 5)):
        for _, batch in transfer.prefetch(batches):
            clock.compute(batch)
        if ahead:
            transfer.look_ahead()
        clock.wait()  # for the loss
    hidden = sum(overlap(copy, done) for copy in clock.copies for done in clock.computed)
    assert hidden == (4 * COPY if ahead else 0.0)
    assert clock.now == (LOAD + COPY + 5 * COMPUTE if ahead else 5 * (LOAD + COPY + COMPUTE))


def test_an_evaluation_between_two_steps_leaves_the_copy_for_the_next_one_alone() -> None:
    clock = Clock()
    transfer = Transfer(CPU, "fp32", streams=clock)
    seen = []
    for batches in transfer.incoming(steps(clock, 2)):
        seen += [batch["x"][0].item() for _, batch in transfer.prefetch(batches)]
        transfer.look_ahead()
        seen += [batch["x"][0].item() for _, batch in transfer.prefetch([micro(70), micro(71)])]
    assert seen == [0, 70, 71, 1, 70, 71]


def test_an_error_of_the_loader_is_raised_when_its_turn_comes() -> None:
    def broken() -> Iterator[list[MicroBatch]]:
        yield [micro(0)]
        raise RuntimeError("row 7")

    transfer = Transfer(CPU, "fp32", streams=Clock())
    incoming = transfer.incoming(broken())
    assert next(incoming)[0].number == 0
    transfer.look_ahead()
    transfer.look_ahead()
    with pytest.raises(RuntimeError, match="row 7"):
        next(incoming)
    with pytest.raises(StopIteration):
        next(incoming)


def nested() -> dict[str, Any]:
    return {
        "a": np.ones(2, np.float32),
        "deep": {"b": torch.ones(2), "deeper": {"c": [np.ones(2, np.int64), (torch.ones(2), "text")]}},
        "pair": Pair(np.ones(2, np.float32), None),
        "n": 3,
    }


@pytest.mark.parametrize("streams", [None, Clock()])
def test_batches_may_be_nested(streams: Clock | None) -> None:
    transfer = Transfer(CPU, "fp64", streams=streams)
    ((_, batch),) = transfer.prefetch([MicroBatch(0, np.arange(2), nested(), {}, {})])
    kinds = {name: getattr(value, "dtype", value) for name, value in leaves(batch)}
    assert kinds == {
        "a": torch.float64, "deep.b": torch.float64, "deep.deeper.c.0": torch.int64, "deep.deeper.c.1.0": torch.float64,
        "deep.deeper.c.1.1": "text", "pair.0": torch.float64, "pair.1": None, "n": 3,
    }  # fmt: skip
    assert isinstance(batch["pair"], Pair)


def test_on_the_cpu_everything_passes_through() -> None:
    transfer = Transfer(CPU, "fp32")
    source = iter([[micro(0)]])
    assert transfer.incoming(source) is source
    x = torch.ones(2)
    ((_, batch),) = transfer.prefetch([MicroBatch(0, np.arange(2), {"x": x}, {}, {})])
    assert batch["x"] is x


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_on_an_accelerator_values_arrive_and_copies_overlap() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    device = torch.device(device.type, 0)
    transfer = Transfer(device, "fp32")
    rows = [np.random.default_rng(n).normal(size=(2000, 2000)).astype(np.float32) for n in range(6)]
    batches = [MicroBatch(n, np.arange(2000), {"x": {"y": row}}, {}, {}) for n, row in enumerate(rows)]
    for one, batch in transfer.prefetch(batches):
        product = batch["x"]["y"]
        for _ in range(20):
            product = product @ batch["x"]["y"] / 100
        assert torch.equal(batch["x"]["y"].cpu(), torch.from_numpy(rows[one.number]))
