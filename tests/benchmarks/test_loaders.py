"""The benchmarks of loading: what they compare is the same data, and what they write is what they measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import loader, loaders, resume


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "ROWS", 1024)
        loaders.generate(path)
    return path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "ROWS", 1024)


@pytest.mark.parametrize("name", ["Unisono, threads", "datasets, map-style + DataLoader"])
def test_contenders_load_every_row_once(folder: Path, name: str) -> None:
    batches = loaders.checked(loaders.CONTENDERS[name][1](folder, "light"), "light")
    first = np.concatenate([np.asarray(batch["inputs"])[:, 0] for batch in batches])
    assert sorted(first.tolist()) == list(range(1024))
    assert first.tolist() != list(range(1024))


def test_a_batch_with_a_row_twice_is_no_contender() -> None:
    ids = np.arange(loaders.LENGTH + 1)
    batch = loaders.stack([loaders.light(ids, np.random.default_rng())] * loaders.BATCH)
    with pytest.raises(AssertionError):
        loaders.checked(iter([batch]), "light")


def test_ours_goes_on_where_it_was_told_to(folder: Path) -> None:
    whole = [batch["inputs"] for batch in loaders.unisono("threads", folder, "light")]
    assert np.array_equal(resume._ours("threads")[1](folder, 20)["inputs"], whole[20])


def test_tables_have_the_medians_and_the_failures() -> None:
    runs = [{"rate": rate * 1e6, "wait": 0.25, "cpu": 0.002} for rate in (1.0, 3.0, 2.0)]
    lines = loader.table({work: {"Unisono, threads": runs} for work in loaders.WORK})
    assert any("| Unisono, threads | 2.00 M (1.00 to 3.00) | 25 % | 2.00 |" in line for line in lines)
    assert any("| grain, threads | not installed |" in line for line in lines)
    results = {"x": {percent: [0.5, 0.1, 0.3] for percent in resume.PERCENTS}}
    assert resume.table(results, {("x", 50): "IndexError"})[-1] == "| x | 0.300 | 0.300 | fails: IndexError | 0.300 |"
