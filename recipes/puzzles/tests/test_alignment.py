"""The JAX model pads its places to what fast 16-bit products need, and the padding changes no number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from recipes.puzzles.tests.puzzles_for_tests import SUDOKU4
from unisono_puzzles.model.shape import Kind, places
from unisono_puzzles.settings import Model

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'unisono[jax]'")
pytest.importorskip("equinox", reason="equinox is not installed: pip install 'unisono[jax]'")

KINDS = {"sudoku": Kind(SUDOKU4, 1)}
CONFIG = Model(
    mixer="mlp", positions="none", width=32, heads=4, prefix=3, embedding=32, inner_multiple=8, h_cycles=2, l_cycles=2
)
ROWS = 4


def model_and_rows(dtype: Any) -> tuple[Any, dict[str, Any]]:
    import equinox as eqx
    import jax.numpy as jnp

    from unisono_puzzles.model.jax_model import PuzzleModel

    model = eqx.filter_jit(lambda: PuzzleModel(CONFIG, KINDS, jax.random.key(0)))()
    model = jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, model)
    rng, length = np.random.default_rng(0), places(KINDS["sudoku"], CONFIG)
    assert length % 8, "nothing to pad"
    states = {name: jnp.asarray(rng.normal(size=(ROWS, length, CONFIG.width)), dtype) for name in model.starts}
    question = jnp.asarray(rng.integers(1, 6, size=(ROWS, SUDOKU4.length)))
    return model, {**states, "question": question, "identifier": jnp.zeros(ROWS, jnp.int32)}


def loss_of(model: Any, rows: dict[str, Any]) -> Any:
    """A number that depends on all that a step returns, and the step's outputs."""
    step = model("sudoku", rows, 2, 2)
    parts = (step.answer_state, step.latent_state, step.logits, step.q, step.change)
    return sum(jax.numpy.square(part.astype(float)).sum() for part in parts), parts


def results(monkeypatch: pytest.MonkeyPatch, alignment: int, dtype: Any, always: bool = False) -> list[np.ndarray]:
    """Outputs of a step and gradients of all weights."""
    import equinox as eqx

    from unisono_puzzles.model import jax_model

    monkeypatch.setattr(jax_model, "ALIGNMENT", alignment)
    if always:
        monkeypatch.setattr(
            jax_model,
            "_pad_places",
            lambda x, config: jax.numpy.pad(x, ((0, 0), (0, -x.shape[1] % alignment), (0, 0))),
        )
    model, rows = model_and_rows(dtype)
    gradients, parts = eqx.filter_jit(eqx.filter_grad(loss_of, has_aux=True))(model, rows)
    found = [*parts, *jax.tree.leaves(eqx.filter(gradients, eqx.is_inexact_array))]
    return [np.asarray(array, dtype=np.float64) for array in found]


def test_padded_places_change_outputs_and_gradients_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where a number that leaks into the places would be seen in the first digits."""
    with jax.enable_x64(True):
        plain, padded = (results(monkeypatch, alignment, np.float64, always=True) for alignment in (1, 8))
    assert [one.shape for one in padded] == [one.shape for one in plain]
    for one, other in zip(padded, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9 * np.abs(other).max())
    assert sum(np.abs(one).sum() > 0 for one in plain[5:]) > 5, "no gradient"


def products(jaxpr: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Shapes and dtype of the operands of every product of a program, in loops and branches too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            one, other = (variable.aval for variable in equation.invars)
            yield one.shape, other.shape, str(one.dtype)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from products(inner)


@pytest.mark.parametrize("bits", [16, 32])
def test_in_16_bits_every_product_over_places_is_one_over_a_multiple_of_eight(bits: int) -> None:
    import equinox as eqx
    import jax.numpy as jnp

    model, rows = model_and_rows(jnp.bfloat16 if bits == 16 else jnp.float32)
    length = places(KINDS["sudoku"], CONFIG)
    lowered = eqx.filter_make_jaxpr(eqx.filter_grad(loss_of, has_aux=True))(model, rows)[0]
    found = list(products(lowered.jaxpr))
    assert len(found) > 20
    assert {dtype for *_, dtype in found} == {"bfloat16" if bits == 16 else "float32"}
    over_places = [shape for *shapes, _ in found for shape in shapes if shape[0] != ROWS and length in shape]
    padded = [shape for *shapes, _ in found for shape in shapes if length + -length % 8 in shape]
    assert not over_places and padded if bits == 16 else over_places and not padded


def test_a_gated_product_keeps_gate_and_up_for_its_backward_pass_and_nothing_else_of_their_size() -> None:
    """The whole step of the published MLP then needs about half of the memory and a fifth less traffic."""
    from unisono_puzzles.model.jax_model import SwiGLU

    rows, features = 6, 16
    layer = SwiGLU(features, CONFIG, jax.random.key(0))
    inner = layer.down.weight.shape[1]
    _, pull = jax.vjp(lambda layer, x: layer(x), layer, jax.numpy.ones((rows, features)))
    kept = [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.shape[:1] == (rows,)]
    assert [shape for shape in kept if shape[-1] >= inner] == [(rows, inner)] * 2
