"""The losses against NumPy, and what belongs to a row stays with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono_birdsong.objectives.collapse import CollapseWarning, spread_and_rank
from unisono_birdsong.objectives.lejepa import Lejepa, invariance, sigreg
from unisono_birdsong.objectives.pixio import targets
from unisono_birdsong.objectives.supervised import asymmetric, cross_entropy
from unisono_birdsong.settings import Asymmetric, LeJepa

RNG = np.random.default_rng(0)


def by_numpy(projected: np.ndarray, directions: np.ndarray, knots: int, reach: float) -> float:
    """SIGReg, written as the published torch code has it."""
    t = np.linspace(0, reach, knots)
    weights = np.full(knots, 2 * reach / (knots - 1))
    weights[[0, -1]] = reach / (knots - 1)
    window = np.exp(-(t**2) / 2)
    found = []
    for view in projected.swapaxes(0, 1):
        for direction in directions.T:
            x = (view @ direction)[:, None] * t
            err = (np.cos(x).mean(0) - window) ** 2 + np.sin(x).mean(0) ** 2
            found.append((err * weights * window).sum() * len(view))
    return float(np.mean(found))


def test_sigreg_is_the_published_statistic() -> None:
    settings, key = LeJepa(directions=7), jax.random.key(3)
    projected = RNG.standard_normal((9, 2, 5)).astype(np.float32) * 1.5
    directions = np.array(jax.random.normal(key, (5, 7)))
    directions /= np.linalg.norm(directions, axis=0)
    found = sigreg(jnp.asarray(projected), key, settings)
    assert float(found) == pytest.approx(by_numpy(projected, directions, 17, 3.0), rel=1e-5)


def test_sigreg_is_small_for_a_normal_and_of_the_whole_batch() -> None:
    settings, key = LeJepa(directions=16), jax.random.key(0)
    normal = jnp.asarray(RNG.standard_normal((256, 2, 4)), jnp.float32)
    statistic = jax.jit(lambda x: sigreg(x, key, settings))
    whole = float(statistic(normal))
    assert whole < 3 < float(statistic(0 * normal)) / 10  # collapsed
    halves = [float(statistic(half)) for half in jnp.split(normal, 2)]
    assert abs(np.mean(halves) / whole - 1) > 0.05  # a mean over parts is another number


def test_views_that_agree_cost_nothing() -> None:
    projected = RNG.standard_normal((3, 4, 5))
    expected = ((projected - projected.mean(1, keepdims=True)) ** 2).mean((1, 2))
    np.testing.assert_allclose(invariance(jnp.asarray(projected, jnp.float32)), expected, rtol=1e-5)
    assert float(invariance(jnp.ones((3, 4, 5)) * jnp.arange(3.0)[:, None, None]).max()) == 0


class Means:
    """In place of an encoder: the mean spectrum of what it is given."""

    def embedding(self, spectrogram: Any) -> Any:
        return spectrogram.mean(axis=0)


def test_views_belong_to_their_sample() -> None:
    """Three samples of four views; a reshape that mixes the axes could not tell two of two."""
    batch = RNG.standard_normal((3, 4, 6, 8)).astype(np.float32) * 0.01
    batch += np.arange(3, dtype=np.float32)[:, None, None, None] * np.arange(8)  # samples differ more than views do
    objective = jax.jit(lambda key: Lejepa(8, LeJepa(hidden=12, width=5), key))(jax.random.key(1))
    look = jax.jit(lambda views: objective(Means(), {"views": views}))
    rows, embeddings = look(batch)
    np.testing.assert_allclose(embeddings, batch.mean(axis=2), rtol=1e-5)
    copies = [look(np.repeat(batch[n : n + 1], 3, axis=0)).rows["projected"][:1] for n in range(3)]
    together = np.concatenate([np.asarray(each) for each in copies])
    np.testing.assert_allclose(rows["projected"], together, rtol=1e-5, atol=1e-6)
    right = np.asarray(rows["projected"])
    mixed = right.reshape(12, 5).reshape(4, 3, 5).swapaxes(0, 1)  # the defect of the original
    assert float(invariance(jnp.asarray(mixed)).mean()) > 10 * float(invariance(rows["projected"]).mean())


def test_cross_entropy_leaves_out_unknown_labels() -> None:
    logits, labels = RNG.standard_normal((4, 3)), np.array([2, -1, 0, 1])
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = np.where(labels < 0, 0, -np.log(p[np.arange(4), labels]))
    found = cross_entropy(jnp.asarray(logits, jnp.float32), jnp.asarray(labels))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_the_asymmetric_loss_is_the_published_one(clip: float) -> None:
    logits, labels = RNG.standard_normal((5, 4)) * 3, RNG.integers(0, 2, (5, 4))
    p = 1 / (1 + np.exp(-logits))
    shifted = np.maximum(p - clip, 0)
    every = np.where(labels, (1 - p) * -np.log(p), shifted**4 * -np.log(1 - shifted))
    settings = Asymmetric(clip=clip)
    found = jax.jit(lambda x: asymmetric(x, jnp.asarray(labels), settings))(np.float32(logits))
    np.testing.assert_allclose(found, every.sum(1), rtol=2e-4)
    gradient = jax.jit(jax.grad(lambda x: asymmetric(x, jnp.asarray(labels), settings).sum()))
    assert np.isfinite(gradient(jnp.full((5, 4), -80.0))).all()
    assert np.isfinite(gradient(jnp.full((5, 4), 80.0))).all()


def test_targets_are_normalised_patch_by_patch() -> None:
    made = np.asarray(targets(jnp.asarray(RNG.standard_normal((6, 40)) * 5 + 3, jnp.float32)))
    np.testing.assert_allclose(made.mean(1), 0, atol=1e-5)
    np.testing.assert_allclose(made.var(1), 1, rtol=1e-3)
    assert np.isfinite(targets(jnp.ones((2, 4)))).all()  # silence


def test_collapse_is_seen() -> None:
    measured = jax.jit(spread_and_rank)
    spread, rank = measured(jnp.ones((8, 4)) * 3)
    assert float(spread) == float(rank) == 0
    wide = RNG.standard_normal((4000, 6)).astype(np.float32)
    spread, rank = measured(wide)
    assert float(spread) == pytest.approx(1, abs=0.01) and float(rank) == pytest.approx(6, abs=0.1)
    line = jnp.asarray(wide[:8, :1] * np.ones((1, 20), np.float32))  # fewer rows than features, one direction
    assert float(measured(line)[1]) == pytest.approx(1, rel=1e-4)
    values = np.linalg.eigvalsh(np.cov(wide[:5].T))
    expected = values.sum() ** 2 / (values**2).sum()
    assert float(measured(wide[:5])[1]) == pytest.approx(expected, rel=1e-4)


def test_a_collapse_is_warned_of_once_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    watch = CollapseWarning()
    watch.on_evaluation(5, {"embedding_spread": 0.4, "embedding_rank": 7.0})
    watch.on_evaluation(6, {"loss": 1.0})
    assert not caplog.records
    watch.on_evaluation(7, {"embedding_spread": 0.002, "embedding_rank": 1.2})
    assert "after step 7 the embeddings of held-out recordings are nearly the same" in caplog.text
