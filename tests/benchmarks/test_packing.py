"""The comparison of packers: the page has every way, and the figures are those of what was packed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import packing, page


def test_the_page_has_every_way_at_both_sizes() -> None:
    held = page.read_part("packing")
    found, _ = packing.contenders(10)
    for name in (*found, "OLMo-core, InstancePacker", "TRL, _pack_bfd"):
        assert held.count(f"| {name} |") == 4, name  # two sets, two sizes


def test_lengths_have_the_median_and_the_mean_that_are_told() -> None:
    lengths = packing.lognormal(200_000)
    assert np.median(lengths) == pytest.approx(403, rel=0.01)
    assert lengths.mean() == pytest.approx(738, rel=0.01)


def test_lengths_of_texts_are_those_of_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one short one\n\n" + "and a much longer document " * 50)
    short, long = packing.of_texts(tmp_path / "texts").tolist()
    assert 2 <= short < 20 < long


def test_figures_are_those_of_what_was_packed(capsys: pytest.CaptureFixture[str]) -> None:
    """Three documents of 6, 6 and 4 in rows of 8, the last one in the room of neither: three rows, 16 of 24 units."""
    row = packing.measure(np.array([6, 6, 4]), 8, {"Unisono, offline": packing.ours("offline")}, 1)[0]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[1:4] == ["8", "Unisono, offline", "3"]
    assert cells[6:9] == ["33.3333 %", "+1 of 2", "0.0 %"]
    row = packing.measure(np.array([6, 6, 4]), 8, {"Unisono, end to end": packing.ours("concatenate")}, 1)[0]
    assert [cell.strip() for cell in row.split("|")][6:9] == ["0.0000 %", "+0 of 2", "33.3 %"]


def test_a_library_that_is_missing_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.import_module

    def absent(name: str, *more: Any) -> Any:
        if name.split(".")[0] in ("trl", "olmo_core"):
            raise ImportError(f"No module named '{name}'")
        return there(name, *more)

    monkeypatch.setattr(importlib, "import_module", absent)
    found, missing = packing.contenders(10)
    assert all(name.startswith("Unisono") for name in found)
    assert missing == [
        "OLMo-core, InstancePacker not run: No module named 'olmo_core.data.utils'",
        "TRL, _pack_bfd not run: No module named 'trl.data_utils'",
    ]
