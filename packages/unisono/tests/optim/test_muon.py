"""Muon orthogonalises whole matrices, whoever holds them, and takes hidden matrices only."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from packages.unisono.tests import processes
from packages.unisono.tests.optim.test_optimizers import config
from packages.unisono.tests.runs import configuration
from packages.unisono.tests.tasks import Transformer
from unisono.config.schema.optimizers import OptimizerGroup
from unisono.engines.torch.parallel.wrap import find_blocks
from unisono.optim.groups import find_patterns
from unisono.optim.muon import Muon, apply_distributed, lr_adjustment, orthogonalise
from unisono.optim.optimizers import CombinedOptimizer, apply_schedule, build_optimizer, describe_updates
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import ConfigError

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = [(6, 4), (5, 7), (1, 3), (3, 8), (9, 2), (4, 4), (2, 2)]  # fewer rows than processes, and rows left over


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, columns)))


# Newton-Schulz ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_the_iteration_is_a_polynomial_of_the_singular_values(rows: int, columns: int, seed: int) -> None:
    of = matrix(rows, columns, seed)
    left, values, right = np.linalg.svd(of.numpy(), full_matrices=False)
    values = values / np.linalg.norm(of)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    made = orthogonalise(of, COEFFICIENTS, steps=5, eps=1e-7)
    np.testing.assert_allclose(made.numpy(), left @ np.diag(values) @ right, atol=1e-11)


def test_singular_values_come_near_one_and_a_matrix_of_zeros_stays_one() -> None:
    values = np.linalg.svd(orthogonalise(matrix(32, 48), COEFFICIENTS, 5, 1e-7).numpy(), compute_uv=False)
    assert 0.6 < values.min() < values.max() < 1.2
    assert not orthogonalise(torch.zeros(3, 2), COEFFICIENTS, 5, 1e-7).any()


@pytest.mark.parametrize(
    ("kind", "shape", "factor"),
    [("original", (8, 2), 2.0), ("original", (2, 8), 1.0), ("match_rms_adamw", (4, 16), 0.8)],
)
def test_the_rate_is_adjusted_to_the_shape(kind: str, shape: tuple[int, int], factor: float) -> None:
    assert lr_adjustment(kind, *shape) == pytest.approx(factor)


# formula ------------------------------------------------------------------------------------------------------------

OPTIONS = [("original", True), ("original", False), ("match_rms_adamw", True)]


def _trained(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, steps: int = 4) -> np.ndarray:
    for step in range(steps):
        parameter.grad = matrix(*parameter.shape, seed=10 + step).to(parameter.dtype)
        optimizer.step()
    return parameter.detach().double().numpy()


@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
@pytest.mark.parametrize(("adjust", "nesterov"), OPTIONS)
def test_muon_is_its_formula(adjust: str, nesterov: bool, shape: tuple[int, int]) -> None:
    p = matrix(*shape).numpy()
    parameter = nn.Parameter(torch.from_numpy(p.copy()))
    mine = _trained(Muon([parameter], 0.1, 0.3, 0.9, nesterov, adjust_lr=adjust), parameter)
    momentum = np.zeros_like(p)
    for step in range(4):
        g = matrix(*shape, seed=10 + step).numpy()
        momentum = 0.9 * momentum + 0.1 * g
        direction = 0.1 * g + 0.9 * momentum if nesterov else momentum
        left, values, right = np.linalg.svd(direction, full_matrices=False)
        values = values / np.linalg.norm(direction)
        for _ in range(5):
            values = COEFFICIENTS[0] * values + COEFFICIENTS[1] * values**3 + COEFFICIENTS[2] * values**5
        p = p * (1 - 0.1 * 0.3) - 0.1 * lr_adjustment(adjust, *shape) * left @ np.diag(values) @ right
    np.testing.assert_allclose(mine, p, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
@pytest.mark.parametrize(("adjust", "nesterov"), OPTIONS)
def test_options_mean_what_they_mean_for_torch(adjust: str, nesterov: bool, shape: tuple[int, int]) -> None:
    """In bf16, in which torch's own computes inside, both make the very same update."""
    mine, theirs = (nn.Parameter(matrix(*shape).float()) for _ in range(2))
    ours = Muon([mine], 0.1, 0.3, 0.9, nesterov, ns_dtype=torch.bfloat16, adjust_lr=adjust)
    torchs = torch.optim.Muon([theirs], 0.1, 0.3, 0.9, nesterov, adjust_lr_fn=adjust)
    start = mine.detach().double().numpy().copy()
    a, b = _trained(ours, mine), _trained(torchs, theirs)
    assert np.abs(a - start).max() > 0.1
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-2)  # they divide by the norm in another order of rounding


# whole matrices -----------------------------------------------------------------------------------------------------


def dealt(place: ProcessInfo, group: Communicator, layout: str) -> list[tuple[np.ndarray, int]]:
    """Each matrix through a function of the whole, and how often this process called it."""
    meshes = {
        "fsdp": lambda: (init_device_mesh("cpu", (place.world_size,)), [Shard(0)]),
        "hsdp": lambda: (init_device_mesh("cpu", (2, place.world_size // 2)), [Replicate(), Shard(0)]),
    }
    mesh, placements = meshes[layout]() if layout in meshes else (None, [])
    wholes = [matrix(*shape, seed=number) for number, shape in enumerate(SHAPES)]
    parameters = [distribute_tensor(whole, mesh, placements) if mesh else whole for whole in wholes]
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    calls: list[torch.Size] = []

    def function(whole: torch.Tensor) -> torch.Tensor:
        calls.append(whole.shape)
        return orthogonalise(whole, COEFFICIENTS, 5, 1e-7)

    made = apply_distributed(function, parts, parameters)
    assert all(torch.equal(p, w) for p, w in zip(parameters, wholes, strict=True)) if not mesh else True
    result = [
        DTensor.from_local(part, mesh, placements, shape=whole.shape, stride=whole.stride()).full_tensor()
        if mesh
        else part
        for part, whole in zip(made, wholes, strict=True)
    ]
    return [(value.numpy(), len(calls)) for value in result]


@pytest.mark.parametrize(("layout", "world"), [("fsdp", 2), ("fsdp", 3), ("ddp", 2), ("hsdp", 4)])
def test_matrices_are_made_whole_once_each_and_with_the_same_bits(layout: str, world: int) -> None:
    reference = processes.alone(dealt, "single")
    assert reference[0][1] == len(SHAPES)
    ranks = processes.run(dealt, world, layout)
    assert sum(rank[0][1] for rank in ranks) == len(SHAPES), "each by one process"
    assert max(rank[0][1] for rank in ranks) == -(-len(SHAPES) // world), "dealt out evenly"
    for rank in ranks:
        for (mine, _), (whole, _) in zip(rank, reference, strict=True):
            assert np.array_equal(mine, whole)


# which matrices -----------------------------------------------------------------------------------------------------

HIDDEN = {
    f"blocks.{block}.{name}.weight"
    for block in (0, 1)
    for name in ("attention.query", "attention.key", "attention.value", "attention.out", "up", "down")
}


def of_muon(of: OptimizerGroup, model: nn.Module) -> set[str]:
    optimizer = build_optimizer(of, model, find_blocks(model))
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    held = {id(p) for part in parts if isinstance(part, Muon) for group in part.param_groups for p in group["params"]}
    everything = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(everything) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}


def test_muon_takes_the_matrices_of_blocks_and_nothing_else_not_even_their_embeddings() -> None:
    model = Transformer(0.0)
    assert of_muon(config("muon"), model) == HIDDEN
    for block in model.blocks:
        block.positions = nn.Embedding(5, 5)
    assert of_muon(config("muon"), model) == HIDDEN


def test_a_pattern_takes_matrices_away_from_muon_and_gives_it_others_but_no_bias() -> None:
    groups = [{"match": "blocks.0.*", "muon": False}, {"match": "embedding.*", "muon": True}]
    found = of_muon(config("muon", groups=groups), Transformer(0.0))
    assert found == {name for name in HIDDEN if "blocks.1" in name} | {"embedding.weight"}
    with pytest.raises(ConfigError, match=r"assigns 'blocks.0.up.bias' of shape \(64,\) to Muon"):
        of_muon(config("muon", groups=[{"match": "*.up.bias", "muon": True}]), Transformer(0.0))


def test_a_model_without_blocks_has_to_name_its_hidden_matrices() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match="no repeated blocks with matrices"):
        of_muon(config("muon"), model)
    assert of_muon(config("muon", groups=[{"match": "0.weight", "muon": True}]), model) == {"0.weight"}


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        ("lion", {"groups": [{"match": "*", "muon": False}]}, "belongs to optim=muon, but the optimizer is lion"),
        ("muon", {"lr": 0.02, "adjust_lr": "original"}, "give optim.rest.lr, too"),
        ("muon", {"rest": {"kind": "adamw", "decay_all": True}}, "optim.rest.decay_all has no effect"),
        ("muon", {"rest": {"kind": "adamw", "implementation": "loop"}}, "optim.rest.implementation has no effect"),
        ("muon", {"rest": {"kind": "adamw", "groups": [{"match": "*"}]}}, "optim.rest.groups has no effect"),
    ],
)
def test_settings_of_muon_and_of_its_rest_are_refused_where_they_do_not_belong(
    kind: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(told)):
        configuration(optim={"kind": kind, **values})


def test_it_is_told_what_updates_what() -> None:
    of, model = config("muon", lr=0.1, weight_decay=0.5, rest={"kind": "lion", "lr": 0.2}), Transformer(0.0)
    lines = describe_updates(of, build_optimizer(of, model, find_blocks(model)), model)
    start = "muon, lr 0.1, weight decay 0.5: 6,144 parameters in "
    assert (
        lines[0]
        == f"{start}{', '.join(f'blocks.*.attention.{n}.weight' for n in ('query', 'key', 'value', 'out'))} and 2 more"
    )
    names = [name for name, _ in model.named_parameters()]
    matrices = [name for name in names if name.startswith("blocks") and model.get_parameter(name).ndim == 2]
    patterns = find_patterns(matrices, names)
    matched = {name for name in names for one in patterns if fnmatchcase(name, one)}
    assert (len(patterns), matched) == (6, {*matrices}), "patterns match these and no other"
    assert {line.split(",")[0] for line in lines[1:]} == {"lion"}
    assert all("lr 0.2, weight decay 0:" in line for line in lines[1:])


# settings of the rest -----------------------------------------------------------------------------------------------


def test_the_rest_has_the_rate_and_the_decay_of_the_matrices_unless_it_is_given_its_own() -> None:
    found: Any = config("muon", lr=0.1, weight_decay=0.5)
    assert (found.rest.kind, found.rest.lr, found.rest.weight_decay) == ("adamw", 0.1, 0.5)
    found = config("muon", lr=0.1, weight_decay=0.5, rest={"kind": "adamw", "lr": 0.2, "weight_decay": 0.0})
    assert (found.rest.lr, found.rest.weight_decay) == (0.2, 0.0)


def test_schedules_reach_both_parts_in_proportion() -> None:
    of, model = config("muon", lr=0.1, weight_decay=0.5, rest={"kind": "adamw", "lr": 0.2}), Transformer(0.0)
    optimizer = build_optimizer(of, model, find_blocks(model))
    apply_schedule(optimizer, {"lr": 0.01, "weight_decay": 0.25}, of)
    found = {(group["muon"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {(True, 0.01, 0.25), (False, 0.02, 0.0)}
    (matrices,) = [part for part in optimizer.parts if isinstance(part, Muon)]  # type: ignore[attr-defined]
    assert matrices.param_groups[0]["lr"] == 0.01
