"""What `unisono predict` writes of a classifier, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.launch.trained.class_columns import describe_classes

LOGITS = [[0.0, 3.0], [2.0, 0.0], [0.0, 1.0]]


def test_a_classifier_has_the_likeliest_class_its_probability_and_the_truth_instead_of_logits() -> None:
    columns = {
        "source": ["a"] * 3,
        "row": [0, 1, 2],
        "output": LOGITS,
        "label": [1, 1, -100],
        "weight": [0.5, 1.0, 2.0],
    }
    found = describe_classes(columns, with_outputs=False)
    assert list(found) == ["source", "row", "prediction", "probability", "truth", "weight"]
    assert (found["prediction"], found["truth"]) == ([1, 0, 1], [1, 1, None])
    assert found["probability"] == pytest.approx([0.952574, 0.880797, 0.731059], rel=1e-5)


def test_arrays_are_kept_where_the_format_has_them() -> None:
    found = describe_classes({"row": [0, 1, 2], "output": LOGITS, "label": [1, 1, 0]}, with_outputs=True)
    assert found["output"] == LOGITS


def test_outputs_that_are_probabilities_stay_as_they_are() -> None:
    found = describe_classes({"row": [0], "output": [[0.25, 0.75]], "label": [1]}, with_outputs=False)
    assert found["probability"] == [0.75]


def test_of_several_columns_of_whole_numbers_the_one_named_as_a_target_is_the_truth() -> None:
    found = describe_classes({"row": [0], "output": [[0.0, 1.0]], "fold": [1], "target": [0]}, with_outputs=False)
    assert (found["truth"], found["fold"]) == ([0], [1])


@pytest.mark.parametrize(
    "columns",
    [
        {"row": [0, 1], "output": [0.5, 2.0], "label": [1, 0]},  # one number a row
        {"row": [0, 1], "output": [[0.1, 0.2], [3.0, 4.0]], "y": [0.5, 0.25]},  # targets that are not whole
        {"row": [0, 1], "output": [[0.1, 0.2], [3.0, 4.0]], "y": [0, 7]},  # more than there are classes
        {"row": [0, 1], "output": [[0.1, 0.2], [3.0, 4.0]], "a": [0, 1], "b": [0, 1]},  # one cannot tell which
        {"row": [0], "output": [[1.0, 2.0]], "other": [[1.0, 2.0]], "label": [1]},  # two outputs
    ],
)
def test_what_may_be_something_else_stays_as_it_is(columns: dict[str, Any]) -> None:
    assert describe_classes(columns, with_outputs=False) == columns
