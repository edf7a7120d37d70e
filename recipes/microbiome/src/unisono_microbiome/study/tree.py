"""The phylogenetic tree of the taxa, read by scikit-bio and checked for UniFrac and Faith's PD."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

from unisono import DataError, file_hash
from unisono.recipe_tools import find_duplicates, format_share, import_extra, safe_paths, wrap_native_errors
from unisono_microbiome.study import artifacts

_LARGEST = 256 << 20  # bytes of a tree, which stands in one line
_NO_ENDS = re.compile(
    r"'[^']*(?:'|\Z)|\[[^\]]*(?:\]|\Z)"
)  # labels in quotes and comments, whose semicolons end nothing


@dataclass(frozen=True)
class Tree:
    """A rooted tree with branch lengths; it is read when it is first asked for.

    Attributes:
        path: of a file in Newick format, or of a QIIME 2 artifact with one.
    """

    path: Path

    @cached_property
    def digest(self) -> str:
        """What the file holds, in hex."""
        self._check_file()
        return file_hash(self.path)

    @cached_property
    def root(self) -> Any:
        """The tree, a `skbio.TreeNode`; one without root, branch lengths or unique tips is refused."""
        self._check_file()
        nodes = import_extra("skbio", "microbiome", "data.tree").TreeNode
        with (
            wrap_native_errors(f"{self.path} (data.tree) is not a tree in Newick format"),
            warnings.catch_warnings(),
            artifacts.open_data(self.path, "data.tree") as inner,
        ):
            warnings.simplefilter("ignore")  # of a file that does not look like Newick; an error follows
            text = safe_paths.read_regular(inner, _LARGEST).decode("utf-8")
            _refuse_more(text)
            root = nodes.read(StringIO(text), format="newick", convert_underscores=False)
        self._refuse(root)
        return root

    def _check_file(self) -> None:
        artifacts.check_file(self.path, "data.tree", "a tree in Newick format, or a .qza")

    def find_missing(self, taxa: Sequence[str]) -> list[str]:
        """The taxa that are not among the tips."""
        return [taxon for taxon in taxa if taxon not in self._tips]

    def subtree(self, taxa: Sequence[str]) -> Any:
        """The part of the tree that has these taxa, its root where it was; taxa that are not in it are refused."""
        if absent := self.find_missing(taxa):
            raise DataError(format_missing(self.path, absent, len(taxa)))
        return self.root.shear(taxa, prune=False) if len(self._tips) > len(taxa) else self.root

    @cached_property
    def _tips(self) -> set[str]:
        return {tip.name for tip in self.root.tips(include_self=True)}

    def _refuse(self, root: Any) -> None:
        nodes = list(root.traverse(include_self=False))
        tips = [node for node in nodes if not node.children]
        if doubles := find_duplicates(str(tip.name) for tip in tips):
            raise DataError(f"{self.path} (data.tree): {format_share(doubles, len(tips), 'tips')} occur more than once")
        without = [_describe_node(node) for node in nodes if node.length is None]
        if without:
            whole = (
                "no branch lengths"
                if len(without) == len(nodes)
                else "branches without a length: " + format_share(without, len(nodes), "branches")
            )
            raise DataError(
                f"{self.path} (data.tree) has {whole}; UniFrac and Faith's PD are sums of lengths. Build the tree with "
                "lengths, or provide the distances with data.distances"
            )
        if endless := [f"{_describe_node(node)}:{node.length:g}" for node in nodes if not math.isfinite(node.length)]:
            raise DataError(
                f"{self.path} (data.tree): {format_share(endless, len(nodes), 'branches')} have no finite length; "
                "write the tree again"
            )
        if negative := [f"{_describe_node(node)}:{node.length:g}" for node in nodes if node.length < 0]:
            raise DataError(
                f"{self.path} (data.tree): {format_share(negative, len(nodes), 'branches')} have a length below 0; "
                "set them to 0"
            )
        total = sum(node.length for node in nodes)
        if not math.isfinite(total):
            raise DataError(f"{self.path} (data.tree): the sum of all lengths is not finite; write the tree again")
        if not total > 0:
            raise DataError(f"{self.path} (data.tree): all branches have length 0, so all distances would be 0")
        if len(root.children) > 2:
            raise DataError(
                f"{self.path} (data.tree) has no root: {len(root.children)} branches meet at the top. Root it, e.g. by "
                "`qiime phylogeny midpoint-root`"
            )


def format_missing(path: Path, absent: Sequence[str], taxa: int) -> str:
    """The message about taxa that are not in the tree."""
    return (
        f"{format_share(absent, taxa, 'taxa')} of the table are not among the tips of {path} (data.tree): give the "
        "tree of this table, or skip them with data.leave_out=[not_in_tree]"
    )


def _refuse_more(text: str) -> None:
    """Refuse what stands behind the first tree, which readers leave out without a word."""
    more = _NO_ENDS.sub("", text).partition(";")[2].strip()
    if more:
        raise ValueError(f"behind the tree, which ends at the first ';', is more ({more[:20]!r}); give one tree")


def _describe_node(node: Any) -> str:
    """A node's name, or that of a tip below it; one step after the other, as a tree may be as deep as its file."""
    first = node
    while first.children:
        first = first.children[0]
    return str(node.name or (f"above {first.name}" if first is not node and first.name else "?"))
