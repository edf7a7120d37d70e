"""Memory of a traced step: state by arithmetic, activations beside what a real step on a CPU saves."""

from __future__ import annotations

from math import ceil, prod

import pytest
import torch
from torch import Tensor, nn

from .conftest import trace
from .zoo.small import BLOCK, BLOCKS, HEAD, PARAMETERS, WIDTH, Net

TENSORS = BLOCKS * len(BLOCK) + len(HEAD)
SHAPES = BLOCKS * BLOCK + HEAD


def allocated(*sizes: int) -> int:
    """Bytes of tensors as the allocator gives them out, in pieces of 512."""
    return sum(ceil(size / 512) * 512 for size in sizes)


def shards(world: int) -> list[int]:
    """Bytes of rank 0's piece of every parameter."""
    return [4 * ceil(shape[0] / world) * prod(shape[1:]) for shape in SHAPES]


@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (4, "ddp"), (2, "fsdp"), (4, "fsdp"), (8, "fsdp")])
def test_parameters_gradients_and_moments_are_those_of_arithmetic(world: int, strategy: str) -> None:
    most = trace(world_size=world, strategy=strategy).recording.most
    pieces = shards(world if strategy == "fsdp" else 1)
    assert most["parameters"] == allocated(*pieces)
    assert most["optimizer"] == 2 * allocated(*pieces) + 512 * TENSORS  # two moments, and a step count
    if strategy == "single":
        assert most["gradients"] == allocated(*pieces)
    elif strategy == "ddp":  # in buckets, of which parameters have views, and a new one before it is copied there
        assert most["gradients"] == pytest.approx(allocated(4 * PARAMETERS, max(pieces)), abs=1024)  # two buckets
    else:  # a unit's gradients are reduced into one tensor
        block, head = sum(pieces[: len(BLOCK)]), sum(pieces[-len(HEAD) :])
        assert most["gradients"] == allocated(*[block] * BLOCKS, head)


@pytest.mark.parametrize(
    ("optimizer", "world"),
    [
        ("muon", 1),
        ("muon", 4),
        ("lion", 1),
        ("lion", 4),
        ("adam_atan2", 1),
        ("adam_atan2", 4),
        ("adafactor", 1),
        ("adafactor", 4),
    ],
)
def test_every_optimizer_is_traced_and_its_state_is_divided(optimizer: str, world: int) -> None:
    most = trace(f"optim={optimizer}", world_size=world).recording.most
    assert 0 < most["optimizer"] < 2.2 * allocated(*shards(world))


def test_sgd_without_momentum_has_no_state() -> None:
    assert trace("optim=sgd").recording.most.get("optimizer", 0) == 0


def test_gathered_units_are_at_most_three_at_a_time_beside_the_root() -> None:
    block, head = (4 * sum(prod(shape) for shape in unit) for unit in (BLOCK, HEAD))
    most = trace(world_size=8).recording.most["communication"]
    assert head + 2 * block <= most <= 2 * head + 4 * block


def saved_by_a_real_step(rows: int) -> int:
    """Bytes of the distinct tensors that a real forward pass of the small model saves, beside parameters and inputs."""
    model, given = Net(), torch.randn(rows, WIDTH)
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known | {given.untyped_storage().data_ptr()}:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = nn.functional.cross_entropy(model(given), torch.zeros(rows, dtype=torch.int64), reduction="sum")
    assert loss.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("rows", [64, 512])
def test_activations_are_what_a_real_forward_pass_saves(rows: int) -> None:
    """Within 2 %: a step also has scalars, and counts the targets that the loss saves as its batch."""
    assert trace(rows=rows).recording.held["activations"] == pytest.approx(saved_by_a_real_step(rows), rel=0.02)


def test_recomputed_blocks_hold_their_inputs_alone() -> None:
    rows = 512
    recording = trace(rows=rows, activation_checkpointing=1).recording
    plain = trace(rows=rows).recording
    inner = 4 * rows * (4 * WIDTH)  # of a block, after its first layer
    assert plain.held["activations"] - recording.held["activations"] >= BLOCKS * inner
    assert recording.work["backward"].flops > plain.work["backward"].flops


def test_flops_are_two_per_weight_and_row_forward_and_four_backward() -> None:
    rows = 64
    work = trace(rows=rows).recording.work
    weights = sum(prod(shape) for shape in SHAPES if len(shape) == 2)
    assert work["forward"].flops == 2 * weights * rows
    assert work["backward"].flops == (4 * weights - 2 * BLOCK[0][0] * BLOCK[0][1]) * rows  # inputs need no gradient


ADAPTERS = [one for shape in SHAPES if len(shape) == 2 for one in ((8, shape[1]), (shape[0], 8))]  # of rank 8


def test_of_a_model_with_adapters_they_alone_have_gradients_and_moments() -> None:
    most, sizes = trace("adapter=lora").recording.most, [4 * prod(shape) for shape in ADAPTERS]
    assert most["parameters"] == allocated(*shards(1), *sizes)
    assert most["gradients"] == allocated(*sizes)
    assert most["optimizer"] == 2 * allocated(*sizes) + 512 * len(sizes)


def test_products_for_gradients_of_frozen_weights_are_not_made() -> None:
    rows = 64
    work = trace("adapter=lora", rows=rows).recording.work
    weights, added = (sum(prod(shape) for shape in shapes if len(shape) == 2) for shapes in (SHAPES, ADAPTERS))
    inputs = weights + added - prod(BLOCK[0]) - prod(ADAPTERS[0])  # those of the first layer need no gradient
    assert work["forward"].flops == 2 * rows * (weights + added)
    assert work["backward"].flops == 2 * rows * (inputs + added)


@pytest.mark.parametrize(("kind", "size"), [("kept", 4), ("auto", 4), ("bf16", 2)])
def test_frozen_matrices_have_the_dtype_that_is_asked_for(kind: str, size: int) -> None:
    """Where values decide it, that of the larger ones."""
    most = trace("adapter=lora", f"adapter.base_dtype={kind}", "train.precision=bf16").recording.most
    base = [(size if len(shape) == 2 else 4) * prod(shape) for shape in SHAPES]
    assert most["parameters"] == allocated(*base, *[4 * prod(shape) for shape in ADAPTERS])
