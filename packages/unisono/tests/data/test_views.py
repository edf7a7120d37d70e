"""Views of a source: some of its rows, or its rows as something else; what it knows of itself is passed on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono import Mapped, Subset, open_source
from unisono.data.order.planning import checkable_sources, source_files
from unisono.runtime.errors import DataError


class Known:
    """A source that knows everything of itself."""

    fingerprint, blocks, lengths = "abc", np.array([3, 2, 4]), np.arange(9)

    def __len__(self) -> int:
        return 9

    def __getitem__(self, row: int) -> int:
        return 10 * row


def double(row: Any) -> Any:
    return 2 * row


def test_a_subset_has_its_rows_in_its_order_and_what_the_source_knows_of_them() -> None:
    some = Subset(Known(), np.array([1, 4, 5, 8]))
    assert [some[row] for row in range(len(some))] == [10, 40, 50, 80]
    assert some.lengths is not None and some.blocks is not None
    assert some.lengths.tolist() == [1, 4, 5, 8]
    assert some.blocks.tolist() == [1, 1, 2]
    with pytest.raises(IndexError, match="row 4 of 4"):
        some[4]


def test_the_fingerprint_of_a_view_is_of_the_source_and_of_what_is_done_with_it() -> None:
    views = [
        Subset(Known(), np.array([0, 1])), Subset(Known(), np.array([1, 0])), Subset(Known(), np.array([0])),
        Mapped(Known(), double, "double"), Mapped(Known(), double, "twice"),
    ]  # fmt: skip
    assert len({view.fingerprint for view in views}) == 5
    assert Subset(Known(), np.array([0, 1])).fingerprint == views[0].fingerprint
    assert Subset([1, 2, 3], np.array([0])).fingerprint is None


def test_a_view_of_a_plain_list_knows_nothing_of_blocks_lengths_or_files() -> None:
    for view in (Subset([1, 2, 3], np.array([2, 0])), Mapped([1, 2, 3], double, None)):
        assert (view.blocks, view.manifest, getattr(view, "lengths", None)) == (None, None, None)
        view.check_files()
        view.keep_blocks(3)
        assert source_files(view) == {}


def test_rows_are_changed_as_they_are_asked_for_and_in_other_processes_too() -> None:
    view = pickle.loads(pickle.dumps(Mapped(Subset([1, 2, 3], np.array([2, 0])), double, "double")))
    assert [view[row] for row in range(len(view))] == [6, 2]


def test_files_that_change_are_found_through_views(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": 1}\n{"x": 2}\n')
    view = Mapped(Subset(open_source(path), np.array([1])), double, None)
    assert checkable_sources(view) == [view]
    assert [file["rows"] for file in source_files(view)[""]] == [2]
    with path.open("a") as file:
        file.write('{"x": 3}\n')
    with pytest.raises(DataError, match="has changed since it was opened"):
        view.check_files()
