"""The recipe's tasks for torch and for JAX, on their engines: the same weights and rows give the same run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import unisono
from packages.unisono.tests.runs import Trace, assert_same, distance
from packages.unisono.tests.runs import trace as torch_trace
from recipes.puzzles.tests import test_task as of_torch
from recipes.puzzles.tests.puzzles_for_tests import SUDOKU4, arrays_of, with_arrays
from unisono.config.code.recipes import resolve_reference
from unisono.optim.schedules import ScheduledScalars
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.task import SampleContext
from unisono.task_config import find_task
from unisono_puzzles.model.shape import Kind
from unisono_puzzles.model.torch_model import PuzzleModel
from unisono_puzzles.settings import Model

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'unisono[jax]'")
pytest.importorskip("equinox", reason="equinox is not installed: pip install 'unisono[jax]'")

ACROSS, WITHIN = 1e-10, 1e-12
STEPS = 10
WEIGHTS = {"q_continue": 0.5, "consistency": 0.1}
VARIANTS: dict[str, dict[str, Any]] = {
    "mlp": {"mixer": "mlp", "positions": "none"},
    "attention": {"mixer": "attention", "positions": "rope", "nets": 2, "gradient": "step"},
    "sparse": {"mixer": "sparse", "positions": "learned", "gradient": "all"},
}


def weights_of(task: Any) -> dict[str, np.ndarray]:
    """First weights that make every part count and halt about half of the rows, by the names that both engines have."""
    torch.manual_seed(0)
    model = task.build()
    torch.nn.init.zeros_(model.q_head.bias)
    for weight in (model.q_head.weight, *(parts.puzzles.weight for parts in model.kinds.values())):
        torch.nn.init.normal_(weight, std=0.3)
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def pair(model: dict[str, Any], last_bit: bool = False, data: Any = None, **config: Any) -> tuple[Any, Any]:
    """The tasks of both engines, with the same first weights in fp32, or those changed in their last bit."""
    from unisono_puzzles.jax_task import Puzzles as OfJax

    mine = of_torch.task(model, data, weights=WEIGHTS, **config)
    arrays, build = weights_of(mine), mine.build
    if last_bit:
        arrays = {name: np.nextafter(value, np.float32(np.inf)) for name, value in arrays.items()}

    def loaded() -> Any:
        made = build()
        made.load_state_dict({name: torch.as_tensor(value.copy()) for name, value in arrays.items()})
        return made

    mine.build = loaded
    other = OfJax(mine.config, model=mine.model_config, data=mine.data_config)
    drawn = other.build
    other.build = lambda key: with_arrays(drawn(key), arrays)  # type: ignore[method-assign]
    other.setup()
    return mine, other


def config(engine: str, mixture: Any = None, **layout: Any) -> Any:
    made = of_torch.run_config(mixture, **layout)
    train = made.train.model_copy(update={"steps": STEPS})
    chosen = type(made.layout).model_validate({**made.layout.model_dump(), "engine": engine, **layout})
    return made.model_copy(update={"train": train, "layout": chosen})


def jax_trace(task: Any, mixture: Any = None, **layout: Any) -> Trace:
    from packages.unisono.tests.jax_runs import trace

    return trace(task, config("jax", mixture, **{"devices": 1, "threads": None, **layout}))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_steps_of_both_engines_are_the_same_run(variant: str) -> None:
    """Carry, halting, scheduled depth, the moving average, Adam-atan2, sign SGD of puzzle embeddings, an evaluation."""
    mine, other = pair(VARIANTS[variant])
    one = torch_trace(ProcessInfo(), SingleProcess(), mine, config("torch"))
    assert len(set(one.losses)) == STEPS and min(one.norms) > 1e-3
    assert all(gradient.any() for gradient in one.gradients.values())
    assert 0 < one.metrics[4]["examples_learnt"] < 5  # some rows have halted, and some have not
    assert max(distance(one.parameters, one.before).values()) > 1e-3
    assert one.average and all(not np.array_equal(value, one.parameters[name]) for name, value in one.average.items())
    many = jax_trace(other)
    assert_same(many, one, ACROSS, norms=ACROSS)
    assert [told for told in many.recompiled if told] == ["the step: h_cycles is 2, and was 1"]
    scalars = ScheduledScalars(config("jax"), STEPS)  # what a start reports of it
    assert scalars.step_programs(other.static_scalars) == {"compilations of the step": "2 (h_cycles=1; h_cycles=2)"}
    assert scalars.step_programs(mine.static_scalars) == {}  # torch compiles none


@pytest.mark.slow
def test_every_jax_layout_computes_what_one_device_computes() -> None:
    """Norms of the last steps are held to 8 times what a change of the weights' last bit moves them by."""
    one = jax_trace(pair(VARIANTS["mlp"])[1], micro_batch=12)
    assert len(set(one.losses)) == STEPS and all(gradient.any() for gradient in one.gradients.values())
    moved = jax_trace(pair(VARIANTS["mlp"], last_bit=True)[1], micro_batch=12)
    change = np.abs(np.divide(moved.norms, one.norms) - 1).max()
    assert 0 < change < 1e-2  # in proportion to that of the weights: the last bit of fp64 is 2^-29 of that of fp32
    rounding = change * 2.0**-29
    for layout in (
        {"micro_batch": 3},
        {"micro_batch": 12, "activation_checkpointing": 1},
        {"devices": 2, "strategy": "ddp"},
        {"devices": 2, "strategy": "fsdp", "micro_batch": 3},
    ):
        many = jax_trace(pair(VARIANTS["mlp"])[1], **layout)
        assert_same(many, one, WITHIN, norms=max(WITHIN, 8 * rounding))


def test_the_engine_of_the_layout_chooses_the_task_and_both_make_the_same_batches() -> None:
    assert resolve_reference("puzzles") == resolve_reference("puzzles", "torch") != resolve_reference("puzzles", "jax")
    ones, others = (find_task("puzzles", engine) for engine in ("torch", "jax"))
    assert (ones.engine, others.engine) == ("torch", "jax")
    made = [
        kind(of_torch.task().config, model=of_torch.task().model_config, data=of_torch.task().data_config)
        for kind in (ones, others)
    ]
    batches = []
    for task in made:
        task.setup()
        rows = [task.sample(task.data()[row], SampleContext(np.random.default_rng(row), True)) for row in range(4)]
        batches.append(task.collate(rows))
    held_out = made[1].collate([made[1].sample(made[1].held_out()[0], SampleContext(np.random.default_rng(0), False))])
    assert batches[0].keys() == batches[1].keys() >= held_out.keys()
    assert all(np.array_equal(batches[0][name], batches[1][name]) for name in batches[0])


@pytest.mark.slow
def test_several_kinds_are_the_same_run_in_both_engines_and_on_jax_devices() -> None:
    """A JAX step is compiled once for micro-batches of all kinds, and each computes what its kind needs."""
    mine, other = pair(VARIANTS["attention"], data=of_torch.SEVERAL)
    mixture = mine.data_config.mixture
    one = torch_trace(ProcessInfo(), SingleProcess(), mine, config("torch", mixture=mixture, micro_batch=3))
    assert len(set(one.losses)) == STEPS and all(gradient.any() for gradient in one.gradients.values())
    many = jax_trace(other, mixture=mixture, micro_batch=3)
    assert_same(many, one, ACROSS, norms=ACROSS)
    assert [told for told in many.recompiled if told] == ["the step: h_cycles is 2, and was 1"]
    divided = jax_trace(other, mixture=mixture, micro_batch=3, devices=2, strategy="fsdp")
    assert_same(divided, many, WITHIN, norms=WITHIN)


@pytest.mark.slow
def test_both_engines_draw_initial_weights_of_the_same_spread() -> None:
    from unisono_puzzles.model.jax_model import PuzzleModel as JaxModel

    config, kinds = Model(width=64, heads=4, embedding=8), {"sudoku": Kind(SUDOKU4, 5)}
    theirs = arrays_of(JaxModel(config, kinds, jax.random.key(1)))
    # Two draws of 500 numbers differ by some 5 % in their spread, and all are cut off at the same largest one.
    for name, value in PuzzleModel(config, kinds).state_dict().items():
        if value.numel() > 500 and value.any():
            assert theirs[name].std() == pytest.approx(float(value.std(correction=0)), rel=0.1), name
            assert np.abs(theirs[name]).max() == pytest.approx(float(value.abs().max()), rel=0.1), name
        else:
            assert theirs[name].shape == value.shape


@pytest.mark.slow
def test_the_puzzles_of_both_engines_are_the_same_run() -> None:
    small = ["data.side=4", "data.clues=[6,8]", "data.puzzles=64", "data.held_out=8", "task.halt_steps=3"]
    proved = unisono.prove("puzzles", ["engines=[torch,jax]", "shrink=always", "steps=4", *small])
    assert proved.passed, proved
    (verdict,) = proved.verdicts
    assert {one.quantity for one in verdict.compared if one.mark == "PASS"} >= {"raw gradients", "parameters", "EMA"}
