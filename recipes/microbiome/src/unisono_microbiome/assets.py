"""What is saved with a run besides its weights: sizes, transforms, classes, covariates, and taxa."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, NotRequired, cast

from typing_extensions import TypedDict

from unisono_microbiome.learnt import LearntValues

if TYPE_CHECKING:
    from unisono_microbiome.model import ModelShape

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


def collect_assets(learnt: LearntValues, shape: ModelShape) -> Assets:
    """What a reader of a run needs besides its weights: sizes, transforms and classes, and the taxa of the training."""
    library, scaling = learnt.library, learnt.target_scaling
    fitted = {name: asdict(transform) for name, (_, transform) in learnt.diversities.items()}
    assets = {
        "shape": asdict(shape),
        "taxa": library.taxa,
        "training": library.training().fingerprint,
        "faith_pd": fitted.get("faith_pd"),
        "shannon": fitted.get("shannon"),
        "target": None,
        "covariates": [asdict(one) for one in learnt.covariates],
        "distance_scale": learnt.distance_scale,
    }
    if "target" in learnt.losses and library.target is not None:
        categories = {} if scaling is None else {name: asdict(one) for name, one in scaling.categories.items()}
        assets["target"] = {
            "column": library.target.name,
            "classes": library.target.classes,
            "transform": None if scaling is None else asdict(scaling.overall),
            "categories": categories,
            "by": library.config.target_by,
        }
    return cast(Assets, assets)
