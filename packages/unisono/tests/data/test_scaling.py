"""Targets on the scale of learning and back; and what is told of predictions, against NumPy on all of them."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from unisono.data.scaling import Scaling
from unisono.evaluation.moments import summarise_moments as summary
from unisono.runtime.errors import DataError

VALUES = np.array([3.0, 7.0, np.nan, 12.0, 0.5])


@pytest.mark.parametrize("kind", ["none", "minmax", "zscore", "log"])
def test_there_and_back_again(kind: str) -> None:
    transform = Scaling.fit(kind, VALUES, "age")
    assert Scaling(**json.loads(json.dumps(asdict(transform)))) == transform
    made = transform(VALUES)
    assert np.isnan(made).tolist() == np.isnan(VALUES).tolist()
    assert np.allclose(transform.inverse(made), VALUES, equal_nan=True, rtol=1e-13)
    assert np.allclose(transform.inverse(torch.from_numpy(made)).numpy(), VALUES, equal_nan=True, rtol=1e-13)
    known = made[~np.isnan(made)]
    if kind == "minmax":
        assert (known.min(), known.max()) == (0, 1)
    elif kind != "none":
        assert np.allclose([known.mean(), known.std()], [0, 1], atol=1e-14)
    else:
        assert (known == VALUES[~np.isnan(VALUES)]).all()


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        ("zscore", [np.nan, np.nan], "no training row has a value for age"),
        ("zscore", [2.0, 2.0, np.nan], "age is 2 in all training rows"),
        ("log", [-1.0, 3.0], "age is -1 in a training row.*; set x=zscore"),
    ],
)
def test_what_cannot_be_transformed_is_told(kind: str, values: list[float], told: str) -> None:
    with pytest.raises(DataError, match=told):
        Scaling.fit(kind, np.array(values), "age", "; set x=zscore")


def test_a_summary_is_that_of_all_rows() -> None:
    rng = np.random.default_rng(1)
    true = rng.random(50)
    made = 0.3 * true + 0.1 * rng.random(50)
    moments = {
        "predicted": made, "true": true, "predicted²": made**2, "true²": true**2, "product": made * true,
        "error": abs(made - true),
    }  # fmt: skip
    told = summary({"loss": 1.5, **{f"distance/{name}": float(value.mean()) for name, value in moments.items()}})
    assert told == pytest.approx(
        {
            "loss": 1.5,
            "distance/error": abs(made - true).mean(),
            "distance/bias": made.mean() - true.mean(),
            "distance/correlation": np.corrcoef(made, true)[0, 1],
            "distance/sd_ratio": made.std() / true.std(),
            "distance/r2": 1 - ((made - true) ** 2).mean() / true.var(),
        },
        rel=1e-9,
    )


def test_constants_have_no_correlation() -> None:
    flat = {"predicted": 0.5, "true": 0.4, "predicted²": 0.25, "true²": 0.2, "product": 0.2}
    told = summary({f"distance/{name}": value for name, value in flat.items()})
    assert (told["distance/correlation"], told["distance/sd_ratio"]) == (0.0, 0.0)
