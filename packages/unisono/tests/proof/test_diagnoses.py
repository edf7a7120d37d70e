"""Every fault that can be told has a page, and every page is of a fault that can be told."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

import unisono
from unisono.cli import main
from unisono.proof.diagnoses import explain
from unisono.proof.diagnoses.remedies import REMEDIES, build_diagnosis
from unisono.runtime.errors import anchor as anchor_of
from unisono.runtime.fault_names import FaultName

SOURCE = Path(unisono.__file__).parent
DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "diagnoses.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)


def test_every_fault_has_a_remedy_and_is_named_by_a_rule_or_an_error() -> None:
    written = {"runtime/fault_names.py", "proof/diagnoses/remedies.py", "proof/scripts/judging/script_remedies.py"}
    files = [file for file in SOURCE.rglob("*.py") if file.relative_to(SOURCE).as_posix() not in written]
    named = {name for file in files for name in re.findall(r"\bFaultName\.([A-Z_]+)", file.read_text(encoding="utf-8"))}
    assert named == {fault.name for fault in FaultName}
    assert list(REMEDIES) == list(FaultName)


@pytest.mark.parametrize(
    ("words", "kind"),
    [(r" depends? on the | depend on ", "is_neutral"), (r"on the call$", "is_of_the_call"), (r"by N$", "is_factor")],
)
def test_a_name_says_what_kind_of_statement_it_is(words: str, kind: str) -> None:
    assert [fault for fault in FaultName if re.search(words, fault)] == [
        fault for fault in FaultName if getattr(build_diagnosis(fault, ""), kind)
    ]


def test_every_fault_has_one_section_and_every_section_is_of_a_fault() -> None:
    assert sorted(SECTIONS) == sorted(REMEDIES)


def test_sections_stand_in_the_order_of_the_table() -> None:
    assert list(REMEDIES) == SECTIONS


@pytest.mark.parametrize("fault", REMEDIES)
def test_a_section_is_short_and_explains(fault: FaultName) -> None:
    section = PAGE.partition(f"### {fault}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    prose = re.sub(r"```.*?```", "", section, flags=re.DOTALL).strip()
    assert 1 <= len(prose.split()) <= 160


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("A mean of means", "a-mean-of-means"),
        ("All gradients are scaled by N", "all-gradients-are-scaled-by-n"),
        ("The optimizer's state, lost", "the-optimizers-state-lost"),
        ("Half-precision all_reduce (bf16)", "half-precision-all_reduce-bf16"),
    ],
)
def test_an_anchor_is_made_as_github_makes_it(heading: str, anchor: str) -> None:
    assert anchor_of(heading) == anchor


def test_no_two_headings_have_one_anchor() -> None:
    anchors = [anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)]
    assert len(anchors) == len(set(anchors))


@pytest.mark.parametrize("file", sorted(DOCS.glob("*.md")), ids=lambda file: file.name)
def test_links_to_sections_lead_to_one(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    linked = {*re.findall(r"\(diagnoses\.md#([^)]+)\)", text)}
    if file.name == "diagnoses.md":
        linked |= {*re.findall(r"\(#([^)]+)\)", text)}
    assert linked <= {anchor_of(fault) for fault in REMEDIES}


def test_a_diagnosis_has_its_remedy_and_what_explains_it() -> None:
    told = build_diagnosis(FaultName.MEAN_OF_MEANS, "because")
    assert (told.because, told.remedy, told.more) == (
        "because",
        REMEDIES[told.fault],
        "unisono explain a-mean-of-means",
    )


def test_the_package_has_the_page_of_the_docs() -> None:
    """A wheel has no docs. After a change of the page, copy it: docs/diagnoses.md to diagnoses.txt of the package."""
    assert files("unisono.proof.diagnoses").joinpath(explain.PAGE).read_text(encoding="utf-8") == PAGE


@pytest.mark.parametrize("fault", REMEDIES)
def test_a_fault_is_explained_by_the_command_that_its_message_names(
    fault: FaultName, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(build_diagnosis(fault, "").more.split()[1:]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{fault}\n\n")
    assert not re.search(r"\]\((?!http)", told), "no link that a terminal cannot open"


def test_a_name_may_be_cut_short_and_a_wrong_one_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["explain", "A", "mean"]) == 0
    assert capsys.readouterr().out.startswith("A mean of means\n")
    assert main.main(["explain", "the-gradients-depend"]) == 2
    assert "these begin so: the-gradients-depend-on-the-call, the-gradients-" in capsys.readouterr().err
    assert main.main(["explain", "nonsense"]) == 2
    assert main.main(["explain"]) == 0
    assert capsys.readouterr().out.split() == [anchor_of(fault) for fault in REMEDIES]
