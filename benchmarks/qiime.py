"""Artifacts against QIIME 2 itself, which is not on PyPI: it reads what we write, and we read what it writes.

    python -m benchmarks.qiime --python "conda run -n qiime2 python"

The command is a Python in which `import qiime2, q2_types` works; Debian 12 has both as packages (`qiime`, `q2-types`).
Prints a line for each type; a type that this release does not know is an ABSTAIN.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from unisono_microbiome.settings import Study
from unisono_microbiome.study.artifacts import write_distances, write_metadata
from unisono_microbiome.study.library import open_library

TAXA = {"A": "ACGTACGTACGT", "B": "ACGTTTGTACGT", "C": "GGGTTTGTACGT"}
SAMPLES = ["s1", "s2", "s3", "s4"]
COUNTS = np.array([[3, 0, 1], [1, 5, 0], [0, 2, 2], [7, 1, 1]])
APART = np.abs(np.subtract.outer(np.arange(4), np.arange(4))) / 8

_QIIME = f"""
import io, sys, warnings
warnings.simplefilter("ignore")
import biom, numpy as np, pandas as pd, qiime2, skbio
from qiime2 import Artifact, Metadata
print("QIIME 2", qiime2.__version__)
def check(name, act):
    try:
        print(f"{{name}}: {{'PASS' if act() else 'FAIL'}}")
    except TypeError as error:
        print(f"{{name}}: ABSTAIN ({{error}})" if "No format" in str(error) else f"{{name}}: FAIL ({{error}})")
    except Exception as error:
        print(f"{{name}}: FAIL ({{error}})")
taxa, samples, apart = {TAXA!r}, {SAMPLES!r}, np.array({APART.tolist()!r})
def distances():
    found = Artifact.load("ours.qza")
    found.validate("max")
    return np.allclose(found.view(skbio.DistanceMatrix).data, apart) and str(found.type) == "DistanceMatrix"
def is_ours(found):
    return {{n: c.type for n, c in found.columns.items()}} == {{"state": "categorical", "share": "numeric"}}
def metadata():
    found = Artifact.load("predictions.qza")
    found.validate("max")
    return is_ours(found.view(Metadata))
check("reads our DistanceMatrix", distances)
check("reads our metadata (.tsv)", lambda: is_ours(Metadata.load("predictions.tsv")))
check("reads our ImmutableMetadata", metadata)
def save(kind, value, name):
    Artifact.import_data(kind, value).save(name)
save("FeatureTable[Frequency]", biom.Table(np.array({COUNTS.T.tolist()!r}, dtype=float), [*taxa], samples), "table.qza")
save("DistanceMatrix", skbio.DistanceMatrix(apart, samples), "distances.qza")
tree = skbio.TreeNode.read(io.StringIO("((A:1,B:2):1,C:1);"))
save("Phylogeny[Rooted]", tree, "tree.qza")
dna = [skbio.DNA(one, metadata={{"id": name}}) for name, one in taxa.items()]
save("FeatureData[Sequence]", pd.Series(dna, index=[*taxa]), "fasta.qza")
lineages = pd.DataFrame({{"Taxon": ["k__" + name for name in taxa]}}, index=pd.Index([*taxa], name="Feature ID"))
save("FeatureData[Taxonomy]", lineages, "taxonomy.qza")
values = pd.Series([1.5, 2.5, 3.5, 4.5], index=samples, name="shannon")
save("SampleData[AlphaDiversity]", values, "metadata.qza")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python", help="a Python with qiime2 and q2_types")
    command = shlex.split(parser.parse_args().python)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_distances(folder / "ours.qza", SAMPLES, APART)
        for ending in (".tsv", ".qza"):
            columns: dict[str, Any] = {
                "sample-id": SAMPLES,
                "state": ["1", "2", "1", "2"],
                "share": np.linspace(0, 1, 4),
            }
            write_metadata(folder / f"predictions{ending}", columns)
        subprocess.run([*command, "-c", _QIIME], cwd=folder, check=True)
        names = ("table", "distances", "tree", "fasta", "taxonomy", "metadata")
        files = {name: folder / f"{name}.qza" for name in names}
        library = open_library(Study(kind="study", target="shannon", cache=folder, **files))
        assert library.target is not None
        pairs: list[tuple[str, Any, Any]] = [
            ("FeatureTable[Frequency]", library.counts.toarray(), COUNTS),
            ("DistanceMatrix", library.distances(), APART),
            ("FeatureData[Sequence]", library.dna(), [*TAXA.values()]),
            ("FeatureData[Taxonomy]", library.taxonomy, [f"k__{taxon}" for taxon in TAXA]),
            ("SampleData[AlphaDiversity]", library.target.values, [1.5, 2.5, 3.5, 4.5]),
            ("Phylogeny[Rooted]", library.diversity("faith_pd"), [3.0, 4.0, 4.0, 5.0]),
        ]
        for what, found, expected in pairs:
            print(f"its {what} is read: {'PASS' if np.array_equal(found, expected) else f'FAIL ({found})'}")


if __name__ == "__main__":
    main()
