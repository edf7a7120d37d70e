"""The comparison with other trainers: what it calls an error is one, and the page shows what is compared."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import page, peers


def test_the_page_has_every_contender() -> None:
    held = page.read_part("peers")
    for name in peers.CONTENDERS:
        assert held.count(f"| {name} |") == 2, name  # on one process and on two


def test_lines_are_those_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HERE", tmp_path)
    (tmp_path / "contenders").mkdir()
    lines = [
        '"""Of the module."""',
        "",
        "# why",
        "import os",
        "def f():",
        '    """What."""',
        "    return (os,",
        "  1)  # so",
    ]
    text = "\n".join(lines) + "\n"
    (tmp_path / "contenders" / "one.py").write_text(text)
    assert peers.lines_of("one.py") == 4


@pytest.mark.slow
def test_errors_are_those_of_means_of_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one process: two that are right, and one that averages means."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    monkeypatch.setattr(peers, "MODEL", {**peers.MODEL, **small})
    peers.prepare(tmp_path, steps=1, gradients=True)
    for name, least, most in (("bare loop", 0.0, 1e-5), ("Unisono", 0.0, 1e-5), ("Accelerate", 1e-2, 1.0)):
        seen = peers.train(name, 1, tmp_path, 1, gradients=True)
        assert least <= peers.off_by(tmp_path) <= most, name
        assert seen["first"] > 0 and seen["memory"] > 50
    left = dict(np.load(tmp_path / "gradients.npz"))
    assert sum(float(np.square(left[name]).sum()) for name in left if name.startswith("gradient")) > 0
