"""What the comparison with other tools makes of their outcomes; TrainParity need not be there."""

from __future__ import annotations

import pytest

from benchmarks import page
from benchmarks import proof_peers as peers
from benchmarks.proof_peers import Check
from benchmarks.proof_peers_cases import Outcome
from tests.proofs.zoo import disguised, study
from tests.proofs.zoo.making import FAULTS, TASKS


@pytest.mark.parametrize(
    ("check", "entry"),
    [
        (Check("FAIL", "PASS", named=True), peers.NAMES),
        (Check("FAIL", "PASS"), peers.SEES),
        (Check("FAIL", "PASS", in_scope=False), peers.SEES),
        (Check("ABSTAIN", "PASS"), peers.ABSTAINS),
        (Check("ERROR", "PASS"), peers.ABSTAINS),
        (Check("FAIL", "FAIL", named=True), peers.TWIN),
        (Check("PASS", "PASS"), peers.MISSED),
        (Check("PASS", "PASS", in_scope=False), peers.OUT),
    ],
)
def test_an_entry_says_what_a_tool_makes_of_a_fault_and_of_its_clean_twin(check: Check, entry: str) -> None:
    assert check.entry == entry


def test_a_tool_is_given_its_best_check() -> None:
    missed, sees, twin = Check("PASS", "PASS"), Check("FAIL", "PASS", "resume"), Check("FAIL", "FAIL")
    assert peers.best([missed, sees, twin]) == sees
    assert peers.best([Check("PASS", "PASS", in_scope=False), missed]) == missed


def test_losses_are_compared_as_torchtitan_compares_them() -> None:
    assert not peers.losses_differ([1.0, 2.0], [1.0, 2.0 + 1e-12])  # equal in 32 bits
    assert peers.losses_differ([1.0, 2.0], [1.0, 2.0 + 1e-6]) == "step 2"
    assert not peers.losses_differ([1.0, 2.0], [1.0, 2.0 + 1e-6], close=True)
    assert peers.losses_differ([1.0, 2.0], [1.0, 2.001], close=True) == "step 2"
    assert peers.losses_differ([1.0], [1.0, 2.0]) == "number of steps"
    assert peers.losses_differ([float("nan")], [1.0]) == "step 1"


def test_trainparity_names_a_fault_where_it_points_at_it() -> None:
    fault = FAULTS["the same data on all ranks"]
    told = Outcome("FAIL", "cross_rank_overlap")
    assert peers.judged("sample ids", told, Outcome("PASS"), fault, True).entry == peers.NAMES
    assert peers.judged("sample ids", told, Outcome("PASS"), FAULTS["last batch dropped"], True).entry == peers.SEES
    assert peers.judged("resume", Outcome("PASS"), Outcome("PASS"), fault, False).entry == peers.OUT


def test_what_trainparity_points_at_amounts_to_faults_of_the_zoo() -> None:
    for words in (words for every in peers.POINTED.values() for words in every):
        assert any(words in fault.named for fault in FAULTS.values()), words


def test_the_table_has_all_faults_and_says_where_a_tool_is_not_there() -> None:
    check = Check("FAIL", "PASS", "loss", named=True)
    made = peers.table({"one": dict.fromkeys(FAULTS, check), "other": dict.fromkeys(FAULTS)})
    assert names_in(made) == [*FAULTS]
    assert made.count("| names (loss) | ABSTAIN: not installed |") == len(FAULTS)
    assert f"* one: {len(FAULTS)} names" in made


def test_the_table_of_the_docs_has_exactly_the_faults_of_the_zoo() -> None:
    made = page.read_part("proof_peers", "docs/proof.md")
    # These came later, as the page says.
    tasks = {"averaged", "pairs", "contrast", "whole"}
    tasks |= {name for name, task in TASKS.items() if getattr(task, "__module__", "") == disguised.__name__}
    modules = (study.__name__, disguised.__name__)
    later = {name for name, fault in FAULTS.items() if fault.task in tasks or name.startswith("held-out rows")}
    later |= {name for name, fault in FAULTS.items() if fault.made.__module__ in modules}
    compared = [name for name in FAULTS if name not in later]
    assert names_in(made) == compared, "faults were added: run `python -m benchmarks.proof_peers --write`"


def names_in(table: str) -> list[str]:
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]]
