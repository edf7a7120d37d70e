"""The encoder: places, tokens, blocks in one scan, and what the probe and the decoder may not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter

import unisono_birdsong as birdsong
from recipes.birdsong.tests.small import shown, task
from unisono import Context
from unisono.config.schema.optimizers import Optimizer
from unisono.engines.jax.model import build_structure
from unisono.engines.jax.numerics.optimizers import build_optimizer
from unisono_birdsong.model.encoder import Encoder, patches_of
from unisono_birdsong.model.layers import Block, Turns, attention_scores, grid_turns, run_blocks
from unisono_birdsong.settings import EncoderSettings

RNG = np.random.default_rng(1)


def built(objective: str = "supervised", **changes: Any) -> Any:
    return eqx.filter_jit(task(objective, **changes).build)(jax.random.key(0))


def test_patches_are_numbered_along_the_frequency_first() -> None:
    clip = np.arange(8 * 6).reshape(8, 6)
    made = np.asarray(patches_of(jnp.asarray(clip), (4, 3)))
    assert made.shape == (4, 12)
    np.testing.assert_array_equal(made[1], clip[:4, 3:].ravel())
    np.testing.assert_array_equal(made[2], clip[4:, :3].ravel())


def test_rotary_places_are_relative_in_time_and_frequency() -> None:
    """Scores of turned queries and keys depend on the difference of places alone, in both directions."""
    turns = Turns(*grid_turns((4, 3), 8, 100.0, 2))
    query, key = (np.tile(RNG.standard_normal((1, 1, 8)).astype(np.float32), (14, 1, 1)) for _ in range(2))
    scores = np.einsum("tnh,snh->ts", turns(jnp.asarray(query)), turns(jnp.asarray(key)))
    plain = float((query[0] * key[0]).sum())
    np.testing.assert_allclose(scores[:2, :2], plain, rtol=1e-5)  # tokens without a place
    grid = scores[2:, 2:].reshape(4, 3, 4, 3)
    np.testing.assert_allclose(grid[0, 0, 1, 2], grid[2, 0, 3, 2], rtol=1e-4)
    assert abs(grid[0, 0, 1, 0] - grid[0, 0, 0, 1]) > 1e-3
    assert abs(grid[0, 0, 0, 1] - grid[0, 1, 0, 0]) > 1e-3


@pytest.mark.parametrize("k", [1, 2])
def test_blocks_in_a_scan_are_blocks_one_after_another(k: int) -> None:
    """With checkpointing of every k-th: a turn of the scan is one block, or two with one left over."""

    def both(key: Any, x: Any) -> tuple[Any, Any]:
        blocks = [Block(8, 2, 2.0, gated=False, qk_norm=False, scale=None, key=one) for one in jax.random.split(key, 3)]
        wrapped = [eqx.filter_checkpoint(block) if n % k == 0 else block for n, block in enumerate(blocks)]
        scanned = run_blocks(wrapped, x, None)
        for block in blocks:
            x = block(x, None)
        return x, scanned

    x = RNG.standard_normal((5, 8)).astype(np.float32)
    expected, found = jax.jit(both)(jax.random.key(0), x)
    assert float(jnp.abs(expected - x).max()) > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def pixio() -> Any:
    return built("pixio")


def test_the_masked_autoencoder_sees_what_is_visible_alone(pixio: Any) -> None:
    batch = shown(task("pixio"), range(2))
    encoder, order = pixio.encoder, batch["order"]
    look = eqx.filter_jit(lambda batch: pixio.objective(encoder, batch))
    errors, embeddings = look(batch)
    assert batch["order"].shape == (2, 8) and float(jnp.abs(errors["reconstruction"]).min()) > 0
    # Sound in hidden patches alone changes what is to be told, and nothing that is seen.
    hidden = np.zeros((2, 8), bool)
    np.put_along_axis(hidden, order[:, 2:], True, axis=1)
    louder = batch["clip"] + np.kron(hidden.reshape(2, 4, 2), np.ones((8, 8))) * RNG.standard_normal((2, 32, 16))
    other, seen = look({**batch, "clip": louder.astype(np.float32)})
    np.testing.assert_allclose(seen, embeddings, atol=1e-6)
    assert float(jnp.abs(other["reconstruction"] - errors["reconstruction"]).min()) > 1e-3
    # Patches know their places by the order, so another order of the same parts changes nothing.
    turned = np.concatenate([order[:, :2][:, ::-1], order[:, 2:][:, ::-1]], axis=1)
    again, _ = look({**batch, "order": turned})
    np.testing.assert_allclose(again["reconstruction"], errors["reconstruction"], rtol=1e-5)


def test_the_probe_teaches_the_encoder_nothing() -> None:
    one = task(model={"depth": 1})
    batch, key = shown(one, range(3)), jax.random.key(0)

    def loss(arrays: Any, rest: Any) -> Any:
        context = Context(0, True, key=key, valid=jnp.ones(3, bool))
        return one.loss(one.outputs(eqx.combine(arrays, rest), batch, context), batch, context).sums["probe"].sum()

    def largest(key: Any) -> dict[str, Any]:
        made = jax.grad(loss)(*eqx.partition(one.build(key), eqx.is_inexact_array))
        parts = {name: jax.tree.leaves(getattr(made, name)) for name in ("encoder", "objective", "probe")}
        return {name: jnp.stack([jnp.abs(leaf).max() for leaf in leaves]).max() for name, leaves in parts.items()}

    found = jax.jit(largest)(key)
    assert float(found["encoder"]) == float(found["objective"]) == 0 < float(found["probe"])


@pytest.mark.parametrize(("name", "least", "most"), [("small", 21e6, 23e6), ("base", 84e6, 88e6), ("fine", 21e6, 23e6)])
def test_the_encoders_of_the_configuration_have_their_sizes(name: str, least: float, most: float) -> None:
    folder = Path(birdsong.__file__).parent / "config" / "model"
    settings = EncoderSettings.model_validate(yaml.safe_load((folder / f"{name}.yaml").read_text()))
    shapes = jax.eval_shape(lambda key: eqx.filter(Encoder(settings, key), eqx.is_array), jax.random.key(0))
    assert least < sum(leaf.size for leaf in jax.tree.leaves(shapes)) < most
    assert settings.pipeline().shape == (settings.frames, settings.mels)


def test_muon_takes_the_matrices_of_blocks_and_nothing_else_than_matrices_decays() -> None:
    structure = build_structure(task("pixio"), seed=0)
    muon = {"kind": "muon", "lr": 0.01, "weight_decay": 0.1}
    optimizer = build_optimizer(TypeAdapter(Optimizer).validate_python(muon), structure)
    taken = {name for name, chosen in optimizer.chosen.items() if chosen.muon}
    matrices = {name for name in optimizer.chosen if ".blocks." in name and name.endswith(".weight")}
    assert taken == {name for name in matrices if "norm" not in name} != set()
    assert {name.split(".")[0] for name in taken} == {"encoder", "objective"}
    for name, chosen in optimizer.chosen.items():
        kept = any(word in name for word in ("norm", "bias", "token", "registers", "scale"))
        assert (chosen.decay == 0) == kept, name


@pytest.mark.parametrize("objective", ["supervised", "lejepa", "pixio"])
def test_in_bf16_losses_are_fp32(objective: str) -> None:
    one = task(objective)
    batch = {name: jnp.asarray(value) for name, value in shown(one, range(2)).items()}

    def outputs(key: Any) -> Any:
        model, made = jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, (one.build(key), batch)
        )
        return one.outputs(model, made, Context(0, True, key=key, valid=jnp.ones(2, bool)))

    found = jax.eval_shape(outputs, jax.random.key(0))
    losses = found.keys() & {"classes", "probe", "reconstruction"}
    assert losses and all(found[name].dtype == jnp.float32 for name in losses)
    assert found["embedding"].dtype == jnp.bfloat16


def test_gradients_of_scores_are_those_of_the_plain_product() -> None:
    one, other, weight = (RNG.normal(size=shape) for shape in ((5, 2, 4), (5, 2, 4), (2, 5, 5)))

    def plain(query: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.einsum("tnh,snh->nts", query, key)

    with jax.enable_x64(True):
        mine, expected = (
            jax.grad(lambda q, k, f=f: (f(q, k) * weight).sum(), (0, 1))(jnp.asarray(one), jnp.asarray(other))
            for f in (attention_scores, plain)
        )
        for gradient, wanted in zip(mine, expected, strict=True):
            assert gradient.dtype == jnp.float64
            np.testing.assert_allclose(gradient, wanted, rtol=1e-13)
