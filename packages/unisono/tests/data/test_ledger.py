"""What a checkpoint keeps of the ledger: a digest of everything consumed, and how far each file goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.data import made
from packages.unisono.tests.data.made import WithBad
from packages.unisono.tests.data.test_audit import _edited, _lines, _write
from unisono.data import ledger
from unisono.data.ledger import Ledger
from unisono.runtime.errors import RecordError, RunError

STEPS = 4


def kept(folder: Path, first: int, last: int, world: int = 1, before: Any = None, shift: int = 0) -> dict[str, Any]:
    """What a checkpoint keeps after these steps on so many processes."""
    marks = made.recorded(WithBad(), folder, first, last, world, start=f"{first}", shift=shift)
    return ledger.merge_marks(before, marks)


def test_the_digest_depends_neither_on_processes_nor_on_interruptions(tmp_path: Path) -> None:
    whole = kept(tmp_path / "whole", 0, STEPS)
    assert whole["consumed"] == kept(tmp_path / "three", 0, STEPS, 3)["consumed"]
    part = kept(tmp_path / "parts", 0, 2, 2)
    later = kept(tmp_path / "parts", 2, STEPS, 1, part)
    assert later["consumed"] == whole["consumed"]
    assert later["files"].keys() == {"rank-00000.jsonl", "rank-00001.jsonl"}
    assert part["consumed"] != whole["consumed"]


def test_other_samples_or_the_same_in_other_steps_have_another_digest(tmp_path: Path) -> None:
    whole = kept(tmp_path / "whole", 0, STEPS)["consumed"]
    assert kept(tmp_path / "later", 0, STEPS, shift=1)["consumed"] != whole
    twice = kept(tmp_path / "twice", 0, 2, before=kept(tmp_path / "twice", 0, STEPS))["consumed"]
    assert twice != whole


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Any]:
    """A ledger that a checkpoint knows, and that went on afterwards."""
    known = kept(tmp_path, 0, STEPS, 2)
    kept(tmp_path, STEPS, STEPS + 1, 2, known)
    return known


def fault(folder: Path, known: dict[str, Any], rank: int = 0) -> str | None:
    name = f"rank-{rank:05d}.jsonl"
    return ledger.find_fault(folder, name, known["files"][name])


def test_a_ledger_that_went_on_is_that_of_the_checkpoint_and_a_file_that_is_gone_is_missing(
    tmp_path: Path, known: dict[str, Any]
) -> None:
    assert [fault(tmp_path, known, rank) for rank in (0, 1)] == [None, None]
    assert ledger.missing_files(tmp_path, known) == []
    (tmp_path / "ledger" / "rank-00001.jsonl").unlink()
    assert ledger.missing_files(tmp_path, known) == ["rank-00001.jsonl"]


@pytest.mark.parametrize(
    ("chained", "told"),
    [
        (False, "rank-00000.jsonl, line 4 (step 3) is not what was written"),
        (True, "is from another run: step 4 differs from the checkpoint's"),
        (None, "rank-00000.jsonl ends after step 3, but the checkpoint recorded"),
    ],
)
def test_a_ledger_that_was_changed_written_anew_or_cut_off_is_named_with_its_step(
    tmp_path: Path, known: dict[str, Any], chained: bool | None, told: str
) -> None:
    lines = _lines(tmp_path)
    assert json.loads(lines[3])["step"] == 2
    changed = lines[:4] if chained is None else [*lines[:3], _edited(lines[3], content="0" * 16), *lines[4:]]
    _write(tmp_path, changed, chained=bool(chained))
    assert told in str(fault(tmp_path, known))
    assert fault(tmp_path, known, 1) is None


def test_a_full_disk_is_told_and_what_follows_from_it_is_not(tmp_path: Path) -> None:
    book = Ledger(tmp_path, 0, 1, 0, "0")
    book.flush()
    book._file.close()
    book._file = Path("/dev/full").open("a")  # noqa: SIM115
    with pytest.raises(RecordError, match=r"rank-00000.jsonl cannot be written \(No space left on device\)"), book:
        book.step(0, [])
        book.flush()


@pytest.mark.parametrize(("error", "lines"), [(RunError, 1), (KeyError, 2)])
def test_who_was_taken_over_writes_no_more_lines(tmp_path: Path, error: type[Exception], lines: int) -> None:
    """The file belongs to the start that goes on; any other error leaves all steps that were made."""
    with pytest.raises(error), Ledger(tmp_path, 0, 1, 0, "0") as book:
        book.flush()
        book.step(0, [])
        raise error("taken over")
    assert len((tmp_path / ledger.FOLDER / "rank-00000.jsonl").read_text().splitlines()) == lines
