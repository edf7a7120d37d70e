"""Trees are read by scikit-bio, and refused where UniFrac would be refused later, or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.microbiome.tests.studies import NEWICK, TAXA
from unisono.runtime.errors import DataError
from unisono_microbiome.study.tree import Tree


def tree(folder: Path, newick: str) -> Tree:
    (folder / "t.nwk").write_text(newick)
    return Tree(folder / "t.nwk")


def test_taxa_that_are_no_tips_are_found(tmp_path: Path) -> None:
    found = tree(tmp_path, NEWICK)
    assert found.find_missing(TAXA) == []
    assert found.find_missing(["A", "x", "G", "F", "root"]) == ["x", "G", "root"]  # names of inner nodes are no taxa
    with pytest.raises(DataError, match=r"1 of 2 taxa \('G'\) of the table are not among the tips .*=\[not_in_tree\]"):
        found.subtree(["A", "G"])


def test_a_part_of_the_tree_keeps_the_way_to_the_root(tmp_path: Path) -> None:
    found = tree(tmp_path, NEWICK)
    part = found.subtree(["A", "C"])
    assert sorted(tip.name for tip in part.tips()) == ["A", "C"]
    assert sum(node.length for node in part.find("A").ancestors() if node.length) == 1.5
    assert found.subtree(list(TAXA)) is found.root


def test_underscores_and_quotes_belong_to_names(tmp_path: Path) -> None:
    found = tree(tmp_path, "((a_b:1,'it''s; (one)':1):1,c:1);")
    assert found.find_missing(["a_b", "it's; (one)", "c", "a b"]) == ["a b"]


@pytest.mark.parametrize(
    ("newick", "told"),
    [
        ("", "is not a tree in Newick format"),
        ("hello", "is not a tree in Newick format"),
        ("((A:1,B:1):1,C:1", "is not a tree in Newick format"),
        ("((A:1,B:x):1,C:1);", "is not a tree in Newick format: .*x"),
        ("((A,B),C);", "has no branch lengths"),
        ("((A:1,B):1,C:1);", r"has branches without a length: 1 of 4 branches \('B'\)"),
        ("((A:1,B:1),C:1);", r"branches without a length: 1 of 4 branches \('above A'\)"),
        ("((A:1,B:-0.5):1,C:1);", r"1 of 4 branches \('B:-0\.5'\) have a length below 0"),
        ("((A:1,B:nan):1,C:1);", r"1 of 4 branches \('B:nan'\) have no finite length"),
        ("((A:1e999,B:1):1,C:1);", r"1 of 4 branches \('A:inf'\) have no finite length"),
        ("((A:0,B:0):0,C:0);", "all branches have length 0"),
        ("((A:1e308,B:1e308):1,C:1);", "the sum of all lengths is not finite"),
        ("((A:1,B:1):1,C:1); (D:1,E:1);", "behind the tree.* is more"),
        ("((A:1,A:1):1,C:1);", r"1 of 3 tips \('A'\) occur more than once"),
        ("(A:1,B:1,C:1);", "has no root: 3 branches meet at the top"),
    ],
)
def test_a_tree_that_unifrac_cannot_use_is_refused(tmp_path: Path, newick: str, told: str) -> None:
    with pytest.raises(DataError, match=rf"t\.nwk \(data\.tree\).*{told}"):
        _ = tree(tmp_path, newick).root


def test_a_tree_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\(data\.tree\) does not exist; give a tree"):
        _ = Tree(tmp_path / "t.nwk").root


def test_a_tree_as_deep_as_its_file_is_refused_at_once(tmp_path: Path) -> None:
    """The name of each branch without a length was looked for among all tips below it: hours for 500 kB."""
    deep = 3000
    newick = "(" * deep + "A" + "".join(f",B{number})" for number in range(deep)) + ";"
    with pytest.raises(DataError, match="has no branch lengths"):
        _ = tree(tmp_path, newick).root


def test_what_ends_no_tree_is_no_second_one(tmp_path: Path) -> None:
    found = tree(tmp_path, "((A:1[a; b],'B;':1):1,C:1);\n")
    assert found.find_missing(["A", "B;", "C"]) == []
