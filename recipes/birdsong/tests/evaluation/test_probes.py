"""Probes: the linear one is scikit-learn's optimum; what is chosen is chosen on whole groups of training rows."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")
linear_model = pytest.importorskip("sklearn.linear_model")

from unisono import DataError  # noqa: E402
from unisono_birdsong.evaluation import metrics, probes  # noqa: E402


def blobs(rows: int, classes: int = 3, width: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    label = np.arange(rows) % classes
    centres = np.random.default_rng(99).normal(size=(classes, width))
    x = centres[label] + rng.normal(size=(rows, width))
    return x, np.eye(classes, dtype=bool)[label], [f"bird {n % (rows // 3)}" for n in range(rows)]


def test_linear_probe_is_the_optimum_that_scikit_learn_finds() -> None:
    x, truth, groups = blobs(60)
    probe = probes.fit("linear", x, truth, groups)
    standard = (x - x.mean(0)) / x.std(0)
    theirs = linear_model.LogisticRegression(C=1 / (60 * probe.decay), tol=1e-10, max_iter=5000)
    theirs.fit(standard, truth.argmax(1))
    other = blobs(50, seed=1)[0]
    ours = np.exp(probe.scores(other))
    np.testing.assert_allclose(
        ours / ours.sum(1, keepdims=True), theirs.predict_proba((other - x.mean(0)) / x.std(0)), atol=2e-4
    )


@pytest.mark.parametrize("kind", probes.KINDS)
def test_a_probe_learns_classes_and_repeats_exactly(kind: probes.Kind) -> None:
    x, truth, groups = blobs(90)
    other, other_truth, _ = blobs(60, seed=1)
    probe = probes.fit(kind, x, truth, groups, seed=3)
    scores = probe.scores(other)
    assert metrics.evaluate(scores, other_truth, resamples=0)["cmap"].value > 0.6 > 1 / 3
    np.testing.assert_array_equal(scores, probes.fit(kind, x, truth, groups, seed=3).scores(other))


@pytest.mark.slow
def test_mlp_separates_what_no_line_does() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    truth = np.stack([x.prod(1) > 0, x.prod(1) <= 0], axis=1)
    groups = [str(n) for n in range(200)]
    accuracy = {
        kind: metrics.evaluate(probes.fit(kind, x[:140], truth[:140], groups[:140]).scores(x[140:]), truth[140:],
                               resamples=0)["top1"].value
        for kind in ("linear", "mlp")
    }  # fmt: skip
    assert accuracy["mlp"] > 0.9
    assert accuracy["linear"] < 0.75


def test_rows_with_several_classes_or_none_are_fitted_by_the_asymmetric_loss() -> None:
    x, single, groups = blobs(120)
    truth = single.copy()
    truth[single[:, 0], 1] = True  # where the first bird sings, so does the second
    truth[:6] = False
    fitted = probes.fit("linear", x, truth, groups)
    same = probes.fit("linear", x, truth, groups, objective="asymmetric")
    np.testing.assert_array_equal(fitted.scores(x), same.scores(x))
    assert metrics.evaluate(fitted.scores(x), truth, resamples=0)["cmap"].value > 0.8


def test_held_out_rows_have_no_say_and_classes_without_training_rows_no_scores() -> None:
    x, truth, groups = blobs(60)
    wide = np.concatenate([truth[:, :1], np.zeros((60, 1), dtype=bool), truth[:, 1:]], axis=1)
    probe = probes.fit("linear", x, wide, groups)
    assert probe.classes.tolist() == [0, 2, 3]
    assert probe.scores(x).shape == (60, 3)
    with pytest.raises(DataError, match="at least 2 classes, and there are 1"):
        probes.fit("linear", x, wide[:, :2], groups)


@pytest.mark.parametrize("count", range(1, 12))
def test_a_decay_is_chosen_for_every_seed_however_few_groups_there_are(count: int) -> None:
    x, truth, _ = blobs(3 * count)
    groups = [f"bird {n // 3}" for n in range(3 * count)]
    for seed in range(6):
        assert probes._choose_decay("linear", x[:, :2], truth, groups, "cross_entropy", seed) in (*probes.DECAYS, 1e-2)
