"""Another number of shards: every row stays in its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.prepare.reshard import bounds_by_units, reshard
from unisono.data.prepare.shards import Shards
from unisono.runtime.errors import DataError


@pytest.mark.parametrize("count", [1, 3, 10, 37])
def test_resharding_keeps_every_row_in_its_place(tmp_path: Path, whole: Path, count: int):
    before, after = Shards(whole), reshard(whole, count, tmp_path / "out")
    assert len(after.manifest["shards"]) == count
    assert len(after.blocks) >= count
    assert after.fingerprint == before.fingerprint
    assert after.lengths.tolist() == before.lengths.tolist()
    assert all(np.array_equal(after[row], before[row]) for row in range(len(before)))
    same = ("rows", "units", "left_out", "shortest", "longest", "mean", "of", "dtype", "column")
    assert all(after.manifest[name] == before.manifest[name] for name in same)
    assert (tmp_path / "out" / "travels.txt").read_text() == "with the shards"


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60), share=st.floats(0, 1))
def test_every_number_of_shards_up_to_that_of_rows_can_be_made(lengths: list[int], share: float):
    count = 1 + round(share * (len(lengths) - 1))
    bounds = bounds_by_units(np.asarray(lengths), count)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(lengths), count + 1)
    assert (np.diff(bounds) > 0).all()


def test_shards_of_a_reshard_have_about_equally_many_units(tmp_path: Path, whole: Path):
    made = reshard(whole, 7, tmp_path / "out")
    units = [entry["units"] for entry in made.manifest["shards"]]
    assert max(units) - min(units) <= 2 * made.manifest["longest"]


def test_a_number_of_shards_that_cannot_be_made_and_the_same_folder_are_refused(tmp_path: Path, whole: Path):
    for shards in (0, 10_000):
        with pytest.raises(DataError, match=rf"shards={shards}: .* has \d+ rows; choose 1 to \d+ shards"):
            reshard(whole, shards, tmp_path / "out")
    with pytest.raises(DataError, match=r"is the input folder; choose another"):
        reshard(whole, 3, whole)


def test_a_damaged_folder_is_not_resharded(tmp_path: Path, whole: Path):
    folder = Path(shutil.copytree(whole, tmp_path / "a"))
    path = folder / "shard-00004-of-00010.arrow"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"00004-of-00010\.arrow is damaged"):
        reshard(folder, 3, tmp_path / "out")
    assert not (tmp_path / "out").exists()
