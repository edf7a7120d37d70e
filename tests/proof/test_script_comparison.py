"""What a comparison of a script takes for what it is: batch statistics of one process, and the loss of a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.recording.trace import RunFacts, Trace, write_facts, write_tensors
from unisono.proof.scripts.rank_facts import RankFacts
from unisono.proof.scripts.script_comparison import find_local_statistics, name_local_statistics
from unisono.proof.scripts.script_proof import choose_losses
from unisono.proof.scripts.self_check import SelfCheck
from unisono.proof.verdict import Verdict

BUFFERS = ["1.count", "1.mean", "4.mean"]


def build_trace(folder: Path, means: list[list[float]]) -> Trace:
    """Ranks with two layers of batch normalisation; by step and rank, the means of the first."""
    folder.mkdir()
    ranks = [
        [asdict(RankFacts(buffers={"1.count": n, "1.mean": hash(mean), "4.mean": 7})) for mean in of_ranks]
        for n, of_ranks in enumerate(means)
    ]
    (folder / "ranks.json").write_text(json.dumps(ranks))
    for n, of_ranks in enumerate(means):
        values = {"1.count": np.full(1, n), "1.mean": np.full(3, of_ranks[0]), "4.mean": np.ones(3)}
        write_tensors(folder, "buffers", n, values)
    write_facts(folder, RunFacts(per_process=BUFFERS))
    return Trace(folder)


def find(folder: Path, means: list[list[float]], step: int = 1) -> tuple[list[str], str]:
    """Statistics of one process, and the name of raw gradients that differ first in a step."""
    folder.mkdir(exist_ok=True)
    reference = build_trace(folder / "one", [[1.0], [2.0]])
    mine = build_trace(folder / "many", means)
    failed = ComparedQuantity("raw gradients", "FAIL", Difference(0.5, step, "w"))
    judged = Verdict("2 processes", "1 process", False, [failed])
    name_local_statistics([judged], {"2 processes": mine}, reference, "fp64")
    return find_local_statistics(mine, reference, "fp64"), judged.diagnosis.fault if judged.diagnosis else ""


@pytest.mark.parametrize(
    ("means", "local"),
    [
        ([[0.7, 1.3], [1.7, 2.3]], True),
        ([[1.0, 1.0], [2.4, 2.4]], False),  # reduced by a layer that is derived from torch's
        ([[1.0, 1 + 1e-15], [2.4, 2.4 + 1e-15]], False),  # to rounding, which is another on every rank
    ],
)
def test_statistics_are_of_one_process_only_where_they_are_neither_other_ranks_nor_the_references(
    tmp_path: Path, means: list[list[float]], local: bool
) -> None:
    expected = (["1.count", "1.mean"], "Buffers are those of one process") if local else ([], "")
    assert find(tmp_path, means) == expected


def test_statistics_that_differ_later_do_not_explain_a_gradient_that_differs_now(tmp_path: Path) -> None:
    means = [[1.0, 1.0], [1.7, 2.3]]
    assert find(tmp_path / "first", means, 1)[1] == ""
    assert find(tmp_path / "second", means, 2)[1] == "Buffers are those of one process"


@pytest.mark.parametrize(
    ("minimised", "average", "of_ranks"),
    [(2.8, 1.4, True), (0.7, 1.4, True), (1.4, 0.7, False), (1.5, 1.4, False), (2.8, 2.8, False)],
)
def test_losses_are_those_of_ranks_where_only_the_gradients_are_scaled(
    minimised: float, average: float, of_ranks: bool
) -> None:
    check = SelfCheck([], [minimised, 9.0], [average, 4.5], 2, "sum")
    assert choose_losses(check, [1.4, 4.0]) == (check.averages if of_ranks else check.losses)
