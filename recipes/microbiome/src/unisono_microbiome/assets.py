"""What is saved with a run besides its weights: sizes, transforms, classes, covariates, and taxa."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

FILE = "microbiome.json"


class Transform(TypedDict):
    """A `unisono.Scaling`."""

    kind: str
    shift: float
    scale: float


class Target(TypedDict):
    """The target column; `categories` are the transforms by the column `by` (`data.target_by`)."""

    column: str
    classes: list[str] | None
    transform: Transform | None
    categories: NotRequired[dict[str, Transform]]
    by: NotRequired[str | None]


class Shape(TypedDict):
    """A `ModelShape`."""

    taxa: int
    longest: int
    length: int
    outputs: int
    covariates: NotRequired[int]


class CovariateRecord(TypedDict):
    """A `Covariate`."""

    name: str
    levels: list[str] | None
    shift: float
    scale: float


class Assets(TypedDict):
    """All of it; runs of earlier versions lack what is not required."""

    shape: Shape
    taxa: list[str]
    training: NotRequired[str]  # fingerprint of the samples that were trained on
    faith_pd: Transform | None
    shannon: NotRequired[Transform | None]
    target: Target | None
    covariates: NotRequired[list[CovariateRecord]]
    distance_scale: NotRequired[float]
