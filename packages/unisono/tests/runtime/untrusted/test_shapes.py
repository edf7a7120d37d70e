"""What others wrote has its type, or a sentence says where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.checkpoint.core.manifest import _Content
from unisono.runtime.untrusted.shapes import HashedFile, Integer, Number, misfit


@pytest.mark.parametrize(
    "value, shape, wrong",
    [
        ({"a": {"size": 1, "sha256": "", "more": []}}, dict[str, HashedFile], None),
        ({"a": {"size": 1}}, dict[str, HashedFile], "'a.sha256' required"),
        ({"a": {"size": True, "sha256": ""}}, dict[str, HashedFile], "'a.size' should be a valid integer"),
        ({"a": {"size": 1.0, "sha256": ""}}, dict[str, HashedFile], "'a.size' should be a valid integer"),
        ({"a": {"size": "1", "sha256": ""}}, dict[str, HashedFile], "'a.size' should be a valid integer"),
        ([2**63], list[Integer], "'0' should be less than"),
        ([1, 2.5], list[Number], None),
        ([float("nan")], list[Number], "'0' should be a finite number"),
        ([True], list[Number], "'0' should be a valid number"),
        (None, Number | None, None),
        ([], dict[str, Any], "Input should be a valid dictionary"),
    ],
)
def test_a_value_that_does_not_have_its_type_is_named(value: Any, shape: Any, wrong: str | None) -> None:
    found = misfit(value, shape)
    assert (found or "").startswith(wrong) if wrong else found is None


def test_one_of_many_wrong_arrays_of_a_manifest_is_named() -> None:
    arrays = {f"layer{n}": {"shape": [1], "dtype": "<f4", "pieces": [{"file": "x"}]} for n in range(10_000)}
    content = {
        "format": 1, "step": 3, "parent": None, "holds": "model", "metric": None, "about": {}, "state": {},
        "sha256": "",
        "files": {}, "arrays": arrays,
    }  # fmt: skip
    assert misfit(content, _Content) == "'arrays.layer0.pieces.0.entry' required"
