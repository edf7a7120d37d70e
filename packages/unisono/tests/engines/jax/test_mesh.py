"""The sums of gradients over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

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
