"""The bar below a cell of a notebook, as text; tests/test_notebooks.py runs whole notebooks."""

from __future__ import annotations

import pytest

from unisono.observe import notebook_progress
from unisono.observe.live import PATIENCE
from unisono.observe.notebook_progress import NotebookProgress


def test_an_evaluation_that_takes_long_is_shown_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(notebook_progress, "monotonic", lambda: now[0])
    monkeypatch.setattr(notebook_progress, "LiveOutput", lambda shown: type("Output", (), {"update": lambda _: None})())
    progress = NotebookProgress(10)
    progress.show_step(5, ["loss 1.0"], "0:05")
    progress.show_evaluating(5, 64, 512)
    assert "evaluating" not in repr(progress) and "loss 1.0" in repr(progress)
    now[0] += PATIENCE + 1
    progress.show_evaluating(5, 128, 512)
    assert "evaluating after step 5: 128/512 rows" in repr(progress) and "128/512" in progress._repr_html_()
    progress.show_evaluation(5, {"loss": 0.5})
    assert "evaluating" not in repr(progress) and "0.5" in repr(progress)
