"""What `unisono check` warns of in the data, and that it is silent otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packages.unisono.tests import tasks
from packages.unisono.tests.runs import configuration
from unisono.launch.data_check import describe_missing_classes, describe_nulls, find_data_warnings
from unisono.launch.model.check import check_model


def texts(nulls: int, rows: int) -> list[dict[str, Any]]:
    return [{"text": None if row < nulls else "words", "number": None} for row in range(rows)]


@pytest.mark.parametrize(("nulls", "warned"), [(0, False), (1, False), (2, True)])
def test_more_than_one_null_text_in_a_hundred_is_a_warning(nulls: int, warned: bool) -> None:
    found = list(describe_nulls("train", texts(nulls, 100)))
    expected = f"train: {nulls} of 100 rows have no text in the column 'text' (null); is it the right column?"
    assert found == [expected] * warned


class Gaps(tasks.LinearTask):
    def data(self) -> list[dict[str, Any]]:
        return texts(0, 50)

    def held_out(self) -> list[dict[str, Any]]:
        return texts(9, 50)


def test_missing_texts_of_held_out_rows_are_a_warning_too() -> None:
    (found,) = find_data_warnings(Gaps())
    assert found.startswith("the held-out rows: 9 of 50 rows have no text in the column 'text'")


def test_classes_without_held_out_rows_are_named_with_what_is_trained_on_them() -> None:
    trained = [{"label": np.int64(row % 4)} for row in range(10)]
    evaluated = [{"label": np.int64(one)} for one in (0, 1)]
    (found,) = describe_missing_classes(trained, evaluated)
    assert found == "2 of 4 classes have no held-out row ('label'): 2 (2 to train on), 3 (2 to train on)"
    assert not list(describe_missing_classes(trained, trained))
    assert not list(describe_missing_classes([{"label": 0.5}], [{"label": 1.5}])), "numbers are no classes"


class Unbalanced(tasks.LinearTask):
    def data(self) -> list[dict[str, Any]]:
        return [{**row, "label": number % 3} for number, row in enumerate(super().data())]

    def held_out(self) -> list[dict[str, Any]]:
        return [row for row in self.data() if row["label"]][:4]


class Masked(tasks.LinearTask):
    def counts(self, batch: Any) -> dict[str, float]:
        return {"square": float((batch["x"] > 1e9).sum())}


def test_a_task_is_looked_at_through_its_own_rows() -> None:
    (found,) = find_data_warnings(Unbalanced())
    assert found.startswith("1 of 3 classes has no held-out row ('label'): 0 (14 to train on)")
    assert not list(find_data_warnings(tasks.LinearTask()))


def test_a_mask_that_matches_nothing_is_a_warning() -> None:
    (found,) = check_model(Masked(), configuration()).warnings
    assert found == "the term 'square' counts nothing in the first micro-batch; does its mask match anything?"
    assert check_model(tasks.LinearTask(), configuration()).warnings == ()
