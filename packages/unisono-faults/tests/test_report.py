"""The page of the matrix: what stands in it, and what stays when only some rows are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono_faults import report
from unisono_faults.matrix import Outcome


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        ("frozen at /tmp/x/.venv/lib/python3.11/site-packages/torch/a/b.py:9 in f", "frozen at torch/a/b.py:9 in f"),
        ("at /usr/lib/python3.12/threading.py:1", "at threading.py:1"),
        ("Backend: [/__w/pytorch/third_party/gloo/tcp/pair.cc:5] gone", "Backend: [pair.cc:5] gone"),
        ("/tmp/unisono-faults-abc/C21-xyz/runs/a: no room", "runs/a: no room"),
        ("needs torch/a/b.py and runs/a/config.yaml", "needs torch/a/b.py and runs/a/config.yaml"),
    ],
)
def test_what_is_of_this_machine_alone_is_left_out(said: str, plain: str) -> None:
    assert report.shorten_message(said) == plain


def test_rows_that_are_not_shown_again_stay_as_they_are(tmp_path: Path) -> None:
    page, faults = tmp_path / "page.md", report.load_scenarios()
    report.write_report(
        page, [(faults["A1"], Outcome(message="first")), (faults["B12"], Outcome(broken_promises=["no | yes"]))]
    )
    old = page.read_text().replace("| first | ", "| first | in 1999 ")
    page.write_text(f"# Before\n\n{old}\nafter\n")
    report.write_report(page, [(faults["B12"], Outcome(message="third", lost_steps=1))])
    text = page.read_text()
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith(("| A1", "| B12"))}
    assert "| first | in 1999 " in rows["| A1"]
    assert "| PASS |  | 1 step |  | third |" in rows["| B12"]
    assert "2 PASS, 0 FAIL, 0 ABSTAIN." in text
    assert text.startswith("# Before") and text.endswith("after\n")


def test_rows_that_were_never_measured_are_named(tmp_path: Path) -> None:
    page, faults = tmp_path / "page.md", report.load_scenarios()
    report.write_report(page, [(fault, Outcome()) for key, fault in faults.items() if key not in ("A4", "S6")])
    assert "Not measured: A4, S6." in page.read_text()
    report.write_report(page, [(faults["A4"], Outcome()), (faults["S6"], Outcome())])
    assert "Not measured" not in page.read_text()
