"""The same model in torch and in JAX: same weights and batch, so the same states, losses, gradients and next rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.recipes.puzzles.puzzles_for_tests import arrays_of, with_arrays
from unisono.recipes.puzzles.data.formats import maze_format, sudoku_format
from unisono.recipes.puzzles.model import act, scores
from unisono.recipes.puzzles.model.shape import Kind, places
from unisono.recipes.puzzles.model.torch_model import PuzzleModel
from unisono.recipes.puzzles.settings import Model, PuzzlesConfig, Weights

jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")

KINDS = {"sudoku": Kind(sudoku_format(4), 5), "maze": Kind(maze_format(3, 3), 2)}
CONFIG = PuzzlesConfig(weights=Weights(q_continue=0.3, consistency=0.1), halt_steps=3, halt_exploration=0.5)
ROWS, STEPS = 6, 4
SMALL = {"width": 16, "heads": 2, "prefix": 3, "embedding": 20, "inner_multiple": 8, "h_cycles": 3, "l_cycles": 2}


@pytest.fixture(autouse=True)
def in_fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with jax.enable_x64(True):
        yield
    torch.set_default_dtype(torch.float32)


def models(**settings: Any) -> tuple[PuzzleModel, Any]:
    """The same model twice, with weights that make every part count."""
    from unisono.recipes.puzzles.model.jax_model import PuzzleModel as JaxModel

    config = Model(**{**SMALL, **settings})
    torch.manual_seed(0)
    one = PuzzleModel(config, KINDS)
    for weight in (one.q_head.weight, *(parts.puzzles.weight for parts in one.kinds.values())):
        torch.nn.init.normal_(weight)
    torch.nn.init.zeros_(one.q_head.bias)
    arrays = {name: value.detach().numpy() for name, value in one.state_dict().items()}
    other = with_arrays(JaxModel(config, KINDS, jax.random.key(0)), arrays)
    assert arrays_of(other).keys() == arrays.keys()
    return one, other


def batches(kind: str = "sudoku") -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    length, vocabulary = KINDS[kind].format.length, KINDS[kind].format.vocabulary
    return [
        {
            "question": rng.integers(1, vocabulary, (ROWS, length)).astype(np.uint8),
            "answer": rng.integers(0, vocabulary, (ROWS, length)).astype(np.uint8),
            "identifier": rng.integers(0, KINDS[kind].embeddings, ROWS).astype(np.int32),
            "explore": rng.random(ROWS).astype(np.float32),
            "patience": rng.integers(2, CONFIG.halt_steps + 1, ROWS).astype(np.int32),
        }
        for _ in range(STEPS)
    ]


def step(model: Any, kind: str, carry: Any, batch: Any, stop: Any) -> tuple[Any, Any]:
    """The loss of a step, and what its rows carry on: the same words for both engines."""
    cycles = (model.config.h_cycles, model.config.l_cycles)
    rows = act.begin(carry, batch, model.starts)
    made = model(kind, rows, *cycles)
    later = model(kind, {**rows, **made.states}, *cycles)
    value = stop(act.continue_target(later.q, rows["steps"] + 1 >= CONFIG.halt_steps))
    outputs = {**made._asdict(), "value": value}
    terms, _, _ = scores.terms(CONFIG, outputs, rows["answer"], lambda array: array, training=True)
    weights = scores.term_weights(CONFIG)
    loss = sum(weights[name] * term.sum() for name, term in terms.items()) / ROWS
    halted = act.halt(rows, made.q, batch, CONFIG.halt_exploration, CONFIG.halt_steps, competing=True)
    return loss, {**{name: rows[name] for name in act.PUZZLE}, **made.states, **halted}


def with_torch(model: PuzzleModel, kind: str) -> list[tuple[float, dict[str, Any], dict[str, Any]]]:
    found, carry = [], None
    for arrays in batches(kind):
        batch = {name: torch.as_tensor(array) for name, array in arrays.items()}
        shape = (ROWS, places(KINDS[kind], model.config), model.config.width)
        carry = carry or act.first_carry(batch, {name: torch.zeros(shape) for name in act.STATES})
        model.zero_grad()
        loss, carry = step(model, kind, carry, batch, torch.Tensor.detach)
        loss.backward()
        carry = {name: value.detach() for name, value in carry.items()}
        gradients = {
            name: weight.grad.numpy().copy() for name, weight in model.named_parameters() if weight.grad is not None
        }
        found.append((loss.item(), gradients, {name: value.numpy() for name, value in carry.items()}))
    return found


def with_jax(model: Any, kind: str) -> list[tuple[float, dict[str, Any], dict[str, Any]]]:
    @eqx.filter_jit
    def both(model: Any, carry: Any, batch: Any) -> Any:
        return eqx.filter_value_and_grad(
            lambda one: step(one, kind, carry, batch, jax.lax.stop_gradient), has_aux=True
        )(model)

    found, carry = [], None
    for batch in batches(kind):
        shape = (ROWS, places(KINDS[kind], model.config), model.config.width)
        carry = carry or act.first_carry(
            jax.tree.map(jax.numpy.asarray, batch), {n: np.zeros(shape) for n in act.STATES}
        )
        (loss, carry), gradients = both(model, carry, jax.tree.map(jax.numpy.asarray, batch))
        found.append((float(loss), arrays_of(gradients), {name: np.asarray(value) for name, value in carry.items()}))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sudoku", {"mixer": "attention", "positions": "rope"}),
        ("maze", {"mixer": "mlp", "positions": "none"}),
        ("sudoku", {"mixer": "sparse", "positions": "learned", "nets": 2, "gradient": "step"}),
        ("maze", {"mixer": "attention", "positions": "learned", "gradient": "all"}),
    ],
    ids=["attention", "mlp", "sparse, two nets, one step", "whole gradient"],
)
def test_torch_and_jax_compute_the_same_losses_gradients_and_rows(kind: str, settings: dict[str, Any]) -> None:
    one, other = models(**settings)
    ours, theirs = with_torch(one, kind), with_jax(other, kind)
    used = {name for name, gradient in ours[0][1].items() if np.abs(gradient).max() > 0}
    other_kind = ({"sudoku", "maze"} - {kind}).pop()
    assert used == {name for name, _ in one.named_parameters() if other_kind not in name}
    assert len({loss for loss, _, _ in ours}) == STEPS
    assert len({tuple(carry["halted"]) for _, _, carry in ours}) > 1  # rows part ways
    for (loss, gradients, carry), (their_loss, their_gradients, their_carry) in zip(ours, theirs, strict=True):
        assert abs(loss - their_loss) < 1e-10
        for name in used:
            np.testing.assert_allclose(their_gradients[name], gradients[name], rtol=1e-10, atol=1e-10, err_msg=name)
        for name, value in carry.items():
            np.testing.assert_allclose(their_carry[name], value, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.slow
def test_the_starts_of_the_states_are_not_trained() -> None:
    one, other = models(mixer="mlp", positions="none")
    gradients = with_jax(other, "sudoku")[0][1]
    assert not gradients["answer_start"].any() and not gradients["latent_start"].any()
    assert not {"answer_start", "latent_start"} & {name for name, _ in one.named_parameters()}


@pytest.mark.slow
def test_both_engines_draw_initial_weights_of_the_same_spread() -> None:
    from unisono.recipes.puzzles.model.jax_model import PuzzleModel as JaxModel

    config = Model(width=64, heads=4, embedding=8)
    ours = {name: value.numpy() for name, value in PuzzleModel(config, KINDS).state_dict().items()}
    theirs = arrays_of(JaxModel(config, KINDS, jax.random.key(1)))
    for name, value in ours.items():
        if value.size > 500 and value.any():
            assert theirs[name].std() == pytest.approx(value.std(), rel=0.1), name
            assert np.abs(theirs[name]).max() == pytest.approx(np.abs(value).max(), rel=0.1), name
        else:
            assert theirs[name].shape == value.shape
