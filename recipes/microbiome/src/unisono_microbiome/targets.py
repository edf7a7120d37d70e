"""Columns of the metadata as numbers: transforms of targets, by category if wished, and covariates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import DataError, Scaling
from unisono.recipe_tools import format_share
from unisono_microbiome.study.library import Library
from unisono_microbiome.study.metadata import parse_number

Values = NDArray[np.float64]


@dataclass(frozen=True)
class TargetScaling:
    """How a target is transformed: alike for all samples, or by the category of each.

    Attributes:
        overall: of all samples, and of those of a category that no training sample has.
        categories: of each category; empty if all are transformed alike.
    """

    overall: Scaling
    categories: Mapping[str, Scaling] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        kind: str,
        values: Values,
        categories: Sequence[str] | None,
        training: NDArray[np.int64],
        name: str,
        hint: str,
    ) -> TargetScaling:
        """Fit to the training samples, by category if there are any; errors as of `unisono.Scaling.fit`."""
        overall = Scaling.fit(kind, values[training], name, hint)
        if categories is None:
            return cls(overall)
        own = np.array(categories)[training]
        parts = {one: values[training][own == one] for one in sorted(set(own.tolist()))}
        return cls(overall, {one: Scaling.fit(kind, part, f"{name} of '{one}'", hint) for one, part in parts.items()})

    def select(self, categories: Sequence[str] | None) -> Scaling:
        """The transform of samples by their categories; its shift and scale are arrays, (n,), if they differ."""
        if not self.categories:
            return self.overall
        assert categories is not None
        each = [self.categories.get(name, self.overall) for name in categories]
        shift, scale = (np.array([getattr(one, part) for one in each]) for part in ("shift", "scale"))
        return Scaling(self.overall.kind, shift, scale)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Covariate:
    """A column of the metadata that the target's head is given, as numbers.

    Attributes:
        name: of the column.
        levels: its categories in the training samples, each of which becomes a number that is 0 or 1; None for numbers.
        shift: subtracted from numbers.
        scale: they are then divided by it.
    """

    name: str
    levels: list[str] | None
    shift: float = 0.0
    scale: float = 1.0

    @classmethod
    def fit(cls, name: str, values: Sequence[str], training: NDArray[np.int64], kind: str) -> Covariate:
        """Fit to the training samples.

        Args:
            name: of the column.
            values: of all samples, none of them missing.
            training: numbers of the training samples.
            kind: `numeric`, `categorical`, or empty to see whether all values are numbers.

        Raises:
            DataError: if it is the same in all training samples.
        """
        known = [values[number] for number in training]
        is_text = kind == "categorical" or (not kind and any(parse_number(value) is None for value in values))
        numbers = None if is_text else _numbers(name, known)
        if len(set(known)) < 2 or (numbers is not None and numbers.min() == numbers.max()):  # as 1 and 1.0 are
            raise DataError(
                f"data.covariates: '{name}' is '{known[0]}' in all training samples, so nothing can be learnt from it; "
                "leave it out"
            )
        if numbers is None:
            return cls(name, sorted(set(known)))
        return cls(name, None, float(numbers.mean()), float(numbers.std()))

    @property
    def width(self) -> int:
        """How many numbers it becomes."""
        return 1 if self.levels is None else len(self.levels)

    def encode(self, values: Sequence[str]) -> Values:
        """Its values as numbers, (n, width); a category that no training sample has is 0 everywhere."""
        if self.levels is None:
            return ((_numbers(self.name, values) - self.shift) / self.scale)[:, None]
        return np.array([[value == level for level in self.levels] for value in values], dtype=np.float64)


def fit_covariates(library: Library) -> list[Covariate]:
    """The columns of `data.covariates`, fitted to the training samples of a library."""
    training, types = library.training().rows, library.types
    names = library.config.covariates
    return [Covariate.fit(name, library.metadata[name], training, types.get(name, "")) for name in names]


def encode_covariates(covariates: Sequence[Covariate], metadata: Mapping[str, Sequence[str]], count: int) -> Values:
    """The covariates of samples as numbers, (count, their widths)."""
    parts = [one.encode(metadata[one.name]) for one in covariates]
    return np.concatenate([np.zeros((count, 0)), *parts], axis=1)


def _numbers(name: str, values: Sequence[str]) -> Values:
    found = [parse_number(value) for value in values]
    wrong = [value for value, number in zip(values, found, strict=True) if number is None or not math.isfinite(number)]
    if wrong:
        raise DataError(
            f"data.covariates: {format_share(wrong, len(values), 'values')} of '{name}' are not finite numbers; list "
            "values for missing data in data.missing, and data.leave_out=[no_covariate] skips their samples"
        )
    return np.array(found, dtype=np.float64)


def describe_scaling(scaling: TargetScaling) -> dict[str, Any]:
    """As JSON."""
    overall = {"kind": scaling.overall.kind, "shift": scaling.overall.shift, "scale": scaling.overall.scale}
    return overall | ({"categories": len(scaling.categories)} if scaling.categories else {})
