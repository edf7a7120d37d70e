"""Which outputs become columns of `unisono predict`: arrays of any size where the format has them, else what fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests.tasks import LinearTask
from unisono.launch.trained.class_columns import describe_classes
from unisono.launch.trained.predict import ColumnSelection, _to_list
from unisono.runtime.errors import ConfigError

BATCH = {"x": np.zeros((2, 200), np.float32), "y": np.ones((2, 24), np.float32), "id": np.array([3.5, 4.5])}
FORECAST = torch.arange(2 * 24 * 3, dtype=torch.float32).view(2, 24, 3)


def select(outputs: Any, batch: dict[str, Any], arrays: bool) -> tuple[dict[str, list[Any]], dict[str, int]]:
    selection = ColumnSelection(LinearTask(), arrays)
    columns = {name: _to_list(value) for name, value in selection(outputs, batch).items()}
    return selection.without_wide(describe_classes(columns, with_outputs=arrays)), selection.left_out


def test_outputs_of_any_size_are_arrays_beside_targets_that_are_no_wider() -> None:
    columns, left_out = select(FORECAST, BATCH, arrays=True)
    assert (list(columns), left_out) == (["output", "y", "id"], {})
    assert np.array_equal(np.stack(columns["output"]), FORECAST.numpy())


def test_an_output_that_fits_no_cell_is_refused_with_what_to_do() -> None:
    told = (
        r"LinearTask.outputs returns 72 numbers a row, too many for .* format=parquet writes them as arrays, or define"
    )
    with pytest.raises(ConfigError, match=told):
        select(FORECAST, BATCH, arrays=False)
    with pytest.raises(ConfigError, match="no tensor with a value for each row"):
        select({"mean": torch.zeros(())}, BATCH, arrays=True)


def test_an_output_that_is_left_out_beside_one_that_fits_is_reported() -> None:
    outputs = {"median": torch.tensor([1.0, 2.0]), "states": FORECAST}
    assert select(outputs, BATCH, arrays=False) == ({"median": [1.0, 2.0], "id": [3.5, 4.5]}, {"states": 72})


@pytest.mark.parametrize("arrays", [False, True])
def test_a_classifier_of_a_thousand_classes_has_its_three_columns(arrays: bool) -> None:
    logits = torch.zeros(2, 1000)
    logits[0, 7], logits[1, 999] = 30.0, 30.0
    columns, left_out = select(logits, {"label": np.array([7, 8])}, arrays)
    assert list(columns) == ["prediction", "probability", "truth", *(["output"] if arrays else [])]
    assert (columns["prediction"], columns["truth"], left_out) == ([7, 999], [7, 8], {})
    assert columns["probability"] == pytest.approx([1.0, 1.0])


def test_wide_outputs_that_turn_out_to_be_no_classes_are_refused_too() -> None:
    with pytest.raises(ConfigError, match="returns 100 numbers a row"):
        select(torch.zeros(2, 100), {"count": np.array([7, 800])}, arrays=False)
