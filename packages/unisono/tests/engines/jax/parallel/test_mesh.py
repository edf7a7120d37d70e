"""The sums of gradients over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from unisono.engines.jax.parallel import mesh


def test_the_gradient_of_a_product_is_summed_before_it_is_transposed() -> None:
    """XLA for CPU is slow at a transpose that it has folded into a product."""
    grid = mesh.Grid(Mesh(np.array(jax.devices()[:2]).reshape(2, 1), mesh.DEVICES))
    random = np.random.default_rng(0)
    weights = {"left": random.normal(size=(3, 5)), "right": random.normal(size=(5, 7)), "scale": random.normal(size=7)}
    rows = random.normal(size=(1, 2, 4, 5))

    def loss(weights: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
        return jnp.square((rows @ weights["right"]) * weights["scale"]).sum() + jnp.cos(weights["left"] @ rows.T).sum()

    def on_device(weights: dict[str, jax.Array], rows: jax.Array) -> dict[str, jax.Array]:
        (gradients,), transposed = mesh.find_transposed_products(lambda: (jax.grad(loss)(weights, rows[0, 0]),))
        assert transposed == {"right"}
        specs = dict.fromkeys(gradients, PartitionSpec())
        return mesh.sum_gradients(gradients, specs, jnp.zeros((1, 1)), transposed)[0]

    summed = jax.jit(grid.per_device(on_device, (PartitionSpec(), mesh.BATCH), PartitionSpec()))
    expected = jax.grad(lambda weights: loss(weights, rows[0, 0]) + loss(weights, rows[0, 1]))(weights)
    assert min(np.abs(gradient).max() for gradient in expected.values()) > 0.1
    for name, gradient in summed(weights, rows).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5)


def test_a_backward_pass_gathers_parameters_again_and_keeps_no_whole_one() -> None:
    """Neither a whole parameter nor a view of it is among what the forward pass leaves to the backward pass."""
    grid = mesh.Grid(AbstractMesh((1, 8), mesh.DEVICES))
    cut, size = PartitionSpec(mesh.SHARD), 64

    def loss(weights: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
        left, right = (mesh.gather(weights[name], cut, jnp.float32) for name in ("left", "right"))
        return jnp.square(jnp.tanh(rows @ left) @ right.T).sum()

    def on_device(weights: dict[str, jax.Array], rows: jax.Array) -> dict[str, jax.Array]:
        return jax.grad(mesh.regather_in_backward(loss))(weights, rows)

    specs = dict.fromkeys(("left", "right"), cut)
    function = grid.per_device(on_device, (specs, PartitionSpec()), specs)
    weight = jax.ShapeDtypeStruct((size, size), jnp.float32)
    traced = jax.make_jaxpr(function)({"left": weight, "right": weight}, jax.ShapeDtypeStruct((4, size), jnp.float32))
    body = traced.jaxpr.eqns[0].params["jaxpr"]
    (backward,) = (equation for equation in body.eqns if equation.primitive.name == "remat2")
    assert (size, size) not in [variable.aval.shape for variable in backward.invars]
    inner = [equation.primitive.name for equation in backward.params["jaxpr"].eqns]
    assert inner.count("all_gather") == 1, "the first product needs no gradient of its rows"
    assert inner.count("reduce_scatter") == 2
