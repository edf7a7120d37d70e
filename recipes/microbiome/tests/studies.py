"""Small studies with everything known: a table, a tree whose branches are listed, and metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import biom
import h5py
import numpy as np
from numpy.typing import NDArray

from unisono_microbiome.settings import Study

# Six taxa in a rooted tree. Each branch: its length, and the taxa that are below it.
NEWICK = "(((A:1,B:2)x:0.5,C:0.25)y:1,((D:3,E:1)z:2,F:0.75)w:0.125)root;"
BRANCHES = (
    (1.0, "A"), (2.0, "B"), (0.5, "AB"), (0.25, "C"), (1.0, "ABC"), (3.0, "D"), (1.0, "E"), (2.0, "DE"), (0.75, "F"),
    (0.125, "DEF"),
)  # fmt: skip
TAXA = "ABCDEF"
DNA = ("ACGTACGTACGT", "ACGTACGTACGA", "ACGTACGTAGGT", "TTTTACGTACGT", "TTTTACGTNCGT", "GGGGACGTAC")

SAMPLES = ("s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8")
COUNTS = np.array(
    [
        [10, 0, 3, 0, 0, 1],
        [0, 7, 3, 0, 2, 0],
        [4, 4, 4, 4, 4, 4],
        [0, 0, 0, 12, 0, 0],
        [1, 0, 0, 0, 0, 30],
        [5, 5, 0, 5, 0, 5],
        [0, 0, 9, 0, 9, 0],
        [2, 0, 0, 8, 1, 1],
    ]
)
METADATA = {
    "sample_name": list(SAMPLES),
    "subject": ["u1", "u1", "u2", "u2", "u3", "u3", "u4", "u4"],
    "state": ["ill", "ill", "well", "well", "ill", "ill", "well", "well"],
    "age": ["31", "31.5", "4", "4.25", "60", "61", "7e1", "71"],
}


def write_hdf5(path: Path, counts: Any = COUNTS, samples: Sequence[str] = SAMPLES, taxa: Sequence[str] = TAXA) -> Path:
    with h5py.File(path, "w") as file:
        table(counts, samples, taxa).to_hdf5(file, "tests", creation_date=datetime(2025, 1, 1))
    return path


def write_json(path: Path, counts: Any = COUNTS, samples: Sequence[str] = SAMPLES, taxa: Sequence[str] = TAXA) -> Path:
    path.write_text(table(counts, samples, taxa).to_json("tests"), encoding="utf-8")
    return path


def table(counts: Any, samples: Sequence[str], taxa: Sequence[str]) -> biom.Table:
    return biom.Table(np.asarray(counts, dtype=np.float64).T, list(taxa), list(samples))


def write_rows(path: Path, columns: Mapping[str, Sequence[str]], separator: str = "\t") -> Path:
    lines = [list(columns), *zip(*columns.values(), strict=True)]
    path.write_text("".join(separator.join(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_matrix(path: Path, ids: Sequence[str], matrix: NDArray[np.float64]) -> Path:
    lines = ["\t".join(["", *ids])]
    lines += ["\t".join([name, *map(repr, row.tolist())]) for name, row in zip(ids, matrix, strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def study(
    folder: Path,
    counts: Any = COUNTS,
    *,
    samples: Sequence[str] = SAMPLES,
    taxa: Sequence[str] = TAXA,
    newick: str = NEWICK,
    metadata: Mapping[str, Sequence[str]] = METADATA,
    **settings: Any,
) -> Study:
    """The settings of a small study, written into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tree.nwk").write_text(newick, encoding="utf-8")
    given = {
        "table": write_hdf5(folder / "table.biom", counts, samples, taxa),
        "metadata": write_rows(folder / "metadata.tsv", metadata),
        "tree": folder / "tree.nwk",
        "cache": folder / "cache",
        "held_out": 0.25,
    }
    return Study(kind="study", **{**given, **settings})


def changed(column: str, place: int, value: str) -> dict[str, list[str]]:
    """The metadata with another value."""
    copy = json.loads(json.dumps(METADATA))
    copy[column][place] = value
    return dict(copy)


# What the metrics are, written down once more and slowly ---------------------------------------------------------


def faith_pd(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    present = [{taxon for taxon, count in zip(TAXA, row, strict=True) if count} for row in counts]
    return np.array([sum(length for length, below in BRANCHES if taxa & set(below)) for taxa in present])


def unweighted(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Length of the branches that lead to one of two samples only, of those that lead to any of them."""
    present = [{taxon for taxon, count in zip(TAXA, row, strict=True) if count} for row in counts]

    def distance(one: set[str], other: set[str]) -> float:
        either = sum(length for length, below in BRANCHES if (one | other) & set(below))
        both = sum(length for length, below in BRANCHES if one & set(below) and other & set(below))
        return (either - both) / either

    return np.array([[distance(one, other) for other in present] for one in present])


def weighted(counts: NDArray[np.int64], normalised: bool) -> NDArray[np.float64]:
    """Lengths times differences of shares; normalised by the shares times their distances to the root."""
    shares = counts / counts.sum(1, keepdims=True)
    below = np.array([[taxon in taxa for taxon in TAXA] for _, taxa in BRANCHES], dtype=np.float64)
    lengths = np.array([length for length, _ in BRANCHES])
    on_branch = shares @ below.T  # (samples, branches)
    raw = (np.abs(on_branch[:, None] - on_branch[None]) * lengths).sum(-1)
    if not normalised:
        return raw
    to_root = lengths @ below
    return raw / ((shares[:, None] + shares[None]) * to_root).sum(-1)


def bray_curtis(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    shares = counts / counts.sum(1, keepdims=True)
    return 1 - np.minimum(shares[:, None], shares[None]).sum(-1)


def jaccard(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    there = counts > 0
    return 1 - (there[:, None] & there[None]).sum(-1) / (there[:, None] | there[None]).sum(-1)


def aitchison(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    logs = np.log(counts + 1)
    centred = logs - logs.mean(1, keepdims=True)
    return np.sqrt(np.square(centred[:, None] - centred[None]).sum(-1))
