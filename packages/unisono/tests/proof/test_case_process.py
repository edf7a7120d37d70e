"""The processes of a proof: how long a case may take, and what they say meanwhile."""

from __future__ import annotations

from unisono.proof.case_process import Progress, deadline
from unisono.proof.cases import Case

PLAIN = Case("ddp:2", 2, {"strategy": "ddp"}, "fp32")


def test_a_case_may_take_much_longer_than_the_first_one_and_not_for_ever() -> None:
    assert deadline(PLAIN, None) == 600
    assert 30 <= deadline(PLAIN, 1.0) <= 60
    assert deadline(PLAIN, 1000.0) == 600


def test_a_case_that_compiles_may_take_longer_still() -> None:
    compiled = Case("ddp:2 compile", 2, {"strategy": "ddp", "compile": True}, "fp32")
    assert deadline(compiled, 1.0) > 100 > deadline(PLAIN, 1.0)


def test_the_line_of_a_case_says_how_many_are_left_and_for_how_long() -> None:
    progress = Progress(total=10, began=100.0)
    assert progress.format_case("ddp:2", 1.25, done=5, now=120.0) == "  ddp:2: 1.2 s (5 of 10, about 20 s left)"
    assert progress.format_case("ddp:2", 1.25, done=10, now=120.0) == "  ddp:2: 1.2 s (10 of 10)"
