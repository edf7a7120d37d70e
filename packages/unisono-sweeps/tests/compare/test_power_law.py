"""Power-law fits find planted laws, and refuse what does not hold three parameters."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.runtime.errors import ConfigError
from unisono_sweeps.compare import power_law
from unisono_sweeps.compare.power_law import fit_power_law

pytest.importorskip("scipy")
X = np.repeat([64.0, 128.0, 256.0, 512.0, 1024.0], 3)


def law(noise: float, seed: int = 0) -> np.ndarray:
    return 1.7 + 8 * X**-0.4 + noise * np.random.default_rng(seed).standard_normal(len(X))


def test_planted_laws_lie_within_their_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 15 points, the bootstrap's intervals of 95 % hold 9 of 10 laws (docs/sweeps.md)."""
    monkeypatch.setattr(power_law, "_REPEATS", 100)
    fits = [power_law.fit_power_law(X, law(0.003, seed)) for seed in range(12)]
    for number, value in enumerate((1.7, 8, 0.4)):
        held = [low <= value <= high for low, high in (fit.intervals[number] for fit in fits)]
        assert sum(held) >= 8


def test_an_outlier_counts_for_less_than_by_least_squares() -> None:
    y = law(0.003)
    before = fit_power_law(X, y).c
    y[4] += 1.0
    squares = power_law._fit(X / 200, y, noise=1e9)  # with that much noise nothing is an outlier
    assert squares is not None
    assert abs(fit_power_law(X, y).c - before) < abs(squares[2] - before) / 3


def test_intervals_grow_with_the_noise() -> None:
    widths = [np.diff(fit_power_law(X, law(noise)).intervals[2])[0] for noise in (0.001, 0.01)]
    assert widths[1] > 3 * widths[0]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:9], law(0)[:9], "the runs have 3 different x"),
        (np.linspace(100, 200, 9), np.linspace(2, 1, 9), "spans only 100 to 200"),
        (X, np.random.default_rng(0).standard_normal(len(X)), "y does not fall as a power of x|do not hold three"),
        (X, X, "y does not fall as a power of x"),
        (X, -np.log(X), "y does not fall as a power of x"),
        (X, law(0.2), "the data do not hold three parameters|y does not fall"),
        (np.append(X, 0.0), np.append(law(0), 1.0), "needs x above 0"),
    ],
)
def test_data_that_do_not_hold_three_parameters_are_refused(x: np.ndarray, y: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_power_law(x, y)
