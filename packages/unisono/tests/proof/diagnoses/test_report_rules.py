"""What a metric, or an evaluation, that differs first is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.unisono.tests.proof.patterns import EVEN, diagnose, failed, trace
from unisono.proof.recording.trace import Part

# evaluations ----------------------------------------------------------------------------------------------------------


def part(rank: int, right: float, number: int) -> Part:
    return Part(number, rank, 4, {"metric/hits": right}, {"metric/hits": 4.0}, {})


@pytest.mark.parametrize(
    ("second", "fault"),
    [(2 / 4, "A metric is not summed over ranks"), (5 / 8, "A metric depends on the layout")],
)
def test_a_metric_is_that_of_one_rank_only_if_it_is_so_in_every_step(tmp_path: Path, second: float, fault: str) -> None:
    """Three of four rows are right on rank 0, and rank 1 counts two too many: by chance, rank 0 alone comes to that."""
    mine, one = trace(tmp_path / "mine", EVEN), trace(tmp_path / "one", [[8], [8]])
    more = 0.0 if fault == "A metric is not summed over ranks" else 2.0
    for number, (right, value) in enumerate([((3.0, 1.0), 3 / 4), ((2.0, 1.0), second)]):
        ours, theirs = mine.facts.steps[number], one.facts.steps[number]
        ours.parts = [part(0, right[0], 0), part(1, right[1] + more, 1)]
        theirs.parts = [part(0, right[0], 0), part(0, right[1], 1)]
        ours.metrics, theirs.metrics = [{"hits": value}] * 2, [{"hits": sum(right) / 8}]
    told = diagnose((mine, one), failed("metrics", 1, "hits"))
    assert told.fault == fault, told.because
    assert ("on ranks [1] than on one process" in told.because) == told.is_neutral


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("statistic", "A statistic of the batch is taken of its parts"),
        ("constant", "A term is added once per micro-batch"),
        ("places", "The evaluation depends on the layout"),
    ],
)
def test_an_evaluated_number_that_is_no_sum_is_named_where_other_rows_are_together(
    tmp_path: Path, kind: str, fault: str
) -> None:
    mine, one = trace(tmp_path / "mine", [[8]], held_out={"[0]": "a", "[1]": "b"}), trace(tmp_path / "one", [[8]])
    one.facts.held_out, one.facts.probed = {"[0, 1]": "c"}, True
    one.facts.unsummed_evaluated = {"metric/top 5 sum": [kind, "of 4 rows is 2, …"], "loss/next sum": [kind, "of …"]}
    for name, said in (("top 5", "the sum of 'top 5' of 4 rows is 2, …"), ("loss", "the sum of 'next' of …")):
        told = diagnose((mine, one), failed("evaluation", 0, name), world_size=1)
        assert (told.fault, said in told.because) == (fault, True), told.because
    mine.facts.held_out = dict(one.facts.held_out)
    told = diagnose((mine, one), failed("evaluation", 0, "loss"))
    assert (told.fault, "of …" in told.because) == ("The evaluation depends on the layout", False)
