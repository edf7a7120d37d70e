"""What is learnt of samples besides distances and sequences, as numbers: diversities, targets; and their covariates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError, Scaling
from unisono.recipe_tools import format_examples
from unisono_microbiome.settings import DIVERSITIES
from unisono_microbiome.study.library import Library
from unisono_microbiome.study.matrices import BOUNDED
from unisono_microbiome.targets import Covariate, TargetScaling, encode_covariates, fit_covariates

_BEYOND = 1.25  # how much further apart than training samples others may be


@dataclass(frozen=True)
class LearntValues:
    """Values of all samples of a library, transformed as the training samples, or a run's assets, say.

    Attributes:
        library: of the samples.
        losses: that have a weight.
        transform: of a target of numbers.
        known: assets of the run that is used, whose transforms are its own; empty while one is trained.
    """

    library: Library
    losses: frozenset[str]
    transform: str
    known: Mapping[str, Any]

    @cached_property
    def diversities(self) -> dict[str, tuple[NDArray[np.float64], Scaling]]:
        """The diversities that have a weight: of every sample, standardised, (samples,), and how."""
        found = {}
        for name in DIVERSITIES:
            if name in self.losses:
                values, known = self.library.diversity(name), self.known.get(name)
                training = self.library.training().rows
                transform = Scaling(**known) if known else Scaling.fit("zscore", values[training], name)
                found[name] = transform(values), transform
        return found

    @cached_property
    def covariates(self) -> list[Covariate]:
        """The columns that the target's head is given, as the run was trained with them."""
        if "target" not in self.losses:
            return []
        if self.known:
            return [Covariate(**one) for one in self.known.get("covariates", [])]
        return fit_covariates(self.library)

    @cached_property
    def encoded_covariates(self) -> NDArray[np.float32]:
        """The covariates of every sample, (samples, numbers)."""
        found = encode_covariates(self.covariates, self.library.metadata, len(self.library))
        return found.astype(np.float32)

    @cached_property
    def distance_scale(self) -> float:
        """What distances are divided by to be learnt: metrics without a maximum, by more than any training sample's."""
        if self.known:
            return float(self.known.get("distance_scale", 1.0))
        if "distance" not in self.losses or self.library.config.metric in BOUNDED:
            return 1.0
        training = self.library.training().rows
        return _BEYOND * float(self.library.distances()[np.ix_(training, training)].max())

    @cached_property
    def target_scaling(self) -> TargetScaling | None:
        """How a target of numbers is transformed; None for classes, and without a target."""
        if known := self.known.get("target"):
            if known["transform"] is None:
                return None
            categories = {name: Scaling(**one) for name, one in known.get("categories", {}).items()}
            return TargetScaling(Scaling(**known["transform"]), categories)
        target = self.library.target
        if target is None or target.classes is not None or "target" not in self.losses:
            return None
        hint = "; set task.target.transform=zscore"
        values, training = np.asarray(target.values, dtype=np.float64), self.library.training().rows
        return TargetScaling.fit(self.transform, values, self.library.categories, training, f"'{target.name}'", hint)

    @cached_property
    def targets(self) -> NDArray[Any]:
        """The target of every sample, (samples,): transformed, NaN for none, or a class, -1 for none."""
        target = self.library.target
        if target is None or "target" not in self.losses:
            return np.zeros(0)
        if target.classes is not None:
            return np.asarray(target.values, dtype=np.int64)
        assert self.target_scaling is not None
        values = np.asarray(target.values, dtype=np.float64)
        made = self.target_scaling.select(self.categories(np.arange(len(values))))(values)
        if (bad := np.flatnonzero(~np.isfinite(made) & ~np.isnan(values))).size:
            sample = self.library.samples[bad[0]]
            raise DataError(
                f"'{target.name}' of the held-out sample '{sample}' is {values[bad[0]]:g}, which has no logarithm of 1 "
                "+ it; set task.target.transform=zscore"
            )
        return made

    def scale_back(self, values: NDArray[np.float64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Predictions of samples, (…, n, outputs), in the units of the target."""
        assert self.target_scaling is not None
        scaling = self.target_scaling.select(self.categories(numbers))
        parts = (np.asarray(one)[..., None] for one in (scaling.shift, scaling.scale))
        found: NDArray[np.float64] = Scaling(scaling.kind, *parts).inverse(values)  # type: ignore[arg-type]
        return found

    def categories(self, numbers: NDArray[np.int64]) -> list[str] | None:
        """The categories of samples by which their targets are transformed."""
        if self.target_scaling is None or not self.target_scaling.categories:
            return None
        if (found := self.library.categories) is None:
            raise ConfigError("the target was transformed by the category of each sample: set data.target_by")
        return [found[number] for number in numbers]

    def find_unseen(self, numbers: NDArray[np.int64]) -> list[str]:
        """Sentences about samples with a category that no training sample has, as one that is written otherwise."""
        by, scaling = self.library.config.target_by, self.target_scaling
        known = {one.name: (one.levels, "covariate, which is 0 for them") for one in self.covariates if one.levels}
        if by is not None and scaling is not None and scaling.categories:
            known[by] = list(scaling.categories), "data.target_by, so the transform of all samples is theirs"
        found = []
        for name, (levels, what) in known.items():
            values, there = [self.library.metadata[name][number] for number in numbers], set(levels)
            if strange := [value for value in values if value not in there]:
                shown = f"{len(strange)} of {len(values)} samples ({format_examples(sorted(set(strange)))})"
                found.append(f"{name} of {shown} is a value that no training sample has ({what})")
        return found
