"""A state is cut into pieces by any layout and put together by any other, bit for bit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from packages.unisono.tests import processes
from packages.unisono.tests.tasks import LinearTask
from unisono.config.schema.layout import Layout
from unisono.engines.state import ArrayShard
from unisono.engines.torch.parallel import wrap
from unisono.engines.torch.state import sharded_tensors
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import CheckpointError

Arrays = dict[str, np.ndarray]


class Whole:
    """A checkpoint in memory: the arrays that pieces make up, which have to cover every element exactly once."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    @classmethod
    def of(cls, shards: list[ArrayShard]) -> Whole:
        arrays: Arrays = {}
        covered: dict[str, np.ndarray] = {}
        for shard in shards:
            data = np.asarray(shard.data)
            whole = arrays.setdefault(shard.name, np.zeros(shard.shape, data.dtype))
            assert whole.shape == shard.shape
            where = tuple(slice(o, o + n) for o, n in zip(shard.offset, data.shape, strict=True))
            assert whole[where].shape == data.shape
            whole[where] = data
            covered.setdefault(shard.name, np.zeros(shard.shape, np.int64))[where] += 1
        assert all((times == 1).all() for times in covered.values())
        return cls(arrays)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.arrays.items()}

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        part = self.arrays[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        assert part.shape == shape
        return np.array(part)

    def dtype(self, name: str) -> np.dtype:
        return self.arrays[name].dtype

    def fill(self, name: str, offset: tuple[int, ...], into: np.ndarray) -> None:
        into[...] = self.read(name, offset, into.shape)


class Block(nn.Module):
    """Sides that two processes do not divide, and one that the second process has nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.gain


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(4), persistent=False)


def made(seed: int, kind: str = "adamw", world: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after one update with random gradients, or on two processes before any."""
    torch.manual_seed(seed)
    model = Model()
    if world > 1:
        layout = Layout.model_validate({"strategy": "fsdp", "world_size": world})
        wrap.wrap(wrap.StepModule(LinearTask(), model), layout, "fp32", torch.device("cpu"), world, 60.0)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(trainable, lr=0.1, fused=True)
        if kind == "adamw"
        else torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    )
    if world == 1:
        for parameter in trainable:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for buffer in model.buffers():
                buffer += seed
    return model, optimizer


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return sharded_tensors.model_tensors(model) | sharded_tensors.optimizer_tensors(model, optimizer)


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Arrays:
    """What one process saves of them."""
    return Whole.of(sharded_tensors.shards(named(model, optimizer), ProcessInfo())).arrays


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer, reader: Any) -> None:
    sharded_tensors.init_optimizer_state(optimizer, model, reader)
    sharded_tensors.load(named(model, optimizer), reader)


def saved(seed: int, kind: str = "adamw") -> Whole:
    return Whole(all_of(*made(seed, kind)))


def same(mine: Arrays, other: Arrays) -> bool:
    return mine.keys() == other.keys() and all(
        mine[name].dtype == other[name].dtype and np.array_equal(mine[name], other[name]) for name in mine
    )


# names ----------------------------------------------------------------------------------------------------------------


def test_tensors_of_a_model_are_the_very_ones_it_computes_with_tied_ones_once_and_buffers_if_they_persist() -> None:
    model = Model()
    found = sharded_tensors.model_tensors(model)
    block = ["inner.weight", "inner.bias", "gain", "seen"]
    assert sorted(found) == sorted(
        [f"model/blocks.{number}.{name}" for number in range(2) for name in block]
        + ["model/embedding.weight", "model/frozen", "model/steps"]
    )
    assert found["model/embedding.weight"] is model.head.weight
    assert found["model/steps"].data_ptr() == model.steps.data_ptr()


def test_tensors_of_an_optimizer_have_the_names_of_its_parameters_and_there_are_none_before_an_update() -> None:
    model, optimizer = made(1)
    found = sharded_tensors.optimizer_tensors(model, optimizer)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert found.keys() == {
        f"optimizer/{name}/{entry}" for name in trained for entry in ("step", "exp_avg", "exp_avg_sq")
    }
    assert found["optimizer/blocks.1.gain/exp_avg"] is optimizer.state[model.blocks[1].gain]["exp_avg"]
    assert sharded_tensors.optimizer_tensors(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) == {}


# pieces of tensors that every process has -----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 5])
def test_copies_are_saved_once_and_dealt_out_among_the_ranks(world: int) -> None:
    everything = named(*made(1))
    parts = [sharded_tensors.shards(everything, ProcessInfo(rank, world)) for rank in range(world)]
    assert Whole.of([shard for part in parts for shard in part]).arrays.keys() == everything.keys()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_an_empty_tensor_is_saved_and_pieces_carry_no_graph() -> None:
    (shard,) = sharded_tensors.shards({"model/nothing": torch.zeros(0, 3)}, ProcessInfo())
    assert (shard.shape, shard.offset, tuple(shard.data.shape)) == ((0, 3), (0, 0), (0, 3))
    (shard,) = sharded_tensors.shards({"model/weight": nn.Parameter(torch.ones(2))}, ProcessInfo())
    assert not shard.data.requires_grad


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_what_was_saved_is_loaded_bit_for_bit_into_the_same_memory(kind: str) -> None:
    checkpoint, (model, optimizer) = saved(1, kind), made(2, kind)
    before = {name: tensor.data_ptr() for name, tensor in named(model, optimizer).items() if tensor.dim()}
    assert not same(saved(2, kind).arrays, checkpoint.arrays)
    loaded(model, optimizer, checkpoint)
    assert same(all_of(model, optimizer), checkpoint.arrays)
    assert {name: tensor.data_ptr() for name, tensor in named(model, optimizer).items() if tensor.dim()} == before
    assert model.head.weight is model.embedding.weight


def test_an_optimizer_that_was_loaded_goes_on_as_the_one_that_was_saved() -> None:
    checkpoint, results = saved(1), []
    for model, optimizer in (made(1), (Model(), None)):
        if optimizer is None:
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(trainable, lr=0.1, fused=True)
            loaded(model, optimizer, checkpoint)
        torch.manual_seed(9)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        results.append(all_of(model, optimizer))
    assert same(*results)
    assert not same(results[0], checkpoint.arrays)


# what does not fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "array", "told"),
    [
        ("blocks.0.gain", None, "missing ['model/blocks.0.gain'], unexpected nothing (1 and 0"),
        ("other", np.zeros(3, np.float32), "missing nothing, unexpected ['model/other'] (0 and 1"),
        *(
            (
                "blocks.1.gain", np.ones(shape, np.float32),
                f"'model/blocks.1.gain' has shape {shape} in the checkpoint, but (1,) in the model",
            )
            for shape in ((2,), (), (1, 1))
        ),
    ],
    ids=["missing", "not expected", "longer", "a scalar", "a matrix"],
)  # fmt: skip
def test_an_array_that_does_not_fit_is_named(name: str, array: np.ndarray | None, told: str) -> None:
    checkpoint = saved(1)
    checkpoint.arrays[f"model/{name}"] = array  # type: ignore[assignment]
    if array is None:
        del checkpoint.arrays[f"model/{name}"]
    with pytest.raises(CheckpointError, match=re.escape(told)):
        sharded_tensors.load(named(*made(1)), checkpoint)


def test_an_array_of_another_kind_is_not_asked_about() -> None:
    checkpoint = saved(1)
    checkpoint.arrays["carry/rows"] = np.zeros(3, np.float32)
    model = Model()
    sharded_tensors.load(sharded_tensors.model_tensors(model), checkpoint, kinds=("model/",))
    assert np.array_equal(model.frozen.detach().numpy(), checkpoint.arrays["model/frozen"])


@pytest.mark.parametrize(
    ("name", "told"),
    [("blocks.7.gain", "'blocks.7.gain', which the model does not have"), ("frozen", "'frozen', which is not trained")],
)
def test_optimizer_state_of_a_parameter_that_is_not_there_or_not_trained_is_named(name: str, told: str) -> None:
    model, optimizer = made(1)
    checkpoint = Whole({f"optimizer/{name}/exp_avg": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=f"optimizer state for {re.escape(told)}"):
        sharded_tensors.init_optimizer_state(optimizer, model, checkpoint)


@pytest.mark.parametrize(("entry", "device"), [("momentum_buffer", "meta"), ("step", "cpu")])
def test_state_lies_where_its_parameter_does_and_a_step_counter_on_the_cpu(entry: str, device: str) -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones((), device="meta"))  # a scalar, like the counter
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sharded_tensors.init_optimizer_state(optimizer, model, Whole({f"optimizer/scale/{entry}": np.ones((), np.float32)}))
    assert optimizer.state[model.scale][entry].device.type == device


# two processes --------------------------------------------------------------------------------------------------------


def sharded(
    place: ProcessInfo, group: Communicator, given: Arrays, kind: str
) -> tuple[list[ArrayShard], list[ArrayShard]]:
    """Load a checkpoint of one process into shards, and save it again: the pieces of this rank, before and after."""
    model, optimizer = made(2, kind, world=place.world_size)
    reader = Whole(given)
    before = sharded_tensors.shards(sharded_tensors.model_tensors(model), place)
    before = [ArrayShard(s.name, s.shape, s.offset, s.data.clone().numpy()) for s in before]
    loaded(model, optimizer, reader)
    after = sharded_tensors.shards(named(model, optimizer), place)
    return before, [ArrayShard(s.name, s.shape, s.offset, s.data.numpy()) for s in after]


@pytest.fixture(scope="module")
def moved() -> tuple[Arrays, list[Any]]:
    """A checkpoint of one process, and what two processes that loaded it save."""
    given = saved(1).arrays
    return given, processes.run(sharded, 2, given, "adamw")


def test_two_processes_load_what_one_has_saved_and_one_what_two_have(moved: tuple[Arrays, list[Any]]) -> None:
    given, ranks = moved
    before = Whole.of([shard for first, _ in ranks for shard in first]).arrays
    assert not np.array_equal(before["model/embedding.weight"], given["model/embedding.weight"])
    checkpoint = Whole.of([shard for _, last in ranks for shard in last])
    assert same(checkpoint.arrays, given)
    model, optimizer = made(3)
    loaded(model, optimizer, checkpoint)
    assert same(all_of(model, optimizer), given)


def test_sides_that_do_not_divide_are_cut_unevenly_and_an_empty_piece_is_not_saved(
    moved: tuple[Arrays, list[Any]],
) -> None:
    cut = [{shard.name: (shard.offset, shard.data.shape) for shard in last} for _, last in moved[1]]
    weight, gain = "model/blocks.0.inner.weight", "optimizer/blocks.0.gain/exp_avg"
    assert [pieces[weight] for pieces in cut] == [((0, 0), (2, 5)), ((2, 0), (1, 5))]
    assert [pieces.get(gain) for pieces in cut] == [((0,), (1,)), None]


def test_what_is_not_sharded_is_saved_by_one_of_the_ranks(moved: tuple[Arrays, list[Any]]) -> None:
    counters = [[shard.name for shard in last if shard.name.endswith("/step")] for _, last in moved[1]]
    assert not set(counters[0]) & set(counters[1])
    assert min(map(len, counters)) > 0
