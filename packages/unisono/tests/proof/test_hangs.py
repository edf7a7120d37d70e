"""Where the processes of a proof were when one of them hung."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import pytest

from unisono.proof.hangs import read_stacks


def dump(folder: Path, rank: int, begins: str) -> int:
    """Leave this process's stack as a rank does; returns its line."""
    path = folder / "logs" / f"rank-{rank:05d}.stack"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        file.write(begins)
        file.flush()
        faulthandler.dump_traceback(file)
    return dump.__code__.co_firstlineno + 7


def test_the_lines_of_all_ranks_are_told_once_one_of_them_was_too_late(tmp_path: Path) -> None:
    line = dump(tmp_path, 0, "Timeout (0:00:50)!\n")
    dump(tmp_path, 1, "")
    where = f"{Path(__file__)}:{line} in dump"
    assert read_stacks(tmp_path, 2) == {0: where, 1: where}


@pytest.mark.parametrize("ranks", [0, 2])
def test_stacks_of_processes_that_were_ended_for_another_reason_are_no_hang(tmp_path: Path, ranks: int) -> None:
    for rank in range(ranks):
        dump(tmp_path, rank, "")
    assert read_stacks(tmp_path, 2) == {}
