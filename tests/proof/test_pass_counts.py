"""What is left of ranks that hang since some of them skip updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.proof.scripts.pass_counts import PassCounts, describe_skipped


@pytest.mark.parametrize(
    ("first", "second", "skipped"),
    [
        (PassCounts(4, 2), PassCounts(3, 3, updating=True), True),
        (PassCounts(3, 2), PassCounts(3, 3, updating=True), False),  # it is on its way there
        (PassCounts(4, 3, updating=True), PassCounts(4, 3, updating=True), False),
    ],
)
def test_an_update_that_another_rank_went_past_is_told(
    tmp_path: Path, first: PassCounts, second: PassCounts, skipped: bool
) -> None:
    first.write(tmp_path, 0)
    assert describe_skipped(tmp_path, 2) == ""
    second.write(tmp_path, 1)
    assert ("rank 1 makes update 3 after 3 backward passes" in describe_skipped(tmp_path, 2)) == skipped
