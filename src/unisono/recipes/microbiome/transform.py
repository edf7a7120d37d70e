"""Targets on a scale on which they are learnt easily, and back: fitted on the training samples, kept with the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.errors import DataError

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Transform:
    """`(f(value) - shift) / scale`, where f is log(1 + ·) or nothing; NaN stays NaN.

    Attributes:
        kind: `none`, `minmax`, `zscore` or `log`.
        shift: what is taken away.
        scale: what it is divided by.
    """

    kind: str
    shift: float = 0.0
    scale: float = 1.0

    @classmethod
    def fitted(cls, kind: str, values: Values, name: str) -> Transform:
        """The transform that gives these values a range of 0 to 1, or a mean of 0 and a standard deviation of 1.

        Raises:
            DataError: where they are all the same, or have no logarithm.
        """
        known = values[~np.isnan(values)]
        if not len(known):
            raise DataError(f"no training sample has a value of {name}, so there is nothing to learn it from")
        if kind == "none":
            return cls(kind)
        if kind == "log":
            if known.min() <= -1:
                raise DataError(
                    f"{name} is {known.min():g} in a training sample: log(1 + {name}) needs values above -1; set "
                    "task.target.transform=zscore"
                )
            known = np.log1p(known)
        low, high = float(known.min()), float(known.max())
        if low == high:
            raise DataError(
                f"{name} is {values[~np.isnan(values)][0]:g} in all training samples: nothing can be learnt"
            )
        if kind == "minmax":
            return cls(kind, low, high - low)
        return cls(kind, float(known.mean()), float(known.std()))

    def __call__(self, values: Values) -> Values:
        """Onto the scale of learning."""
        with np.errstate(invalid="ignore", divide="ignore"):  # held-out values may have no logarithm: they are told so
            made: Values = ((np.log1p(values) if self.kind == "log" else values) - self.shift) / self.scale
        return made

    def back(self, values: Any) -> Any:
        """From it, of arrays and tensors."""
        values = values * self.scale + self.shift
        if self.kind != "log":
            return values
        return np.expm1(values) if isinstance(values, np.ndarray) else values.expm1()

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)
