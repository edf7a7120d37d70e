"""Scales targets for training, and back; fitted on the training rows and saved with the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.errors import DataError

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Scaling:
    """`(f(value) - shift) / scale`, where f is log(1 + ·) or the identity; NaN stays NaN.

    Attributes:
        kind: `none`, `minmax`, `zscore` or `log`.
        shift: subtracted from the values.
        scale: the values are then divided by it.
    """

    kind: str
    shift: float = 0.0
    scale: float = 1.0

    @classmethod
    def fit(cls, kind: str, values: Values, name: str, hint: str = "") -> Scaling:
        """The scaling that gives these values a range of 0 to 1, or a mean of 0 and a standard deviation of 1.

        Args:
            kind: as for the class.
            values: of the training rows; NaN if unknown.
            name: of the target, for errors.
            hint: end of the error if the values have no logarithm.

        Raises:
            DataError: if no value is known, all are equal, or one has no logarithm.
        """
        known = values[~np.isnan(values)]
        if not len(known):
            raise DataError(f"no training row has a value for {name}, so it cannot be learnt")
        if kind == "none":
            return cls(kind)
        if kind == "log":
            if known.min() <= -1:
                raise DataError(
                    f"{name} is {known.min():g} in a training row: log(1 + {name}) needs values above -1{hint}"
                )
            known = np.log1p(known)
        low, high = float(known.min()), float(known.max())
        if low == high:
            raise DataError(f"{name} is {values[~np.isnan(values)][0]:g} in all training rows: nothing can be learnt")
        if kind == "minmax":
            return cls(kind, low, high - low)
        return cls(kind, float(known.mean()), float(known.std()))

    def __call__(self, values: Values) -> Values:
        """Scale values."""
        with np.errstate(invalid="ignore", divide="ignore"):  # a held-out value may have no logarithm
            scaled: Values = ((np.log1p(values) if self.kind == "log" else values) - self.shift) / self.scale
        return scaled

    def inverse(self, values: Any) -> Any:
        """Scale arrays or tensors back."""
        values = values * self.scale + self.shift
        if self.kind != "log":
            return values
        return np.expm1(values) if isinstance(values, np.ndarray) else values.expm1()
