"""Power laws through measurements: y = a + b · x^−c, by robust least squares, with bootstrap intervals.

Three parameters are read from few and noisy points, so a fit is refused where the data do not hold them: too few
different x, a y that does not fall, or an exponent that the bootstrap leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.runtime import rng
from unisono.runtime.code.entry_points import import_extra
from unisono.runtime.errors import ConfigError

FEWEST = 4  # different x: one more than parameters
SPAN = 4.0  # at least, between the smallest and the largest x
_REPEATS = 400  # of the bootstrap
_EVALUATIONS = 60  # of a fit, which takes 5 to 20 where there is one
_LOOSEST = 3.0  # the interval of c may reach from c / 3 to 3 c
_EXPONENTS = np.geomspace(0.02, 4.0, 60)  # from which a fit may begin

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class PowerLaw:
    """A fit y = a + b · x^−c.

    Attributes:
        a: what is left of y for infinite x.
        b: of x = 1.
        c: exponent.
        intervals: of the three, 95 %, by the bootstrap.
    """

    a: float
    b: float
    c: float
    intervals: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]

    def __call__(self, x: Numbers) -> Numbers:
        """The fitted y."""
        return np.asarray(self.a + self.b * np.asarray(x, dtype=np.float64) ** -self.c)

    def format(self) -> str:
        """The fit in one line."""
        (a0, a1), (b0, b1), (c0, c1) = self.intervals
        return (
            f"{self.a:.4g} + {self.b:.4g} · x^−{self.c:.3g}   (95 %: a {a0:.4g} to {a1:.4g}, b {b0:.4g} to {b1:.4g}, "
            f"c {c0:.3g} to {c1:.3g})"
        )


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Fit a power law to measurements.

    Raises:
        ConfigError: if the data do not hold its three parameters, saying why.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    values = np.unique(xs)
    if len(values) < FEWEST:
        raise ConfigError(f"a power law has 3 parameters, and the runs have {len(values)} different x; use {FEWEST}")
    if values[0] <= 0:
        raise ConfigError(f"a power law needs x above 0, and the smallest is {values[0]:g}")
    if values[-1] < SPAN * values[0]:
        raise ConfigError(
            f"x spans only {values[0]:g} to {values[-1]:g}; an exponent needs a factor of {SPAN:g} between them"
        )
    scale = float(np.exp(np.log(values).mean()))  # so that the numbers of the fit are near 1
    whole = _fit(xs / scale, ys)
    if whole is not None:  # again, by the noise around the first fit, which outliers have not moved far
        whole = _fit(xs / scale, ys, whole[2], _noise(ys - _predict(xs / scale, whole)))
    if whole is None or whole[1] <= 0:
        raise ConfigError("y does not fall as a power of x: no fit with b > 0 and c > 0 was found")
    a, b, c = whole
    residuals = ys - _predict(xs / scale, whole)
    noise = _noise(residuals)
    residuals *= np.sqrt(len(ys) / max(1, len(ys) - 3))  # three were used up by the fit
    generator = rng.generator(0, "bootstrap")
    fits = []
    for repeat in range(_REPEATS):
        again = _fit(xs / scale, _predict(xs / scale, whole) + generator.choice(residuals, len(ys)), c, noise)
        if again is not None:
            fits.append(again)
        elif repeat + 1 - len(fits) > _REPEATS / 20:  # more than the intervals leave out
            raise ConfigError(f"{_open_exponent(c)}, since a power law does not fit what noise makes of them")
    found = np.asarray(fits)  # (repeats, 3)
    low, high = np.quantile(found, [0.025, 0.975], axis=0)
    if low[1] <= 0 or low[2] < c / _LOOSEST or high[2] > c * _LOOSEST:
        raise ConfigError(f"{_open_exponent(c)}: it may as well be {low[2]:.2g} or {high[2]:.2g}")
    powers = found[:, 1] * scale ** found[:, 2]
    b_low, b_high = np.quantile(powers, [0.025, 0.975])
    of_a, of_b, of_c = ((float(x0), float(x1)) for x0, x1 in ((low[0], high[0]), (b_low, b_high), (low[2], high[2])))
    return PowerLaw(a, b * scale**c, c, (of_a, of_b, of_c))


def _open_exponent(c: float) -> str:
    return (
        "the data do not hold three parameters (add runs with smaller or larger x, or more seeds): they leave the "
        f"exponent {c:.3g} open"
    )


def _predict(x: Numbers, parameters: tuple[float, float, float]) -> Numbers:
    a, b, c = parameters
    return np.asarray(a + b * x**-c)


def _noise(residuals: Numbers) -> float:
    """The standard deviation of most residuals: by their median, which outliers do not move."""
    return 1.4826 * float(np.median(np.abs(residuals)))


def _fit(
    x: Numbers, y: Numbers, start: float | None = None, noise: float | None = None
) -> tuple[float, float, float] | None:
    """The best a, b and c for x near 1; None if c leaves the range of exponents."""
    optimize = import_extra("scipy.optimize", "plots", "a power-law fit", of="unisono-sweeps")
    first = _EXPONENTS if start is None else np.asarray([start / 2, start, start * 2])
    begin = min(first, key=lambda c: _linear(x, y, c)[1])
    (a, b), _ = _linear(x, y, begin)
    spread = max(float(np.ptp(y)), 1e-12)
    noise = _noise(y - _predict(x, (a, b, begin))) if noise is None else noise

    def residuals(parameters: Numbers) -> Numbers:
        return np.asarray((parameters[0] + parameters[1] * x ** -parameters[2] - y) / spread)

    def jacobian(parameters: Numbers) -> Numbers:
        powers = x ** -parameters[2]
        return np.stack([np.ones_like(x), powers, -parameters[1] * powers * np.log(x)], axis=1) / spread

    found = optimize.least_squares(
        residuals,
        [a, b, begin],
        jacobian,
        max_nfev=_EVALUATIONS,
        loss="soft_l1",  # an outlying run counts by its distance, not by its square
        f_scale=max(2 * noise / spread, 1e-9),
        x_scale=[spread, spread, 1.0],
    )
    a, b, c = map(float, found.x)
    return (a, b, c) if _EXPONENTS[0] < c < _EXPONENTS[-1] else None


def _linear(x: Numbers, y: Numbers, c: float) -> tuple[tuple[float, float], float]:
    """The best a and b for an exponent, and what remains."""
    basis = np.stack([np.ones_like(x), x**-c], axis=1)
    (a, b), *_ = np.linalg.lstsq(basis, y, rcond=None)
    return (float(a), float(b)), float(np.square(y - basis @ [a, b]).sum())
